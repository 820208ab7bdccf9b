"""What every task of a job runs: `tfdist.train`, or a script under `tfdist.run`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tfdist.cli.flags import expand_flag_files, parse_flags, split_command
from tfdist.errors import TfdistError
from tfdist.run.options import ScriptOptions
from tfdist.runs.options import TrainOptions
from tfdist.training.options import AUTO_BATCH_SIZE, RunOptions


@dataclass(frozen=True, kw_only=True)
class Work:
    """A command, and the values of its flags that a job must know.

    Attributes:
      arguments: its arguments, with files of flags expanded.
      run_dir: the run directory; empty for a script.
      directories: option -> directory that all tasks read or write, the run directory included.
      grace_period_s: seconds from SIGTERM until a task may be killed.
      finds_batch_size: whether it searches for its batch size, which takes a single process.
    """

    command: tuple[str, ...]
    arguments: tuple[str, ...]
    strategy: str
    tpu: str = ""
    run_dir: str = ""
    directories: Mapping[str, str] = field(default_factory=dict)
    grace_period_s: float = RunOptions().grace_period_s
    finds_batch_size: bool = False


def make_work(arguments: Sequence[str]) -> Work:
    """Returns the work in flags of `tfdist.train`, or in flags of `tfdist.run` and a script."""
    flags, script = split_command(ScriptOptions, arguments)
    if script and script[0].endswith(".py"):
        return _make_script(expand_flag_files(flags), script)
    arguments = expand_flag_files(arguments)
    options = parse_flags(TrainOptions, arguments, runs_here=False)
    options.check()
    return Work(
        command=("python", "-m", "tfdist.train"),
        arguments=tuple(arguments),
        strategy=options.strategy.strategy,
        tpu=getattr(options.strategy, "tpu", ""),
        run_dir=options.run.run_dir,
        directories={"run_dir": options.run.run_dir, **options.task.list_directories()},
        grace_period_s=options.run.grace_period_s,
        finds_batch_size=options.training.global_batch_size == AUTO_BATCH_SIZE,
    )


def _make_script(flags: Sequence[str], script: Sequence[str]) -> Work:
    options = parse_flags(ScriptOptions, flags, runs_here=False)
    for name in ("workers", "ps", "max_restarts", "log_dir"):
        if getattr(options.run, name) != getattr(ScriptOptions().run, name):
            raise TfdistError(
                f"--{name} belongs before `--`: the job starts the processes, not tfdist.run."
            )
    return Work(
        command=("python", "-m", "tfdist.run"),
        arguments=(*flags, *script),
        strategy=options.strategy.strategy,
        tpu=getattr(options.strategy, "tpu", ""),
    )
