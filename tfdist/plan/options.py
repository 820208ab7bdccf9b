"""The options of `python -m tfdist.plan`; see `tfdist.options`."""

import re
from dataclasses import dataclass
from typing import ClassVar

from tfdist.errors import TfdistError
from tfdist.options import CommandOptions, OptionGroup, inherit, option
from tfdist.training.options import RunOptions


@dataclass(frozen=True, kw_only=True)
class MachineOptions(OptionGroup):
    """Machines."""

    hardware: str = option(
        "cpu",
        "b200, h200, h100, a100, l40s, v100, p100, p40, k80, t4, l4, tpu-v4, tpu-v5e, tpu-v5p, "
        "tpu-v6e, tpu7x, cpu, or a TOML file, such as --calibrate writes",
        metavar="NAME|FILE.toml",
    )
    workers: int = option(4, "largest number of machines", minimum=1)
    devices_per_worker: int = option(
        0, "devices of a machine; 0: as many as the hardware usually has", minimum=0
    )
    price_per_hour: float = option(0.0, "price of one device for an hour", minimum=0)
    input_examples_per_second: float = option(
        0.0, "what the input pipeline of a machine delivers; 0: as much as is needed", minimum=0
    )
    input_core_ms: float = option(
        0.0,
        "milliseconds for which an example keeps a core busy, such as 2.5 for a JPEG of 500x375; "
        "limits the speed by the cores of a machine, if the hardware has their number",
        minimum=0,
    )
    sweep: str = option(
        "",
        "instead of all setups, the data-parallel ones over so many machines, in powers of two",
        metavar="workers=1..1024",
    )
    batch_per_replica: int = option(
        0,
        "let the global batch grow with the replicas; 0: --global_batch_size shared by all of them",
        minimum=0,
    )

    def parse_sweep(self) -> tuple[int, int] | None:
        """Returns the least and the largest number of machines; None without a sweep.

        >>> MachineOptions(sweep="workers=1..64").parse_sweep()
        (1, 64)

        Raises:
          TfdistError: the value is malformed.
        """
        if not self.sweep:
            return None
        match = re.fullmatch(r"workers=(\d+)\.\.(\d+)", self.sweep)
        if match is None or not 1 <= int(match[1]) <= int(match[2]) <= 65536:
            raise TfdistError(
                f"`sweep={self.sweep}` is not a range of machines. Write workers=1..1024."
            )
        return int(match[1]), int(match[2])


@dataclass(frozen=True, kw_only=True)
class SimulationOptions(OptionGroup):
    """Simulation."""

    simulate: bool = option(
        False, "simulate stragglers, staleness and failures with the recommended setup"
    )
    mtbf_h: float = option(1000.0, "mean hours between two failures of a machine", above=0)
    checkpoint_s: float = option(5.0, "seconds for which a checkpoint stops training", above=0)
    restart_s: float = option(60.0, "seconds from a failure to the next step", minimum=0)
    slow_worker: float = option(
        1.0, "how many times as long all steps of one worker take", minimum=1
    )
    jitter: float = option(
        0.0,
        "standard deviation of a step's time, relative to its mean; 0: the hardware's",
        minimum=0,
    )


@dataclass(frozen=True, kw_only=True)
class PlanReportOptions(OptionGroup):
    """Report."""

    calibrate: str = option(
        "",
        "measure this machine with the given model, and write what was found to this TOML file",
        metavar="FILE",
    )
    json: bool = option(False, "print JSON")
    html: str = option("", "also write a page with curves to this file", metavar="FILE")
    quiet: bool = inherit(RunOptions, "quiet")
    verbose_tensorflow: bool = inherit(RunOptions, "verbose_tensorflow")


@dataclass(frozen=True, kw_only=True)
class PlanOptions(CommandOptions):
    """All options of `python -m tfdist.plan`, which precede `--`."""

    rest: ClassVar[str] = " -- [--flag=value of tfdist.train ...]"

    machine: MachineOptions = MachineOptions()
    simulation: SimulationOptions = SimulationOptions()
    run: PlanReportOptions = PlanReportOptions()
