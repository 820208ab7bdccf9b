"""Measures this machine with a training command's model, and writes a file for `--hardware`."""

import concurrent.futures
import dataclasses
import functools
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from tfdist.cli.flags import drop_flags
from tfdist.errors import TfdistError, TrainingError
from tfdist.launch.call import call_in_cluster, make_command
from tfdist.launch.machine import (
    check_core_choice,
    count_cores,
    describe_machine,
    divide_cores,
    keep_on_cores,
    list_cores,
)
from tfdist.plan.compute import count_parameters
from tfdist.plan.estimate import estimate
from tfdist.plan.hardware import Hardware, Link, Measured, format_hardware
from tfdist.plan.options import PlanOptions
from tfdist.plan.setup import Setup
from tfdist.plan.training_command import ALONE, CHOSEN
from tfdist.plan.workload import Workload
from tfdist.records.durable_files import write_output
from tfdist.runs.options import TrainOptions

_STEPS = 16
_ROUNDS = 2
_TIMEOUT_S = 300.0
MEASURE = make_command("tfdist.plan.measure:measure")
TWO_DEVICES = ("--strategy=mirrored", "--virtual_devices=2", "--devices=CPU:0,CPU:1")


def calibrate(options: PlanOptions, train: TrainOptions, arguments: Sequence[str]) -> None:
    """Measures this machine and writes the file.

    Raises:
      TfdistError: the command is invalid, this system cannot, or an accelerator is visible.
      TrainingError: a measurement failed.
    """
    from tfdist.devices import ACCELERATORS, list_devices
    from tfdist.plan.subject import make_workload

    check_core_choice()
    found = [name for name in list_devices() if name.partition(":")[0] in ACCELERATORS]
    if found:
        raise TfdistError(
            f"`calibrate` measures processors, but {found[0]} is visible. Hide it with "
            "CUDA_VISIBLE_DEVICES=-1, or plan with the `hardware` of its kind."
        )
    if train.training.precision == "auto":
        raise TfdistError(
            "`calibrate` measures one precision. Name it instead of `precision=auto`."
        )
    say = None if options.run.quiet else _print
    arguments = drop_flags(arguments, CHOSEN, ALONE)
    measure = functools.partial(run, say=say)
    hardware = measure_hardware(arguments, precision=train.training.precision, measure=measure)
    workload = make_workload(train, hardware)
    sizes = list_sizes(arguments, workload.global_batch_size)
    # In turns: a machine that others use, too, is faster at some times than at others.
    shares = {1.0: measure}
    if hardware.devices_per_machine > 1:
        shares[find_half()] = functools.partial(run_on_halves, say=say)
    for share, measure_share in shares.items():
        steps = [[measure_share("steps", flags) for flags in sizes] for _ in range(_ROUNDS)]
        whole, part = (
            min(found, key=lambda one: one["step_s"]) for found in zip(*steps, strict=True)
        )
        hardware = add_model(hardware, workload, whole, part, share=share)
    write_output(options.run.calibrate, format_hardware(hardware))
    if say:
        say(f"Wrote {options.run.calibrate}: give it as --hardware={options.run.calibrate}.")


def measure_hardware(
    arguments: Sequence[str], *, precision: str = "float32", measure: Any
) -> Hardware:
    """Returns this machine's processor and its links, between processes and virtual devices."""
    machine = measure("machine", [*arguments, "--strategy=one_device"])
    between = measure("links", [*arguments, "--strategy=multi_worker_mirrored"], workers=2)
    inside = measure("links", [*arguments, *TWO_DEVICES])
    near = Link(inside["bytes_per_s"], inside["latency_s"])
    return Hardware(
        title=describe_machine(),
        source="measured by python -m tfdist.plan --calibrate",
        devices_per_machine=count_cores(),
        flops_per_s={precision: machine["flops_per_s"]},
        memory_bytes=machine["memory_bytes"],
        memory_bytes_per_s=machine["memory_bytes_per_s"],
        inside=near,
        between=Link(between["bytes_per_s"], between["latency_s"]),
        host=near,
        shares_cores=True,
        sends_itself=True,
        peak_share=1.0,
        memory_share=1.0,
        link_share=1.0,
        host_s=0.0,
        examples_per_s=machine["examples_per_s"],
    )


def list_sizes(arguments: Sequence[str], batch: int) -> tuple[list[str], list[str]]:
    """Returns the flags that train a model on one device with its batch, and with a part of it."""
    given = [*arguments, "--strategy=one_device"]
    return given, [*given, f"--global_batch_size={_take_part(batch)}"]


def add_model(
    hardware: Hardware,
    workload: Workload,
    whole: Mapping[str, float],
    part: Mapping[str, float],
    *,
    share: float = 1.0,
) -> Hardware:
    """Returns the hardware with the measured steps of a model.

    Args:
      whole, part: what was measured with the flags of `list_sizes`.
      share: the share of the cores on which it was measured.
    """
    batch = workload.global_batch_size
    more = max(1, batch - _take_part(batch))
    slope = (whole["step_s"] - part["step_s"]) / more
    example_s = min(max(slope, 0.0), whole["step_s"] / batch)
    # Seconds of all cores, as if they were busy all the time.
    whole_cpu_s, part_cpu_s = whole["busy"] * whole["step_s"], part["busy"] * part["step_s"]
    example_cpu_s = (whole_cpu_s - part_cpu_s) / more
    step_s = whole["step_s"] - batch * example_s
    measured = Measured(
        parameters=count_parameters(workload),
        flops=workload.flops,
        precision=workload.precision,
        step_s=step_s,
        example_s=example_s,
        step_busy=_to_share(whole_cpu_s - batch * example_cpu_s, step_s),
        example_busy=_to_share(example_cpu_s, example_s),
        share=share,
    )
    new = measured.parameters, measured.share
    others = [m for m in hardware.measured if (m.parameters, m.share) != new]
    if share < 1:
        return dataclasses.replace(hardware, measured=(*others, measured))
    # What tracing and kernels need does not depend on the strategy, as far as is known.
    own = dataclasses.replace(hardware, measured=(*others, measured), process_bytes=0.0)
    model = estimate(Setup(strategy="one_device"), workload, own).memory.total
    return dataclasses.replace(own, process_bytes=max(0.0, whole["peak_memory_bytes"] - model))


def _take_part(batch: int) -> int:
    # The smaller the part, the less its error counts in what a step takes without any example.
    return max(1, batch // 4)


def _to_share(cpu_s: float, seconds: float) -> float:
    """Returns the share of some seconds in which the cores are busy, within what is possible."""
    return min(max(cpu_s / seconds, 0.0), 1.0) if seconds else 1.0


def run(
    what: str, arguments: Sequence[str], *, workers: int = 1, ps: int = 0, say: Any = None
) -> dict[str, float]:
    """Returns what `tfdist.plan.measure` finds.

    Args:
      what: a key of its table.
      say: prints a line; None prints nothing.

    Raises:
      TrainingError: the measurement failed.
    """
    if say:
        say(f"Measuring {what}: {' '.join(arguments)}")
    found = call_in_cluster(
        make_task(what, arguments), MEASURE, workers=workers, ps=ps, timeout_s=_TIMEOUT_S
    )
    if "error" in found:
        raise TrainingError(f"Cannot measure {what} of this machine: {found['error']}")
    return found


def find_half() -> float:
    """Returns the share of the cores that each process of `run_on_halves` has."""
    cores = list_cores()
    return len(divide_cores(cores, 2)[-1]) / len(cores)


def run_on_halves(what: str, arguments: Sequence[str], *, say: Any = None) -> dict[str, float]:
    """Returns what the slower of two processes finds, on one half of the cores each.

    They run at the same time, because cores share caches and memory. See `run`.
    """

    def run_on(cores: Sequence[int]) -> dict[str, float]:
        keep_on_cores(cores)
        return run(what, arguments)

    if say:
        say(f"Measuring {what} on both halves of the cores: {' '.join(arguments)}")
    halves = divide_cores(list_cores(), 2)
    with concurrent.futures.ThreadPoolExecutor(len(halves)) as pool:
        return max(pool.map(run_on, halves), key=lambda found: found["step_s"])


def make_task(what: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Returns the task of `tfdist.plan.measure`; see `run`."""
    return {"what": what, "arguments": list(arguments), "steps": _STEPS}


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
