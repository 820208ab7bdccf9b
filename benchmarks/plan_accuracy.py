"""Compares `tfdist.plan` with measured steps and memory on this machine.

    python -m benchmarks.plan_accuracy [--models=unet,resnet50,mlp] [--rounds=2]

Measures the machine as `plan --calibrate` does, with each model on one device only; predicts the
strategies; and then runs them. Each measurement has its own processes; the fastest of the rounds
counts, because other programs can only slow a step down. For slow networks, the model is measured
on one half of the cores, and links and steps on the two hosts of `benchmarks.two_hosts`, which need
root and iproute2. Prints a Markdown table.
"""

import argparse
import contextlib
import dataclasses
import functools
import os
import statistics
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from benchmarks.two_hosts import SERVERS, WORKERS, run_on_hosts
from tests.two_hosts import UnavailableError, two_hosts
from tfdist.benchmark.machine import describe_machine
from tfdist.cli.flags import parse_flags
from tfdist.cli.quiet import start_tensorflow_quietly
from tfdist.errors import TrainingError
from tfdist.launch.machine import divide_cores
from tfdist.plan.calibrate import (
    MEASURE,
    TWO_DEVICES,
    add_model,
    make_task,
    measure_hardware,
    run,
)
from tfdist.plan.estimate import estimate
from tfdist.plan.hardware import Hardware, Link
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
    "multi_worker_mirrored x2, compressed": Case(
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
        f"{name}, {rate:g} Gbit/s": dataclasses.replace(case, gbit_per_s=rate)
        for rate in (25.0, 1.0, 0.2)
        for name, case in _WORKERS.items()
    },
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--setups", default="", help="only those whose names contain one of these")
    parser.add_argument("--rounds", type=int, default=2)
    flags = parser.parse_args()
    start_tensorflow_quietly()
    print(f"{describe_machine()}, the fastest of {flags.rounds} rounds\n")
    heads = ("predicted, ms", "measured, ms", "error", "predicted, MiB", "measured, MiB", "error")
    print(f"| model | setup | {' | '.join(heads)} |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    errors: tuple[list[float], list[float]] = ([], [])
    models, parts = flags.models.split(","), flags.setups.split(",")
    chosen = {name: case for name, case in CASES.items() if any(part in name for part in parts)}
    machine = measure_hardware(MODELS[models[0]], say=_say)
    machine = dataclasses.replace(machine, examples_per_s=0.0)  # examples are kept in memory
    for model in models:
        compare(model, machine, chosen, rounds=flags.rounds, errors=errors)
    for what, found in zip(("steps", "memory"), errors, strict=True):
        within = sum(abs(error) <= 0.15 for error in found)
        middle = statistics.median(map(abs, found))
        print(f"{what}: {within} of {len(found)} within 15 %, median {middle:.1%}")
    return 0


def compare(
    model: str,
    hardware: Hardware,
    cases: Mapping[str, Case],
    *,
    rounds: int,
    errors: tuple[list[float], list[float]],
) -> None:
    """Prints a model's rows, and adds their errors to those of steps and of memory."""
    from tfdist.plan.subject import make_workload

    arguments = MODELS[model]
    workload = make_workload(parse_flags(TrainOptions, arguments), hardware)
    host = dataclasses.replace(hardware, shares_cores=False, devices_per_machine=1)
    if any(case.gbit_per_s for case in cases.values()):
        with half_of_the_cores():
            host = add_model(host, workload, arguments, rounds=rounds, say=_say)
    hardware = add_model(hardware, workload, arguments, rounds=rounds, say=_say)
    _say(str(dataclasses.replace(hardware, source="")))
    _say(str(host.measured))
    for name, case in cases.items():
        try:
            chosen = hardware
            if case.gbit_per_s:
                chosen = dataclasses.replace(host, between=measure_link(case.gbit_per_s))
            share = 0.5 if "--compress_gradients" in case.flags else 1.0
            sent = dataclasses.replace(workload, compressed=share)
            found = estimate(case.setup, sent, chosen)
            if found.refusal:
                raise TrainingError(found.refusal)
            measured = min(
                (measure("steps", [*arguments, *case.flags], case) for _ in range(rounds)),
                key=lambda finding: finding["step_s"],
            )
        except TrainingError as error:
            print(f"| {model} | {name} | {error} | | | | | |", flush=True)
            continue
        predicted_s = workload.global_batch_size / found.examples_per_s
        errors[0].append(predicted_s / measured["step_s"] - 1)
        cells = [
            f"{predicted_s * 1e3:.1f}",
            f"{measured['step_s'] * 1e3:.1f}",
            f"{errors[0][-1]:+.0%}",
        ]
        if not case.setup.servers:  # its chief does not compute
            errors[1].append(found.memory.total / measured["peak_memory_bytes"] - 1)
            cells += [
                f"{found.memory.total / 2**20:.0f}",
                f"{measured['peak_memory_bytes'] / 2**20:.0f}",
                f"{errors[1][-1]:+.0%}",
            ]
        print(f"| {model} | {name} | {' | '.join(cells)} |", flush=True)


def measure(what: str, arguments: list[str], case: Case) -> dict[str, float]:
    """Returns what `tfdist.plan.measure` finds with the processes and the network of a case.

    Raises:
      TrainingError: the measurement failed.
    """
    if not case.gbit_per_s:
        setup = case.setup
        return run(what, arguments, workers=setup.workers, ps=setup.servers, say=_say)
    _say(f"Measuring {what} at {case.gbit_per_s:g} Gbit/s: {' '.join(arguments)}")
    try:
        with two_hosts() as hosts:
            hosts.set_rate(case.gbit_per_s)
            tasks = SERVERS if case.setup.servers else WORKERS
            found = run_on_hosts(hosts, make_task(what, arguments), MEASURE, tasks)
    except UnavailableError as error:
        raise TrainingError(f"no two hosts: {error}") from None
    if "error" in found:
        raise TrainingError(found["error"].splitlines()[-1])
    return found


@contextlib.contextmanager
def half_of_the_cores() -> Iterator[None]:
    """Keeps this process, and those that it starts, on the cores of the first of two hosts."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, divide_cores(sorted(cores), 2)[0] or cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


@functools.cache
def measure_link(gbit_per_s: float) -> Link:
    """Returns the link between the two hosts, which does not depend on the model."""
    case = next(case for case in CASES.values() if case.gbit_per_s == gbit_per_s)
    found = measure("links", ["--dataset=shapes", *case.flags], case)
    return Link(found["bytes_per_s"], found["latency_s"])


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
