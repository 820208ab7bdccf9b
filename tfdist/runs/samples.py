"""A callback that draws predictions after every few epochs."""

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.records.run_directory import RunDirectory
from tfdist.tasks.base import Task
from tfdist.tasks.data import SourceData
from tfdist.training.fit.trainer import Trainer


class DrawSamples(keras.callbacks.Callback):
    """Lets the task draw predictions; for all workers, because all of them predict.

    The chief writes `samples/NAME.png`, in place of the picture of an earlier epoch.

    Args:
      task: the task.
      run: the run's directory.
      trainer: the run's trainer.
      data: the run's data.
      every: the number of epochs between two drawings; 0 for none.
    """

    def __init__(
        self, task: Task, run: RunDirectory, trainer: Trainer, data: SourceData, *, every: int
    ):
        super().__init__()
        self._task, self._run, self._trainer, self._data = task, run, trainer, data
        self._every = every
        self._pictures: Mapping[str, np.ndarray] = {}

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None):
        """Draws an epoch, counted from 0, if it is due."""
        is_due = self._every > 0 and (epoch + 1) % self._every == 0
        self._pictures = self._task.draw(self._trainer, self._data) if is_due else {}
        if self._trainer.is_chief:
            for name, picture in self._pictures.items():
                self._run.write_png(f"samples/{name}.png", picture)

    def write_events(self, step: int) -> None:
        """Writes the pictures of the epoch that has just ended with `tf.summary`."""
        for name, picture in self._pictures.items():
            tf.summary.image(name, picture[None], step=step)
