"""Start a cluster of processes on this machine, or join a cluster of several machines.

    python -m tfdist.launch --workers=2 -- --strategy=multi_worker_mirrored --run_dir=runs/demo
    python -m tfdist.launch --workers=2 --ps=1 -- --strategy=parameter_server --run_dir=runs/demo
    python -m tfdist.launch --workers=2 my_script.py ARGUMENTS
    python -m tfdist.launch --hosts=a:2222,b:2222 --task=worker:0 -- --strategy=...
    python -m tfdist.launch --check --hosts=a:2222,b:2222 --task=worker:0

The flags of tfdist.train follow `--`. A script runs in every task instead, with this interpreter,
and builds its strategy itself (or runs under tfdist.run, which builds it). The chief's output is
shown as it is written; each task's output is in <run_dir>/logs. When a task fails, the launcher
names it, shows its last lines and ends the others; with --max_restarts, all tasks start again from
the newest checkpoint. A worker of parameter servers is restarted alone, or left out, while the
others keep training.
"""

import dataclasses
import os
import shlex
import sys
from collections.abc import Sequence
from typing import Any

from tfdist.cli.arguments import check_arguments, print_help
from tfdist.cli.flags import (
    expand_flag_files,
    format_help,
    is_help,
    name_flags,
    parse_flags,
    split_command,
)
from tfdist.cli.output import lenient_output
from tfdist.cluster import parse_hosts
from tfdist.errors import TfdistError
from tfdist.launch.options import LaunchOptions, LocalClusterOptions
from tfdist.launch.report import say
from tfdist.launch.results import ClusterResult, TaskResult
from tfdist.launch.run import run_local_cluster, run_task
from tfdist.launch.supervise import signal_number, signals_as_exceptions
from tfdist.runs.options import TrainOptions

__all__ = ["ClusterResult", "TaskResult", "main", "run_local_cluster", "run_task"]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    with lenient_output():
        try:
            with signals_as_exceptions():
                return _run_command(list(sys.argv[1:] if argv is None else argv))
        except TfdistError as error:
            say(name_flags(error, LaunchOptions, TrainOptions))
            return error.exit_status
        except KeyboardInterrupt as interrupt:
            return 128 + signal_number(interrupt)


def _run_command(argv: Sequence[str]) -> int:
    given, rest = split_command(LaunchOptions, argv)
    if any(map(is_help, given)):
        print_help(f"{__doc__.strip()}\n\n{format_help('tfdist.launch', LaunchOptions, given)}")
        return 0
    try:
        options = parse_flags(LaunchOptions, given)
    except TfdistError as error:
        if not str(error).startswith("Unknown flag"):
            raise
        raise TfdistError(f"{error} tfdist.train's flags go after --.") from None
    local, several, tasks = options.local, options.several, options.tasks
    if several.check:
        from tfdist.launch import probe

        found, own = probe.find_cluster(several.hosts, several.task)
        return probe.run_check(found, own, wait_s=several.wait_s)
    train_flags, command = _find_command(rest, _split_command(tasks.command))
    given_here = {"train_flags": train_flags, "command": command}
    common: dict[str, Any] = dataclasses.asdict(tasks) | given_here
    config = parse_hosts(several.hosts, several.task)
    if config is not None:
        _check_alone(local)
        return run_task(config, **common).status
    if local.workers is None:
        raise TfdistError(
            "Nothing to start. Give --workers=2 for a cluster on this machine, or --hosts and "
            "--task to join a cluster of several machines."
        )
    return run_local_cluster(**dataclasses.asdict(local), **common).status


def _find_command(
    rest: Sequence[str], command: Sequence[str]
) -> tuple[list[str], list[str] | None]:
    """Returns the flags of tfdist.train in the rest, and the command to run instead, if any."""
    if rest[:1] == ["--"] or not rest:
        train_flags = list(rest[1:])
        if not command:
            train_flags = expand_flag_files(train_flags)
            check_arguments(train_flags)
        return train_flags, list(command) or None
    if command:
        raise TfdistError(f"--command and the script {rest[0]!r} are both given. Give only one.")
    if not os.path.isfile(rest[0]):
        raise TfdistError(f"Cannot find the script {rest[0]!r}. tfdist.train's flags go after --.")
    return [], [sys.executable, *rest]


def _split_command(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise TfdistError(f"Cannot read --command={text}: {error}. Correct the quotes.") from error


def _check_alone(local: LocalClusterOptions) -> None:
    """Refuses flags of a local cluster that are given together with --hosts."""
    if local.min_workers is not None:
        raise TfdistError(
            "--min_workers cannot be used with --hosts: the launcher on one machine cannot tell "
            "the others to continue without a worker. Leave it out, and shorten --hosts by hand."
        )
    if local.workers is not None or local.ps or local.chief or local.evaluator:
        raise TfdistError(
            "--hosts lists the whole cluster, so --workers, --ps, --chief and --evaluator cannot "
            "be used with it. Leave them out, or leave out --hosts and --task."
        )


if __name__ == "__main__":
    sys.exit(main())
