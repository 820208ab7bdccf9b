"""A callback that writes a run's `report.html` during training."""

import sys
import time
from typing import Any

import keras

from tfdist.errors import shorten_error
from tfdist.records.recorded_run import read_recorded_run
from tfdist.runs.reporting import write_report
from tfdist.tasks.base import Task

_MOST_OF_TIME = 0.01


class WriteReport(keras.callbacks.Callback):
    """Writes the report at the end of an epoch, unless that takes too much of the time.

    A report that cannot be written costs one line, not the run.

    Args:
      path: the run's directory.
      task: the run's task.
    """

    def __init__(self, path: str, task: Task):
        super().__init__()
        self._path = path
        self._task = task
        self._earliest = 0.0
        self._has_failed = False

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None):
        began = time.perf_counter()
        if began < self._earliest:
            return
        self.write()
        ended = time.perf_counter()
        self._earliest = ended + (ended - began) / _MOST_OF_TIME

    def write(self) -> None:
        """Writes the report from what the run has recorded so far."""
        try:
            write_report(read_recorded_run(self._path), task=self._task)
        except Exception as error:  # A task may be anyone's.
            if not self._has_failed:
                text = f"tfdist: report.html was not written: {shorten_error(error)}"
                print(text, file=sys.stderr, flush=True)
            self._has_failed = True
