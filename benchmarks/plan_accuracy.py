"""Compares `tfdist.plan` with measured steps and memory on this machine.

    python -m benchmarks.plan_accuracy [--models=unet,resnet50,mlp] [--rounds=2] [--record=FILE]

Measures the machine as `plan --calibrate` does, with each model on one device only; predicts the
strategies; and compares the predictions with measurements. Each measurement has its own processes.
A round measures everything once, and the fastest of the rounds counts, because other programs can
only slow a step down; of memory, the mean. For slow networks, links and steps are measured on the
two hosts of `benchmarks.two_hosts`, which need root and iproute2. Prints a Markdown table.
`--record` keeps the measurements, and does not repeat those that it has.
"""

import argparse
import collections
import dataclasses
import fnmatch
import json
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.two_hosts import WORKERS, run_on_hosts
from tests.two_hosts import UnavailableError, two_hosts
from tfdist.cli.flags import parse_flags
from tfdist.cli.quiet import start_tensorflow_quietly
from tfdist.errors import TrainingError
from tfdist.launch.machine import describe_machine
from tfdist.plan.calibrate import (
    MEASURE,
    TWO_DEVICES,
    add_model,
    find_half,
    list_sizes,
    make_task,
    measure_hardware,
    run,
    run_on_halves,
)
from tfdist.plan.estimate import estimate
from tfdist.plan.hardware import Link
from tfdist.plan.setup import Setup
from tfdist.runs.options import TrainOptions

MODELS = {
    "unet": (
        "--dataset=shapes",
        "--image_size=64,64",
        "--base_filters=16",
        "--depth=3",
        "--train_examples=128",
        "--val_examples=16",
        "--global_batch_size=16",
    ),
    "resnet50": (
        "--task=classification",
        "--model=ResNet50",
        "--image_size=64,64",
        "--train_examples=64",
        "--val_examples=16",
        "--global_batch_size=16",
    ),
    "mlp": ("--task=benchmarks/mlp_task.py:Mlp", "--global_batch_size=256"),
}
_ANY = ("--dataset=shapes",)  # the machine and its links do not depend on the model
_SERVER_TASKS = {"chief:0": 0, "worker:0": 0, "ps:0": 1}  # task -> host
_ONE_OF_TWO = ("--strategy=one_device", "--virtual_devices=2", "--devices=CPU:0")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A setup, and the flags and network that run it."""

    setup: Setup
    flags: tuple[str, ...]
    gbit_per_s: float = 0.0  # what each of two hosts sends at most; 0 for one host


_WORKERS = {
    "multi_worker_mirrored x2": Case(
        setup=Setup(strategy="multi_worker_mirrored", workers=2),
        flags=("--strategy=multi_worker_mirrored",),
    ),
    "multi_worker_mirrored x2 compressed": Case(
        setup=Setup(strategy="multi_worker_mirrored", workers=2),
        flags=("--strategy=multi_worker_mirrored", "--compress_gradients"),
    ),
    "parameter_server 2+1": Case(
        setup=Setup(strategy="parameter_server", workers=2, servers=1),
        flags=("--strategy=parameter_server",),
    ),
    "local_sgd x2": Case(
        setup=Setup(strategy="local_sgd", workers=2), flags=("--strategy=local_sgd",)
    ),
}
_SERVER = Case(
    setup=Setup(strategy="parameter_server", workers=1, servers=1),
    flags=("--strategy=parameter_server",),
)
CASES = {
    "one_device": Case(setup=Setup(strategy="one_device"), flags=("--strategy=one_device",)),
    "mirrored x2": Case(setup=Setup(strategy="mirrored", replicas=2), flags=TWO_DEVICES),
    **_WORKERS,
    "layers x2": Case(
        setup=Setup(strategy="one_device", placement="layers", parts=2),
        flags=(*_ONE_OF_TWO, "--placement=layers"),
    ),
    "strips x2": Case(
        setup=Setup(strategy="one_device", placement="strips", parts=2),
        flags=(*_ONE_OF_TWO, "--placement=strips"),
    ),
    **{
        f"{name} at {rate:g} Gbit/s": dataclasses.replace(case, gbit_per_s=rate)
        for rate in (25.0, 1.0, 0.2)
        for name, case in {**_WORKERS, "parameter_server 1+1": _SERVER}.items()
        if name != "parameter_server 2+1"  # with two hosts, one worker would be on the server's
    },
}


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One measurement of `tfdist.plan.measure`.

    Attributes:
      name: of the setup; empty for what predictions start from.
      what: what it measures.
      flags: of `tfdist.train`.
      workers, servers: the processes.
      gbit_per_s: see `Case`.
      on_half: whether it has one half of the cores, as each of two hosts, beside another.
    """

    what: str
    flags: tuple[str, ...]
    name: str = ""
    workers: int = 1
    servers: int = 0
    gbit_per_s: float = 0.0
    on_half: bool = False

    def run(self) -> dict[str, Any]:
        """Returns what it finds, or only `error`."""
        try:
            if self.gbit_per_s:
                with two_hosts() as hosts:
                    hosts.set_rate(self.gbit_per_s)
                    tasks = _SERVER_TASKS if self.servers else WORKERS
                    return run_on_hosts(hosts, make_task(self.what, self.flags), MEASURE, tasks)
            if self.on_half:
                return run_on_halves(self.what, self.flags)
            return run(self.what, self.flags, workers=self.workers, ps=self.servers)
        except UnavailableError as error:
            return {"error": f"no two hosts: {error}"}
        except TrainingError as error:
            return {"error": str(error)}


class Findings:
    """What was found in each round, which a file keeps."""

    def __init__(self, record: str):
        self._record = Path(record or os.devnull)
        self._found: dict[str, list[dict[str, Any]]] = {}
        for line in self._record.read_text().splitlines() if self._record.exists() else ():
            key, finding = json.loads(line)
            self._found.setdefault(key, []).append(finding)

    def measure(self, measurements: Sequence[Measurement], *, rounds: int) -> None:
        """Measures what was not measured in so many rounds, in reverse order in every other."""
        for number in range(rounds):
            for place, one in enumerate(measurements[:: 1 if number % 2 == 0 else -1]):
                found = self._found.setdefault(str(one), [])
                if len(found) > number:
                    continue
                _say(f"Round {number + 1}, {place + 1} of {len(measurements)}: {one}")
                found.append(one.run())
                _say(str(found[-1]))
                with self._record.open("a") as file:
                    file.write(json.dumps([str(one), found[-1]]) + "\n")

    def best(self, one: Measurement) -> dict[str, float]:
        """Returns the fastest finding, with the mean memory of all of them.

        Raises:
          TrainingError: it failed.
        """
        found = self._found[str(one)]
        failed = [finding["error"] for finding in found if "error" in finding]
        if failed:
            raise TrainingError(failed[0].splitlines()[-1])
        if one.what == "steps":
            memory = statistics.mean(finding["peak_memory_bytes"] for finding in found)
            fastest = min(found, key=lambda finding: finding["step_s"])
            return {**fastest, "peak_memory_bytes": memory}
        best = {"latency_s": min}
        return {key: best.get(key, max)(f[key] for f in found) for key in found[0]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--setups", default="*", help="patterns of names, such as *x2,*1 Gbit/s")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--record", default="", metavar="FILE", help="adds to earlier rounds")
    flags = parser.parse_args()
    start_tensorflow_quietly()
    models, parts = flags.models.split(","), flags.setups.split(",")
    cases = {n: c for n, c in CASES.items() if any(fnmatch.fnmatchcase(n, part) for part in parts)}
    found = Findings(flags.record)
    found.measure(list_measurements(models, cases), rounds=flags.rounds)
    print(f"{describe_machine()}, the fastest of {flags.rounds} rounds\n")
    heads = ("predicted, ms", "measured, ms", "error", "predicted, MiB", "measured, MiB", "error")
    print(f"| model | setup | {' | '.join(heads)} |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    errors: tuple[list[float], list[float]] = ([], [])
    for model in models:
        compare(model, cases, found, errors=errors)
    for what, each in zip(("steps", "memory"), errors, strict=True):
        within = sum(abs(error) <= 0.15 for error in each)
        middle = statistics.median(map(abs, each))
        print(f"{what}: {within} of {len(each)} within 15 %, median {middle:.1%}")
    return 0


def list_measurements(models: Sequence[str], cases: Mapping[str, Case]) -> list[Measurement]:
    """Returns all that some models and cases need, without repetitions."""
    needed: dict[Measurement, None] = {}

    def note(what: str, flags: Sequence[str], workers: int = 1) -> dict[str, float]:
        needed[Measurement(what=what, flags=tuple(flags), workers=workers)] = None
        return collections.defaultdict(lambda: 1.0)

    measure_hardware(_ANY, measure=note)
    slow = [case for case in cases.values() if case.gbit_per_s]
    needed.update({_measure_link(case.gbit_per_s): None for case in slow})
    for model in models:
        for half in (False, True):
            needed.update(dict.fromkeys(_measure_sizes(model, on_half=half)))
        needed.update({_measure_case(model, name): None for name in cases})
    return list(needed)


def compare(
    model: str,
    cases: Mapping[str, Case],
    found: Findings,
    *,
    errors: tuple[list[float], list[float]],
) -> None:
    """Prints a model's rows, and adds their errors to those of steps and of memory."""
    from tfdist.plan.subject import make_workload

    def measure(what: str, flags: Sequence[str], workers: int = 1) -> dict[str, float]:
        return found.best(Measurement(what=what, flags=tuple(flags), workers=workers))

    machine = measure_hardware(_ANY, measure=measure)
    machine = dataclasses.replace(machine, examples_per_s=0.0)  # examples are kept in memory
    workload = make_workload(parse_flags(TrainOptions, MODELS[model]), machine)
    sizes = [found.best(one) for one in _measure_sizes(model)]
    on_half = [found.best(one) for one in _measure_sizes(model, on_half=True)]
    hardware = add_model(machine, workload, *sizes)
    hardware = add_model(hardware, workload, *on_half, share=find_half())
    _say(str(dataclasses.replace(hardware, source="")))
    for name, case in cases.items():
        try:
            chosen = hardware
            if case.gbit_per_s:
                link = found.best(_measure_link(case.gbit_per_s))
                host = dataclasses.replace(
                    machine,
                    shares_cores=False,
                    devices_per_machine=1,
                    between=Link(link["bytes_per_s"], link["latency_s"]),
                )
                chosen = add_model(host, workload, *on_half)
            sent = 0.5 if "--compress_gradients" in case.flags else 1.0
            guess = estimate(case.setup, dataclasses.replace(workload, compressed=sent), chosen)
            if guess.refusal:
                raise TrainingError(guess.refusal)
            measured = found.best(_measure_case(model, name))
        except TrainingError as error:
            print(f"| {model} | {name} | {error} | | | | | |", flush=True)
            continue
        predicted_s = workload.global_batch_size / guess.examples_per_s
        errors[0].append(predicted_s / measured["step_s"] - 1)
        cells = [
            f"{predicted_s * 1e3:.1f}",
            f"{measured['step_s'] * 1e3:.1f}",
            f"{errors[0][-1]:+.0%}",
        ]
        if not case.setup.servers:  # its chief does not compute
            errors[1].append(guess.memory.total / measured["peak_memory_bytes"] - 1)
            cells += [
                f"{guess.memory.total / 2**20:.0f}",
                f"{measured['peak_memory_bytes'] / 2**20:.0f}",
                f"{errors[1][-1]:+.0%}",
            ]
        print(f"| {model} | {name} | {' | '.join(cells)} |", flush=True)


def _measure_sizes(model: str, *, on_half: bool = False) -> list[Measurement]:
    batch = parse_flags(TrainOptions, MODELS[model]).training.global_batch_size
    return [
        Measurement(what="steps", flags=tuple(flags), on_half=on_half)
        for flags in list_sizes(MODELS[model], batch)
    ]


def _measure_case(model: str, name: str) -> Measurement:
    case = CASES[name]
    return Measurement(
        name=name,
        what="steps",
        flags=(*MODELS[model], *case.flags),
        workers=case.setup.workers,
        servers=case.setup.servers,
        gbit_per_s=case.gbit_per_s,
    )


def _measure_link(gbit_per_s: float) -> Measurement:
    """Returns the measurement of the link between the two hosts, which no model changes."""
    flags = (*_ANY, "--strategy=multi_worker_mirrored")
    return Measurement(what="links", flags=flags, workers=2, gbit_per_s=gbit_per_s)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
