"""The options of `python -m tfdist.doctor`."""

from dataclasses import dataclass
from typing import ClassVar

from tfdist.launch.options import HostOptions
from tfdist.options import CommandOptions, OptionGroup, inherit, option


@dataclass(frozen=True, kw_only=True)
class SubjectOptions(OptionGroup):
    """What is examined."""

    run_dir: str = option(
        "",
        "the run's directory: it must have room, and all machines of a cluster must see it",
        metavar="DIR",
    )
    hosts: str = inherit(HostOptions, "hosts")
    task: str = inherit(HostOptions, "task", help="this machine's task in the cluster")
    wait_s: float = inherit(
        HostOptions, "wait_s", help="seconds to wait for the other machines' answers"
    )


@dataclass(frozen=True, kw_only=True)
class ProbeOptions(OptionGroup):
    """Speed."""

    probe: bool = option(
        False,
        "train for a minute on one device and on all of them, and say why more are not faster; a "
        "small U-Net, or what the flags of tfdist.train after -- describe",
    )
    steps: int = option(20, "training steps of each of these runs", minimum=3)
    timeout_s: float = option(600.0, "seconds until such a run counts as failed", above=0)


@dataclass(frozen=True, kw_only=True)
class DoctorReportOptions(OptionGroup):
    """Report."""

    json: bool = option(False, "print JSON instead of lines")


@dataclass(frozen=True, kw_only=True)
class DoctorOptions(CommandOptions):
    """The options of `python -m tfdist.doctor`."""

    rest: ClassVar[str] = " [-- --flag=value of tfdist.train ...]"

    subject: SubjectOptions = SubjectOptions()
    speed: ProbeOptions = ProbeOptions()
    run: DoctorReportOptions = DoctorReportOptions()
