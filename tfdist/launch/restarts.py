"""What follows a failure: the task is replaced, the cluster starts again, or all is over."""

import dataclasses
import datetime
import os
import signal
from pathlib import Path

from tfdist.launch.progress import StepFile, append_record

# What would be the same again: bad input (2), a program that cannot be started (126, 127), and
# what somebody asked for: Ctrl-C and SIGTERM, as a shell says them and as the kernel does.
_FINAL_STATUSES = {2, 126, 127, 130, 143, -signal.SIGINT, -signal.SIGTERM}
# So often in a row, with no new step in between, a worker fails before its place counts as lost.
_FAILURES_OF_A_LOST_PLACE = 3


@dataclasses.dataclass(frozen=True)
class Failure:
    """A task that has failed by itself.

    Attributes:
      task: its name.
      status: the exit status; minus the signal's number if a signal ended it.
      cause: how, as in "was ended by SIGKILL".
    """

    task: str
    status: int
    cause: str


class Restarts:
    """Counts, decides and records the restarts of one launcher.

    Args:
      max_restarts: how often tasks or the cluster are started again, all together.
      workers: tasks of that role at first.
      min_workers: with fewer the cluster is ended.
      reports_steps: whether the chief writes every step, as `tfdist.train` does.
      directory: where the record goes.

    Attributes:
      workers: tasks of that role at the next start.
      count: restarts so far.
      dropped: the worker that the next start does without, None if it is like the last.
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
        """The restarts used, as in "restart 1 of 3"."""
        return f"restart {self.count} of {self._max_restarts}"

    def replace(self, failure: Failure) -> str:
        """Decides on a worker without which the others can go on.

        Returns:
          "replaced": start it again; "dropped": go on without it; "ended": end the cluster.
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
        """Decides whether a cluster that was ended by a failure starts again, and how large."""
        again = failure.status not in _FINAL_STATUSES and self.count < self._max_restarts
        if again:
            self.count += 1
            self._gone.clear()
            self._stamp = self._steps.read_stamp()
            self._shrink_if_lost(failure.task)
        if failure.status != 2:  # bad input leaves nothing
            self._record(failure, "restarted" if again else "ended")
        return again

    def _may_train(self) -> bool:
        """Whether the others train by now: before that they wait for all of them."""
        return not self._reports_steps or self._steps.read_stamp() != self._stamp

    def _shrink_if_lost(self, task: str) -> None:
        """Drops a worker that has failed again and again, if enough are left."""
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
            self._streak = ("", 0)  # the others have new numbers

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
