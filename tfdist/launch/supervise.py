"""Runs the tasks of one start, and handles those that fail or hang."""

import contextlib
import dataclasses
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tfdist.cluster import ClusterConfig
from tfdist.launch.agent_client import AgentProcess
from tfdist.launch.hang import HangWatch
from tfdist.launch.logs import Logs, Output
from tfdist.launch.machine import Environment
from tfdist.launch.report import report_replacement, say
from tfdist.launch.restarts import Failure, Restarts
from tfdist.launch.results import describe_status
from tfdist.launch.stalls import StallWatch
from tfdist.launch.tasks import is_essential, is_replaceable

_POLL_S = 0.05
_MAX_PARTS = 8  # of the log at once, so that the tasks are watched meanwhile
# An agent that does not end the tasks in time is stopped or hangs, and is killed with them.
_KILL_S = 3.0
_STOP_S = 10.0
_REPORT_HANG_S = 10.0
# TensorFlow gives up on a worker after about 7 s without a heartbeat, and then the others fail. So
# a task that has hung for this long when another one fails is to blame.
_BLAME_HANG_S = 4.0


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How one start of the tasks ended.

    Attributes:
      exits: task -> the agent's last "exited" event.
      failure: the first failure that ended the others, None if all went well.
    """

    exits: Mapping[str, Mapping[str, Any]]
    failure: Failure | None
    timed_out: bool


class Supervisor:
    """The launcher's side of one start of the tasks.

    Args:
      stall_timeout_s: seconds that a task may hang before it is killed; 0 for no limit.
      stalls: finds tasks whose steps do not come; None not to look for them.
    """

    def __init__(
        self,
        agent: AgentProcess,
        configs: Sequence[ClusterConfig],
        environments: Sequence[Environment],
        argv: Sequence[str],
        logs: Logs,
        restarts: Restarts,
        *,
        stall_timeout_s: float,
        stalls: StallWatch | None,
        stream: bool,
    ):
        self._agent = agent
        self._tasks = {
            config.task_name: {
                "name": config.task_name,
                "argv": list(argv),
                "env": environment,
                "cores": cores,
                "log": str(logs.open(config.task_name)),
                "essential": len(configs) == 1 or is_essential(config),
                "replaceable": is_replaceable(config),
            }
            for config, (environment, cores) in zip(configs, environments, strict=True)
        }
        self._shown = logs.follow(logs.path(configs[0].task_name))
        self._output = Output(sys.stdout) if stream else None
        self._restarts = restarts
        self._hangs = HangWatch()
        self._stall_timeout_s = stall_timeout_s
        self._stalls = stalls
        self._stalled: dict[str, str] = {}
        self._told: set[str] = set()
        self._waited_for: set[str] = set()
        self._exits: dict[str, dict[str, Any]] = {}
        self._failure: Failure | None = None
        self._timed_out = False
        self._finished = False

    def run(self, *, grace_s: float, timeout_s: float | None) -> Outcome:
        """Runs the tasks until the last one has ended, and only then raises KeyboardInterrupt.

        Args:
          grace_s: seconds that tasks may take to end after SIGINT or SIGTERM before SIGKILL.
        """
        stop: KeyboardInterrupt | None = None
        kill_at = float("inf")
        tasks = list(self._tasks.values())
        self._agent.send(tasks=tasks, grace_s=grace_s, timeout_s=timeout_s)
        while not self._agent.done:
            try:
                for event in self._agent.poll(_POLL_S):
                    self._handle(event)
                self._watch_hangs()
                self._show()
                if time.monotonic() > kill_at:
                    self._agent.process.kill()
            except KeyboardInterrupt as interrupt:
                now = time.monotonic()
                if stop is None:
                    self._agent.send(signal=signal_number(interrupt))
                    kill_at = now + grace_s + _STOP_S
                else:
                    self._agent.send(kill=True)
                    kill_at = min(kill_at, now + _KILL_S)
                stop = stop or interrupt
        self._show(last=True)
        if self._stalls:
            self._stalls.remove()
        if stop is not None:
            raise stop
        if not self._finished:
            raise RuntimeError("tfdist's agent process was killed; its tasks were killed with it")
        return Outcome(self._exits, self._failure, self._timed_out)

    def _handle(self, event: dict[str, Any]) -> None:
        if event["event"] == "exited":
            self._exits[event["task"]] = event
            if event["status"] and not event["ended"]:
                self._handle_failure(event["task"], event["status"])
        elif event["event"] == "unlogged":
            say(f"cannot write {event['log']}: {event['problem']}. The task runs without a log.")
        elif event["event"] == "killed":
            say(f"{', '.join(event['tasks'])} did not stop in time and had to be killed.")
        elif event["event"] == "timed_out":
            self._timed_out = True
        elif event["event"] == "done":
            self._finished = True

    def _handle_failure(self, name: str, status: int) -> None:
        if self._failure is not None:
            return
        if not self._tasks[name]["replaceable"]:
            self._failure = self._find_culprit(name, status)
            return
        failure = Failure(name, status, self._stalled.pop(name, describe_status(status)))
        then = self._restarts.replace(failure)
        report_replacement(failure, then, self._restarts)
        if then == "replaced":
            self._told.discard(name)
            if self._stalls:
                self._stalls.forget(name)
            self._agent.send(start=self._tasks[name])
        elif then == "ended":
            self._failure = failure
            self._agent.send(end=True)

    def _find_culprit(self, name: str, status: int) -> Failure:
        """Returns the failure itself, or the hang of another task that caused it."""
        hung = self._hangs.measure(self._agent.pids)
        if status == 1 and hung:
            longest = max(hung, key=lambda task: hung[task])
            if hung[longest] >= _BLAME_HANG_S:
                return Failure(longest, status, f"hung for {hung[longest]:.0f} s")
        return Failure(name, status, self._stalled.get(name, describe_status(status)))

    def _watch_hangs(self) -> None:
        still = self._hangs.measure(self._agent.pids) if self._stall_timeout_s else {}
        for name, seconds in still.items():
            if seconds >= min(_REPORT_HANG_S, self._stall_timeout_s) and name not in self._told:
                self._told.add(name)
                say(
                    f"{name} has hung for {seconds:.0f} s: none of its threads has run. "
                    f"It will be killed after {self._stall_timeout_s:g} s."
                )
            elif seconds == 0 and name in self._told and name not in self._stalled:
                self._told.discard(name)
                say(f"{name} is running again.")
            if seconds >= self._stall_timeout_s and name not in self._stalled:
                self._stalled[name] = f"hung for {seconds:.0f} s"
                self._agent.send(kill_task=name)

        # A task none of whose threads run is to blame for what the others wait for.
        if self._stalls and not self._stalled and max(still.values(), default=0) < _BLAME_HANG_S:
            found = self._stalls.find(self._agent.pids)
            if found is not None:
                self._handle_stall(*found)

    def _handle_stall(self, name: str, how: str) -> None:
        """Kills a task whose step does not come, or says it once if it may take that long."""
        if self._stalls and self._stalls.kills:
            self._stalled[name] = how
            say(f"{name} {how}, and no step has come. It will be killed.")
            self._agent.send(kill_task=name)
        elif name not in self._waited_for:
            self._waited_for.add(name)
            say(
                f"{name} seems to hang ({how}), and no step has come. "
                "It would be killed with --stall_timeout_s."
            )

    def _show(self, *, last: bool = False) -> None:
        """Shows what is new in the first task's log, a part at a time."""
        for number, data in enumerate(self._shown):
            is_over = not data or (number >= _MAX_PARTS and not last)
            if self._output:
                self._output.write(data, last=last and is_over)
            if is_over:
                return


class SignalError(KeyboardInterrupt):
    """A signal that asks the launcher to stop."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def signal_number(interrupt: KeyboardInterrupt) -> int:
    """Returns the number of the signal that caused an interrupt."""
    return interrupt.number if isinstance(interrupt, SignalError) else signal.SIGINT


@contextlib.contextmanager
def signals_as_exceptions() -> Iterator[None]:
    """Raises `SignalError` on SIGINT, SIGTERM and, unless it is ignored as by nohup, SIGHUP."""

    def stop(number: int, _: object) -> None:
        raise SignalError(number)

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
