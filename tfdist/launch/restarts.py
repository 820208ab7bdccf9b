"""Decides what follows a failure: the task or the cluster is restarted, or the cluster ends."""

import dataclasses
import datetime
import os
import signal
from pathlib import Path

from tfdist.launch.progress import StepFile, append_record

# A restart does not help with bad input (2) or a program that cannot start (126, 127), and is not
# wanted after Ctrl-C and SIGTERM, as a shell or the kernel reports them.
_FINAL_STATUSES = {2, 126, 127, 130, 143, -signal.SIGINT, -signal.SIGTERM}
# A worker's slot counts as lost after this many failures in a row without a new step in between.
_FAILURES_OF_A_LOST_PLACE = 3


@dataclasses.dataclass(frozen=True)
class Failure:
    """A task that failed by itself.

    Attributes:
      status: the exit status; minus the signal's number if a signal ended it.
      cause: how it failed, as in "was ended by SIGKILL".
    """

    task: str
    status: int
    cause: str


class Restarts:
    """Decides on, counts and records the restarts of one launcher.

    Args:
      reports_steps: whether the chief writes every step, as `tfdist.train` does.

    Attributes:
      workers: the number of workers at the next start.
      dropped: the worker that the next start leaves out, None if there is none.
    """

    def __init__(
        self,
        *,
        max_restarts: int,
        workers: int,
        min_workers: int,
        reports_steps: bool,
        directory: str | os.PathLike[str],
    ):
        self.workers = workers
        self.count = 0
        self.dropped: str | None = None
        self._max_restarts = max_restarts
        self._min_workers = min_workers
        self._directory = Path(directory)
        self._steps = StepFile(directory)
        self._best_step = self._steps.read()
        self._reports_steps = reports_steps
        self._stamp = self._steps.read_stamp()
        self._streak: tuple[str, int] = ("", 0)
        self._gone: set[str] = set()

    @property
    def budget(self) -> str:
        """The number of restarts so far and in all, as in "restart 1 of 3"."""
        return f"restart {self.count} of {self._max_restarts}"

    def replace(self, failure: Failure) -> str:
        """Decides what follows the failure of a worker that the others can do without.

        Returns:
          "replaced": start it again; "dropped": continue without it; "ended": end the cluster.
        """
        if failure.status in _FINAL_STATUSES:
            then = "ended"
        elif self.count < self._max_restarts:
            self.count += 1
            then = "replaced"
        else:
            self._gone.add(failure.task)
            enough = self.workers - len(self._gone) >= self._min_workers
            then = "dropped" if enough and self._may_train() else "ended"
        self._record(failure, then)
        return then

    def restart(self, failure: Failure) -> bool:
        """Decides whether a cluster starts again after a failure, and with how many workers."""
        again = failure.status not in _FINAL_STATUSES and self.count < self._max_restarts
        if again:
            self.count += 1
            self._gone.clear()
            self._stamp = self._steps.read_stamp()
            self._shrink_if_lost(failure.task)
        if failure.status != 2:  # bad input leaves no files behind
            self._record(failure, "restarted" if again else "ended")
        return again

    def _may_train(self) -> bool:
        """Returns whether the others may be training; before that, they wait for every worker."""
        return not self._reports_steps or self._steps.read_stamp() != self._stamp

    def _shrink_if_lost(self, task: str) -> None:
        """Drops a worker that has failed repeatedly, if enough workers remain."""
        step = self._steps.read()
        last, times = self._streak
        times = times + 1 if task == last and step <= self._best_step else 1
        self._streak, self._best_step = (task, times), max(step, self._best_step)
        self.dropped = None
        if (
            times >= _FAILURES_OF_A_LOST_PLACE
            and task.startswith("worker-")
            and self.workers > self._min_workers
        ):
            self.workers -= 1
            self.dropped = task
            self._streak = ("", 0)  # the remaining workers are renumbered

    def _record(self, failure: Failure, then: str) -> None:
        append_record(
            self._directory,
            {
                "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                "task": failure.task,
                "cause": failure.cause,
                "step": self._steps.read(),
                "then": then,
                "workers": self.workers,
            },
        )
