"""How tasks and clusters end."""

import dataclasses
import signal
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class TaskResult:
    """How one task ended.

    Attributes:
      name: role and index, as in "worker-0".
      status: the exit status; minus the signal's number if a signal ended it; None if unknown.
      ended: whether the launcher ended it because another task failed or the cluster was done.
      log: the file that holds its output.
    """

    name: str
    status: int | None
    ended: bool
    log: Path


@dataclasses.dataclass(frozen=True)
class ClusterResult:
    """How a cluster ended.

    Attributes:
      tasks: one result per task of the last start.
      first_failed: the name of the task that failed first, None if none did.
      cause: how it failed, as in "was ended by SIGKILL" or "hung for 60 s".
      timed_out: whether the tasks were ended by the timeout.
      isolated: whether the cluster had its own network.
      seconds: how long it ran, over all starts.
      restarts: the number of restarts of tasks and of the cluster.
    """

    tasks: tuple[TaskResult, ...]
    first_failed: str | None
    cause: str | None
    timed_out: bool
    isolated: bool
    seconds: float
    restarts: int = 0

    @property
    def status(self) -> int:
        """The launcher's exit status: that of the task that failed first, 0 if all went well."""
        statuses = {task.name: task.status for task in self.tasks}
        if self.first_failed is None:
            return 1 if self.timed_out else 0
        status = statuses[self.first_failed] or 1
        return status if status > 0 else 128 - status  # as a shell reports it


def describe_status(status: int) -> str:
    """Returns a description of how a process ended.

    >>> describe_status(-9), describe_status(1)
    ('was ended by SIGKILL', 'exited with status 1')
    """
    if status >= 0:
        return f"exited with status {status}"
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"was ended by signal {-status}"
