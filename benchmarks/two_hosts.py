"""Compares strategies, and PyTorch's DistributedDataParallel, on two hosts and a slow network.

    python -m benchmarks.two_hosts --rate=1 [--rounds=3] [--python=PATH] [--record=FILE]

The hosts are two network namespaces of this machine with one half of its cores each; what they
send is limited to `--rate` Gbit/s. `tfdist.launch` starts every configuration on both of them, with
`--hosts`. Prints a Markdown table of medians over rounds, each of which measures every
configuration; `--record` keeps the rounds, and adds to those of earlier calls. `--python` is the
interpreter that has PyTorch; without it, PyTorch is left out. Needs root and iproute2.
"""

import argparse
import dataclasses
import json
import os
import shlex
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.replicas import format_ms
from tests.two_hosts import ADDRESSES, TwoHosts, UnavailableError, two_hosts
from tfdist.benchmark.options import MeasuredModelOptions
from tfdist.cli.quiet import start_tensorflow_quietly
from tfdist.cluster import read_environment
from tfdist.launch.machine import describe_machine

MODEL = MeasuredModelOptions(base_filters=16, global_batch_size=16)
WARMUP_STEPS = 9  # local SGD traces its first sync after 8
TIMEOUT_S = 300.0
PYTORCH = Path(__file__).with_name("pytorch_unet.py")
WORKERS = {"worker:0": 0, "worker:1": 1}  # task -> host
# A worker on each host; the chief and the server, which compute little, are apart.
SERVERS = {"chief:0": 0, "worker:0": 0, "worker:1": 1, "ps:0": 1}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One configuration to measure.

    Attributes:
      strategy: a strategy of `tfdist.train`, or `eager` or `compiled` for PyTorch.
      flags: options of the strategy.
      compress_gradients, norm: see `tfdist.train`.
      batch: the global batch size.
      tasks: task -> the host that it runs on.
    """

    strategy: str = "multi_worker_mirrored"
    flags: dict[str, Any] = dataclasses.field(default_factory=dict)
    compress_gradients: bool = False
    norm: str = "sync_batch"
    batch: int = MODEL.global_batch_size
    tasks: dict[str, int] = dataclasses.field(default_factory=lambda: WORKERS)

    @property
    def is_pytorch(self) -> bool:
        """Whether PyTorch trains."""
        return self.strategy in ("eager", "compiled")


ALONE = "one host alone, half the batch"
CASES = {
    ALONE: Case(strategy="one_device", batch=8, tasks={"worker:0": 0}),
    "`multi_worker_mirrored`": Case(),
    "`multi_worker_mirrored --compress_gradients`": Case(compress_gradients=True),
    # As PyTorch does, each host normalizes its own examples.
    "`multi_worker_mirrored --norm=batch`": Case(norm="batch"),
    "`multi_worker_mirrored --norm=batch --bytes_per_pack=0`": Case(
        norm="batch", flags={"bytes_per_pack": 0}
    ),
    "`multi_worker_mirrored --norm=batch --compress_gradients`": Case(
        norm="batch", compress_gradients=True
    ),
    "`local_sgd`, `--sync_every=8`": Case(strategy="local_sgd"),
    "`parameter_server`, one server": Case(strategy="parameter_server", tasks=SERVERS),
    "PyTorch DDP, eager": Case(strategy="eager"),
    "PyTorch DDP, compiled": Case(strategy="compiled"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rate", type=float, required=True, help="Gbit/s that each host sends")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8, help="measured steps per round")
    parser.add_argument("--python", default="", help="the interpreter with PyTorch")
    parser.add_argument("--record", default="", metavar="FILE", help="adds to earlier rounds")
    flags = parser.parse_args()
    cases = {name: c for name, c in CASES.items() if flags.python or not c.is_pytorch}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in cases}
    record = Path(flags.record or os.devnull)
    for line in record.read_text().splitlines() if record.exists() else ():
        name, finding = json.loads(line)
        found[name].append(finding)
    done = len(found[ALONE])
    try:
        with two_hosts() as hosts:
            hosts.set_rate(flags.rate)
            reached = measure_network(hosts)
            for number in range(done, done + flags.rounds):
                for name in list(cases)[:: 1 if number % 2 == 0 else -1]:
                    finding = run_case(hosts, cases[name], steps=flags.steps, python=flags.python)
                    found[name].append(finding)
                    print(name, finding, sep="; ", file=sys.stderr, flush=True)
                    with record.open("a") as file:
                        file.write(json.dumps([name, finding]) + "\n")
    except UnavailableError as error:
        raise SystemExit(f"Cannot make two hosts: {error}.") from None
    print(
        f"{describe_machine()}; {flags.rate:g} Gbit/s, of which one TCP connection reaches "
        f"{reached:.2g}; medians of {done + flags.rounds} rounds of {flags.steps} steps\n"
    )
    print("| | examples/s | range | of twice one host | all-reduce alone, ms |")
    print("|---|---|---|---|---|")
    for name, findings in found.items():
        print(format_row(name, findings, found[ALONE]))
    return int(any("error" in finding for findings in found.values() for finding in findings))


def format_row(name: str, findings: list[dict[str, Any]], alone: list[dict[str, Any]]) -> str:
    """Returns a row of the table."""
    rates = [f["examples_per_second"] for f in findings if "examples_per_second" in f]
    below = [f["examples_per_second"] for f in alone if "examples_per_second" in f]
    if not rates or not below:
        return f"| {name} | failed | | | |"
    share = statistics.median(rates) / 2 / statistics.median(below)
    times = [f["all_reduce_s"] for f in findings if f.get("all_reduce_s")]
    return (
        f"| {name} | {statistics.median(rates):.1f} | {min(rates):.1f}-{max(rates):.1f} "
        f"| {'-' if name == ALONE else format(share, '.2f')} "
        f"| {format_ms(statistics.median(times) if times else None)} |"
    )


def run_case(hosts: TwoHosts, case: Case, *, steps: int, python: str) -> dict[str, Any]:
    """Measures one configuration once; `error` says why it failed."""
    task = {
        "case": dataclasses.asdict(case),
        "model": {name: getattr(MODEL, name) for name in ("num_classes", "base_filters", "depth")},
        "image_size": list(MODEL.image_size),
        "compiled": case.strategy == "compiled",
        "bfloat16": False,
        "global_batch_size": case.batch,
        "warmup_steps": WARMUP_STEPS,
        "steps": steps,
    }
    command = [sys.executable, "-m", "benchmarks.two_hosts", "measure"]
    if case.is_pytorch:
        command = [python, str(PYTORCH), "measure"]
    return run_on_hosts(hosts, task, command, case.tasks)


def run_on_hosts(
    hosts: TwoHosts, task: dict[str, Any], command: Sequence[str], tasks: dict[str, int]
) -> dict[str, Any]:
    """Runs a command in a cluster on both hosts; see `tfdist.launch.call.call_in_cluster`.

    Args:
      hosts: the hosts.
      task: the contents of `task.json` in a directory, which is the command's last argument.
      command: the command and its other arguments.
      tasks: task of the cluster -> the host that it runs on; the chief first.

    Returns:
      The contents of `result.json` in the directory, or only `error`, if it failed.
    """
    with tempfile.TemporaryDirectory(prefix="tfdist-two-hosts-") as directory:
        (Path(directory) / "task.json").write_text(json.dumps(task))
        text = ",".join(
            f"{name.split(':')[0]}={ADDRESSES[host]}:{2222 + number}"
            for number, (name, host) in enumerate(tasks.items())
        )
        logs = [Path(directory) / f"{name}.log" for name in tasks]
        processes = []
        line = shlex.join([*command, directory])
        for (name, host), log in zip(tasks.items(), logs, strict=True):
            rest = [f"--command={line}", f"--timeout_s={TIMEOUT_S:g}"]
            # PyTorch would choose the loopback device.
            variables = {"GLOO_SOCKET_IFNAME": hosts.devices[host], "TMPDIR": directory}
            with log.open("wb") as output:
                processes.append(
                    subprocess.Popen(
                        hosts.launch(host, text, name, *rest),
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        env={**read_environment(), **variables},
                    )
                )
        failed = processes[0].wait()
        for process in processes[1:]:
            if "ps:0" in tasks:
                process.terminate()  # workers and servers serve until they are ended
            process.wait()
        result = Path(directory) / "result.json"
        if failed or not result.exists():
            return {"error": "\n".join(log.read_text()[-500:] for log in logs)}
        return json.loads(result.read_text())


def measure(directory: str) -> int:
    """Trains as `task.json` says, in each process of tfdist; the chief writes the result."""
    task = json.loads((Path(directory) / "task.json").read_text())
    case = Case(**task["case"])
    start_tensorflow_quietly()
    import numpy as np

    from tfdist.benchmark.measuring import build_model, make_batches
    from tfdist.runs import processes
    from tfdist.runs.clock import Clock
    from tfdist.runs.options import TrainOptions
    from tfdist.strategies.options import make_strategy_options
    from tfdist.strategies.servers import run_server
    from tfdist.training.fit.trainer import Trainer
    from tfdist.training.step_options import StepOptions

    options, config = processes.start_process(
        TrainOptions(
            strategy=make_strategy_options(strategy=case.strategy, **case.flags),
            step=StepOptions(compress_gradients=case.compress_gradients),
        )
    )
    if case.strategy == "parameter_server" and config and not config.is_chief:
        run_server(config)
        return 0
    model = dataclasses.replace(MODEL, global_batch_size=case.batch, norm=case.norm)
    clock, steps = Clock(), WARMUP_STEPS + task["steps"]
    # Local SGD syncs at the end of an epoch, too, which must not be among the measured steps.
    places = np.arange(case.batch * (steps + 1))
    x, y = (part[places % len(part)] for part in make_batches(model))
    trainer = Trainer(
        lambda: build_model(model),
        strategy=processes.build_strategy(options),
        step_options=options.step,
    )
    trainer.fit(
        x, y, global_batch_size=case.batch, max_steps=steps + 1, callbacks=[clock], verbose=0
    )
    found = {
        "examples_per_second": clock.measure_rate(WARMUP_STEPS, steps) * case.batch,
        "all_reduce_s": trainer.engine.measure_all_reduce(),
    }
    if config is None or config.is_chief:
        (Path(directory) / "result.json").write_text(json.dumps(found))
    return 0


def measure_network(hosts: TwoHosts, *, seconds: float = 3.0) -> float:
    """Returns the Gbit/s of one TCP connection between the hosts."""
    script = [sys.executable, "-m", "benchmarks.two_hosts"]
    with subprocess.Popen(
        hosts.on(1, [*script, "receive"]), stdout=subprocess.PIPE, text=True
    ) as receiver:
        assert receiver.stdout is not None
        receiver.stdout.readline()  # it listens
        subprocess.run(hosts.on(0, [*script, "send", str(seconds)]), check=True)
        return float(receiver.stdout.readline())


def send(seconds: str) -> int:
    """Sends for some seconds to the other host."""
    block = bytes(1 << 20)
    with socket.create_connection((ADDRESSES[1], 2222)) as connection:
        until = time.monotonic() + float(seconds)
        while time.monotonic() < until:
            connection.sendall(block)
    return 0


def receive() -> int:
    """Receives from the other host, and prints the Gbit/s."""
    with socket.create_server((ADDRESSES[1], 2222)) as server:
        print("ready", flush=True)
        with server.accept()[0] as connection:
            began, count = time.monotonic(), 0
            while data := connection.recv(1 << 20):
                count += len(data)
            print(count * 8 / 1e9 / (time.monotonic() - began))
    return 0


if __name__ == "__main__":
    PARTS = {"measure": measure, "send": send, "receive": receive}
    part = PARTS.get(sys.argv[1] if len(sys.argv) > 1 else "")
    sys.exit(part(*sys.argv[2:]) if part else main())
