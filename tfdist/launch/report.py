"""The launcher's messages."""

import sys
from collections.abc import Sequence

from tfdist.cli.output import discard
from tfdist.cluster import ClusterConfig
from tfdist.errors import make_printable
from tfdist.launch.agent_client import AgentProcess
from tfdist.launch.logs import Logs, last_lines
from tfdist.launch.restarts import Failure, Restarts
from tfdist.launch.results import ClusterResult, TaskResult

_NO_NETWORK = ("name resolution", "Name or service not known", "Network is unreachable")


def say(text: str) -> None:
    """Prints a line to standard error."""
    _print(f"tfdist.launch: {make_printable(text)}")


def announce(
    configs: Sequence[ClusterConfig], agent: AgentProcess, logs: Logs, *, isolate: str, stream: bool
) -> None:
    """Reports which tasks start, and whether other machines can reach them."""
    if stream:
        names = " ".join(config.task_name for config in configs)
        network = ", in a network of their own" if agent.isolated else ""
        say(f"{names}{network}; logs in {logs.directory}")
    if isolate == "auto" and not agent.isolated:
        say(
            f"cannot give the cluster its own network ({agent.problem}). TensorFlow's servers, "
            "which require no password, listen on every interface. Use a firewall."
        )


def report_replacement(failure: Failure, then: str, restarts: Restarts) -> None:
    """Reports what happens to a failed worker of parameter servers."""
    what = {
        "replaced": f"Starting it again ({restarts.budget}); the others keep training.",
        "dropped": "Continuing without it.",
        "ended": "Ending the cluster.",
    }
    say(f"{failure.task} {failure.cause}. {what[then]}")


def report_restart(result: ClusterResult, logs: Logs, restarts: Restarts, *, stream: bool) -> None:
    """Names the task that failed first and reports the restart of the cluster."""
    if not stream:
        return
    _report_first_failed(result, logs)
    failed = f", without {restarts.dropped}, which failed repeatedly,"
    without = failed if restarts.dropped else ""
    say(f"starting the cluster again{without} from the newest checkpoint ({restarts.budget}).")


def report_failure(
    result: ClusterResult, logs: Logs, *, timeout_s: float | None, stream: bool
) -> None:
    """Names the task that failed first and shows its last lines."""
    if not stream:
        return
    if result.timed_out:
        say(f"timed out after {timeout_s:g} s: all tasks were ended. Logs in {logs.directory}")
    lines = _report_first_failed(result, logs)
    if result.isolated and any(sign in line for sign in _NO_NETWORK for line in lines):
        say(
            "the cluster has its own network, without access to the outside. If the task needs "
            "access, for example to download something, use --isolate=never."
        )


def _report_first_failed(result: ClusterResult, logs: Logs) -> list[str]:
    """Names the task that failed first, shows its last lines and returns them."""
    task = next((task for task in result.tasks if task.name == result.first_failed), None)
    if task is None:
        return []
    lines = _select_lines(task, logs)
    if problem := logs.find_problem():
        say(f"the logs in {logs.directory} lack what was written last: {problem}.")
    where = f" Its last lines (full log: {task.log}):" if lines and task.status != 2 else ""
    say(f"{task.name} failed first: it {result.cause}.{where}")
    for line in lines:
        _print(f"[{task.name}] {make_printable(line)}")
    return lines


def _print(line: str) -> None:
    # Without anyone who reads it, the cluster goes on all the same.
    if sys.stderr is not None:
        try:
            print(line, file=sys.stderr, flush=True)
        except (OSError, ValueError):
            discard(sys.stderr)


def _select_lines(task: TaskResult, logs: Logs) -> list[str]:
    lines = last_lines(logs.read(task.log))
    if task.status != 2:
        return lines
    # Bad input is reported in one line.
    seen = set(last_lines(logs.shown))
    return [line for line in lines if line not in seen]
