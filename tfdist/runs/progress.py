"""Reports to the launcher which step a run has reached."""

from typing import Any

import keras

from tfdist.launch.progress import StepFile, append_record
from tfdist.training.fit.trainer import Trainer


class ReportSteps(keras.callbacks.Callback):
    """Writes completed steps to the launcher's file, and records which ones a run repeats.

    Args:
      trainer: the trainer whose steps are reported.
      directory: the launcher's directory.
    """

    async_safe = True

    def __init__(self, trainer: Trainer, directory: str):
        super().__init__()
        self._trainer = trainer
        self._directory = directory
        self._steps = StepFile(directory)

    def on_train_begin(self, logs: dict[str, Any] | None = None):
        reached, step = self._steps.read(), self._trainer.step
        if reached:
            lost = {"continued_after": step, "lost_steps": max(0, reached - step)}
            append_record(self._directory, lost)
        self._steps.write(step)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None):
        self._steps.write(self._trainer.step)
