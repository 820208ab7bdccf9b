"""What `python -m tfdist.launch` takes; see `tfdist.options`."""

from dataclasses import dataclass
from typing import ClassVar

from tfdist.launch.places import ISOLATION
from tfdist.launch.run import STALL_TIMEOUT_S
from tfdist.options import CommandOptions, OptionGroup, option


@dataclass(frozen=True, kw_only=True)
class LocalClusterOptions(OptionGroup):
    """A cluster on this machine."""

    workers: int | None = option(None, "how many workers", metavar="N")
    ps: int = option(0, "how many parameter servers; adds a chief")
    chief: bool = option(False, "add a chief to the workers")
    evaluator: bool = option(
        False,
        "add an evaluator to the tasks of a --command that has one; tfdist.train has none",
    )
    isolate: str = option(
        "auto",
        "whether the cluster gets a network of its own, loopback only, because TensorFlow's "
        "servers ask for no password and listen on every interface; auto: where the kernel allows "
        "it; never: needed by tasks that download",
        choices=ISOLATION,
    )
    min_workers: int | None = option(
        None,
        "a worker that fails three times in a row, with no new step in between, is left out if N "
        "are left; by default all are needed, with --ps one",
        metavar="N",
    )


@dataclass(frozen=True, kw_only=True)
class HostOptions(OptionGroup):
    """A cluster of several machines."""

    hosts: str = option(
        "",
        "all tasks, the same text on every machine: workers, or any role after role=, as in "
        "chief=a:2222,worker=b:2222,c:2222,ps=d:2222",
        metavar="HOST:PORT,...",
    )
    task: str = option("", "the task to run on this machine", metavar="ROLE:INDEX")
    check: bool = option(
        False,
        "start nothing: print the cluster as understood (from --hosts, or the environment), "
        "resolve its names, probe its ports and say what is wrong; run it on all machines at once",
    )
    wait_s: float = option(
        5.0, "with --check: seconds to wait for the other machines' answers", metavar="S"
    )


@dataclass(frozen=True, kw_only=True)
class TaskOptions(OptionGroup):
    """The tasks of both."""

    timeout_s: float | None = option(None, "end all tasks after that many seconds", metavar="S")
    grace_s: float = option(
        30.0,
        "seconds that tasks may take to stop, say to write a checkpoint, after Ctrl-C or SIGTERM "
        "before they are killed; more than tfdist.train's --grace_period_s",
        metavar="S",
    )
    max_restarts: int = option(
        0,
        "start tasks again after a failure, N times in all; not after bad input, Ctrl-C or SIGTERM",
        metavar="N",
    )
    stall_timeout_s: float | None = option(
        None,
        "kill a task none of whose threads has run for that many seconds, as one that is stopped; "
        f"0 does not; by default {STALL_TIMEOUT_S:g}, and 0 with --command, which may sleep",
        metavar="S",
    )
    command: str = option(
        "", "what to run instead of python -m tfdist.train", metavar="'PROGRAM ...'"
    )


@dataclass(frozen=True, kw_only=True)
class LaunchOptions(CommandOptions):
    """Everything that `python -m tfdist.launch` takes before `--` or a script.

    Attributes:
      local, several, tasks: the groups.
    """

    rest: ClassVar[str] = " -- [--flag=value of tfdist.train ...] | script.py [ARGUMENT ...]"

    local: LocalClusterOptions = LocalClusterOptions()
    several: HostOptions = HostOptions()
    tasks: TaskOptions = TaskOptions()
