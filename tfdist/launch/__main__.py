"""Start a cluster of processes on this machine, or join one of several machines by hand.

    python -m tfdist.launch --workers=2 -- --strategy=multi_worker_mirrored --run_dir=runs/demo
    python -m tfdist.launch --workers=2 --ps=1 -- --strategy=parameter_server --run_dir=runs/demo
    python -m tfdist.launch --workers=2 my_script.py ARGUMENTS
    python -m tfdist.launch --hosts=a:2222,b:2222 --task=worker:0 -- --strategy=...
    python -m tfdist.launch --check --hosts=a:2222,b:2222 --task=worker:0

What follows `--` are the flags of tfdist.train; a script runs in every task instead, by this
interpreter, and makes its strategy itself (or under tfdist.run, which makes it). The chief's
output is shown as it comes; each task's is in <run_dir>/logs. When a task fails, it is named, its
last lines are shown, and the others are ended; with --max_restarts all start again from the newest
checkpoint. A worker of parameter servers is started again alone, or done without, while the others
train on.
"""

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from tfdist.cli.arguments import check_arguments, count_flags, print_help
from tfdist.cli.flags import name_flags
from tfdist.cluster import (
    ClusterConfig,
    parse_host_list,
    parse_hosts,
    resolve_cluster,
)
from tfdist.errors import TfdistError, make_unknown_name_error
from tfdist.launch.places import ISOLATION
from tfdist.launch.report import say
from tfdist.launch.results import ClusterResult, TaskResult
from tfdist.launch.run import STALL_TIMEOUT_S, run_local_cluster, run_task
from tfdist.launch.signals import signal_number, signals_as_exceptions
from tfdist.runs.options import TrainOptions
from tfdist.strategies.registry import validate_cluster

__all__ = ["ClusterResult", "TaskResult", "main", "run_local_cluster", "run_task"]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    try:
        with signals_as_exceptions():
            return _run_command(list(sys.argv[1:] if argv is None else argv))
    except TfdistError as error:
        say(name_flags(error, TrainOptions))
        return 2
    except KeyboardInterrupt as interrupt:
        return 128 + signal_number(interrupt)


class _Parser(argparse.ArgumentParser):
    def print_help(self, file: Any = None) -> None:
        if file is None:
            print_help(self.format_help().rstrip())
        else:
            super().print_help(file)

    def error(self, message: str) -> NoReturn:
        raise TfdistError(f"{message[:1].upper()}{message[1:]}. See --help.")


def _run_command(argv: Sequence[str]) -> int:
    parser = _make_parser()
    actions = {name: action for action in parser._actions for name in action.option_strings}
    split = count_flags(argv, lambda flag: flag not in actions or actions[flag].nargs == 0)
    given, script = argv[:split], argv[split:]
    train_flags = script[1:] if script[:1] == ["--"] else []
    script = [] if script[:1] == ["--"] else script
    check_arguments(given)
    flags, unknown = parser.parse_known_args(given)
    if unknown:
        name = unknown[0].partition("=")[0]
        valid = [option for action in parser._actions for option in action.option_strings]
        error = make_unknown_name_error("flag", name, (v for v in valid if v.startswith("--")))
        raise TfdistError(f"{error} tfdist.train's flags go after --.")
    if flags.check:
        from tfdist.launch import probe

        tasks, own = _find_cluster_to_check(flags.hosts, flags.task)
        return probe.run_check(tasks, own, wait_s=flags.wait_s)
    command = shlex.split(flags.command) or None
    if script and command:
        raise TfdistError(f"--command and the script {script[0]!r} are both given. Give one.")
    if script:
        if not os.path.isfile(script[0]):
            raise TfdistError(
                f"Cannot find the script {script[0]!r}. tfdist.train's flags go after --."
            )
        command = [sys.executable, *script]
    if command is None:
        check_arguments(train_flags)
    common = {
        "train_flags": train_flags,
        "command": command,
        "timeout_s": flags.timeout_s,
        "grace_s": flags.grace_s,
        "max_restarts": flags.max_restarts,
        "stall_timeout_s": flags.stall_timeout_s,
    }
    config = parse_hosts(flags.hosts, flags.task)
    if config is not None:
        if flags.min_workers is not None:
            raise TfdistError(
                "--min_workers does not go with --hosts: the launcher of one machine cannot tell "
                "the others to do without a worker. Leave it out, and shorten --hosts by hand."
            )
        if flags.workers is not None or flags.ps or flags.chief or flags.evaluator:
            raise TfdistError(
                "--hosts lists the whole cluster, so --workers, --ps, --chief and --evaluator do "
                "not go with it. Leave them out, or leave out --hosts and --task."
            )
        return run_task(config, **common).status
    if flags.workers is None:
        raise TfdistError(
            "Nothing to start. Give --workers=2 for a cluster on this machine, or --hosts and "
            "--task to join one of several machines."
        )
    return run_local_cluster(
        workers=flags.workers,
        ps=flags.ps,
        chief=flags.chief,
        evaluator=flags.evaluator,
        isolate=flags.isolate,
        min_workers=flags.min_workers,
        **common,
    ).status


def _make_parser() -> _Parser:
    parser = _Parser(
        prog="python -m tfdist.launch",
        usage="%(prog)s --workers=N [--ps=N] [flags] -- <flags of tfdist.train>\n"
        "       %(prog)s --workers=N [--ps=N] [flags] script.py [ARGUMENT ...]\n"
        "       %(prog)s --hosts=a:p,b:p --task=role:index [flags] -- <flags of tfdist.train>\n"
        "       %(prog)s --check [--hosts=a:p,b:p] [--task=role:index]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    local = parser.add_argument_group("a cluster on this machine")
    local.add_argument("--workers", type=int, metavar="N", help="how many workers")
    local.add_argument(
        "--ps", type=int, default=0, metavar="N", help="how many parameter servers; adds a chief"
    )
    local.add_argument("--chief", action="store_true", help="add a chief to the workers")
    local.add_argument(
        "--evaluator",
        action="store_true",
        help="add an evaluator to the tasks of a --command that has one; tfdist.train has none",
    )
    local.add_argument(
        "--isolate",
        default="auto",
        metavar="|".join(ISOLATION),
        help="whether the cluster gets a network of its own, loopback only, because TensorFlow's "
        "servers ask for no password and listen on every interface; auto: where the kernel allows "
        "it; never: needed by tasks that download (default: auto)",
    )
    local.add_argument(
        "--min_workers",
        type=int,
        metavar="N",
        help="a worker that fails three times in a row, with no new step in between, is left out "
        "if N are left (default: all are needed; with --ps: 1)",
    )
    hosts = parser.add_argument_group("a cluster of several machines")
    hosts.add_argument(
        "--hosts",
        default="",
        metavar="HOST:PORT,...",
        help="all tasks, the same text on every machine: workers, or any role after role=, as in "
        "chief=a:2222,worker=b:2222,c:2222,ps=d:2222",
    )
    hosts.add_argument(
        "--task", default="", metavar="ROLE:INDEX", help="the task to run on this machine"
    )
    hosts.add_argument(
        "--check",
        action="store_true",
        help="start nothing: print the cluster as understood (from --hosts, or the environment), "
        "resolve its names, probe its ports and say what is wrong; run it on all machines at once",
    )
    hosts.add_argument(
        "--wait_s",
        type=float,
        default=5.0,
        metavar="S",
        help="with --check: how long to wait for the other machines' answers (default: 5)",
    )
    both = parser.add_argument_group("both")
    both.add_argument(
        "--timeout_s", type=float, metavar="S", help="end all tasks after that many seconds"
    )
    both.add_argument(
        "--grace_s",
        type=float,
        default=30.0,
        metavar="S",
        help="how long tasks may take to stop, say to write a checkpoint, after Ctrl-C or SIGTERM "
        "before they are killed; more than tfdist.train's --grace_period_s (default: 30)",
    )
    both.add_argument(
        "--max_restarts",
        type=int,
        default=0,
        metavar="N",
        help="start tasks again after a failure, N times in all; not after bad input, Ctrl-C or "
        "SIGTERM (default: 0)",
    )
    both.add_argument(
        "--stall_timeout_s",
        type=float,
        metavar="S",
        help="kill a task none of whose threads has run for that long, as one that is stopped; 0 "
        f"does not (default: {STALL_TIMEOUT_S:g}; 0 with --command, which may sleep)",
    )
    both.add_argument(
        "--command",
        default="",
        metavar="'PROGRAM ...'",
        help="what to run instead of python -m tfdist.train",
    )
    return parser


def _find_cluster_to_check(
    hosts: str, task: str
) -> tuple[ClusterConfig | None, tuple[str, int] | None]:
    """Returns the cluster and this process's task in it, if it is known."""
    if hosts and not task:
        tasks = parse_host_list(hosts)
        config = ClusterConfig(tasks, next(iter(tasks)), 0, "--hosts")
        validate_cluster(config, "")
        return config, None
    found = resolve_cluster(hosts=hosts, task=task)
    return found, (found.role, found.index) if found else None


if __name__ == "__main__":
    sys.exit(main())
