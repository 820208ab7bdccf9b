"""A callback that writes a picture of predictions after every few epochs."""

from typing import Any

import keras

from tfdist.tasks.base import Task
from tfdist.tasks.sources import SourceData
from tfdist.training.run_directory import RunDirectory
from tfdist.training.trainer import Trainer


class WriteSamples(keras.callbacks.Callback):
    """Lets the task write a picture of predictions; for all workers, because all of them predict.

    Args:
      task: the task.
      run: the run's directory.
      trainer: the run's trainer.
      data: the run's data.
      every: the number of epochs between two pictures.
    """

    def __init__(
        self, task: Task, run: RunDirectory, trainer: Trainer, data: SourceData, *, every: int
    ):
        super().__init__()
        self._task, self._run, self._trainer, self._data = task, run, trainer, data
        self._every = every

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None):
        """Writes the picture of an epoch, counted from 0, if it is due."""
        if (epoch + 1) % self._every == 0:
            name = f"samples/epoch_{epoch + 1:04d}.png"
            self._task.write_samples(self._run, self._trainer, self._data, name=name)
