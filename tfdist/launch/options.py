"""The options of `python -m tfdist.launch`; see `tfdist.options`."""

from dataclasses import dataclass
from typing import ClassVar

from tfdist.launch.places import ISOLATION
from tfdist.launch.run import STALL_TIMEOUT_S
from tfdist.options import CommandOptions, OptionGroup, option


@dataclass(frozen=True, kw_only=True)
class LocalClusterOptions(OptionGroup):
    """A cluster on this machine."""

    workers: int | None = option(None, "number of workers", metavar="N")
    ps: int = option(0, "number of parameter servers; they add a chief")
    chief: bool = option(False, "add a chief to the workers")
    evaluator: bool = option(
        False, "add an evaluator; only for a --command that has one, as tfdist.train has none"
    )
    isolate: str = option(
        "auto",
        "whether the cluster gets its own network, with loopback only, because TensorFlow's "
        "servers require no password and listen on every interface; auto: where the kernel allows "
        "it; never: required by tasks that download something",
        choices=ISOLATION,
    )
    min_workers: int | None = option(
        None,
        "leave out a worker that fails three times in a row without a new step in between, if N "
        "workers remain; by default all workers are required, or one with --ps",
        metavar="N",
    )


@dataclass(frozen=True, kw_only=True)
class HostOptions(OptionGroup):
    """A cluster of several machines."""

    hosts: str = option(
        "",
        "all tasks, the same text on every machine: workers, or another role after role=, as in "
        "chief=a:2222,worker=b:2222,c:2222,ps=d:2222",
        metavar="HOST:PORT,...",
    )
    task: str = option("", "the task to run on this machine", metavar="ROLE:INDEX")
    check: bool = option(
        False,
        "start nothing; print the cluster that --hosts or the environment describes, resolve its "
        "names, probe its ports and report what is wrong; run this on all machines at once",
    )
    wait_s: float = option(
        5.0, "with --check: seconds to wait for the other machines' answers", metavar="S"
    )


@dataclass(frozen=True, kw_only=True)
class TaskOptions(OptionGroup):
    """Tasks of either kind of cluster."""

    timeout_s: float | None = option(None, "end all tasks after this many seconds", metavar="S")
    grace_s: float = option(
        30.0,
        "seconds that tasks have to stop, for example to write a checkpoint, after Ctrl-C or "
        "SIGTERM before they are killed; should exceed tfdist.train's --grace_period_s",
        metavar="S",
    )
    max_restarts: int = option(
        0,
        "restart tasks after a failure, N times in all; never after bad input, Ctrl-C or SIGTERM",
        metavar="N",
    )
    stall_timeout_s: float | None = option(
        None,
        "kill a task that hangs: none of its threads has run for this many seconds, or no step, "
        "batch of an evaluation or callback of a trainer has ended; 0: never; by default, only "
        f"threads count, for {STALL_TIMEOUT_S:g} seconds, or 0 with --command, which may sleep, "
        "and a step that does not come is only reported",
        metavar="S",
    )
    command: str = option(
        "", "what to run instead of python -m tfdist.train", metavar="'PROGRAM ...'"
    )


@dataclass(frozen=True, kw_only=True)
class LaunchOptions(CommandOptions):
    """All options of `python -m tfdist.launch`, which precede `--` or a script."""

    rest: ClassVar[str] = " -- [--flag=value of tfdist.train ...] | script.py [ARGUMENT ...]"

    local: LocalClusterOptions = LocalClusterOptions()
    several: HostOptions = HostOptions()
    tasks: TaskOptions = TaskOptions()
