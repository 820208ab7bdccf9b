"""The display of a command that trains: a progress bar in a terminal, lines elsewhere."""

import sys
import time
from typing import Any

import keras

from tfdist.cluster import can_redraw
from tfdist.runs.callbacks import Throughput
from tfdist.training.fit.trainer import Trainer

_EVERY_S = 60.0  # between two lines within an epoch


def make_display(trainer: Trainer, throughput: Throughput, *, total_steps: int) -> "ProgressBar":
    """Builds the display of `fit`: a bar in a terminal, elsewhere lines per epoch and minute."""
    if can_redraw(sys.stdout):
        return ProgressBar()
    return LogLines(trainer, throughput, total_steps=total_steps)


class ProgressBar(keras.callbacks.ProgbarLogger):
    """Keras's progress bar without the details of metrics, such as `accuracy/NAME`."""

    async_safe = True

    def on_train_batch_end(self, batch, logs=None):
        super().on_train_batch_end(batch, _drop_details(logs))

    def on_test_batch_end(self, batch, logs=None):
        super().on_test_batch_end(batch, _drop_details(logs))

    def on_epoch_end(self, epoch, logs=None):
        super().on_epoch_end(epoch, _drop_details(logs))

    def on_test_end(self, logs=None):
        super().on_test_end(_drop_details(logs))


class LogLines(ProgressBar):
    """Prints a line per epoch and one per minute, for files, pipes and notebooks.

    Args:
      trainer: the trainer whose step is shown.
      throughput: the callback whose speed is shown.
      total_steps: the steps of the run.
      every_s: seconds between two lines within an epoch.
    """

    def __init__(
        self,
        trainer: Trainer,
        throughput: Throughput,
        *,
        total_steps: int,
        every_s: float = _EVERY_S,
    ):
        super().__init__()
        self._trainer = trainer
        self._throughput = throughput
        self._total_steps = total_steps
        self._every_s = every_s
        self._epoch = 0
        self._start = (0.0, 0)  # time and step
        self._shown = 0.0

    def set_params(self, params: dict[str, Any]) -> None:
        super().set_params(params)
        self.params = params

    def on_train_begin(self, logs=None):
        self._shown = time.monotonic()
        self._start = self._shown, self._trainer.step

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch

    def on_train_batch_begin(self, batch, logs=None):
        pass

    def on_train_batch_end(self, batch, logs=None):
        if time.monotonic() - self._shown >= self._every_s:
            self._show(logs)

    def on_epoch_end(self, epoch, logs=None):
        self._show(logs)

    def on_test_begin(self, logs=None):
        pass

    def on_test_batch_end(self, batch, logs=None):
        pass

    def on_test_end(self, logs=None):
        pass

    def _show(self, logs: dict[str, Any] | None) -> None:
        if not self.params.get("verbose"):
            return
        self._shown = time.monotonic()
        values = ", ".join(f"{name} {value:.4g}" for name, value in _drop_details(logs).items())
        epochs, step = self.params["epochs"], self._trainer.step
        line = f"{time.strftime('%H:%M:%S')} epoch {self._epoch + 1}/{epochs}, step {step}/"
        line += f"{self._total_steps}: {values}"
        if rate := self._throughput.examples_per_second:
            line += f"; {rate:.4g} examples/s"
        began, first = self._start
        left = self._total_steps - step
        if left and step > first:
            line += f", {_format_time((self._shown - began) / (step - first) * left)} left"
        print(line, flush=True)


def _drop_details(logs: dict[str, Any] | None) -> dict[str, Any]:
    return {name: value for name, value in (logs or {}).items() if "/" not in name}


def _format_time(seconds: float) -> str:
    """Returns a duration as text.

    >>> [_format_time(x) for x in (42.4, 150, 9000)]
    ['42 s', '2.5 min', '2.5 h']
    """
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.2g} min" if seconds < 3600 else f"{seconds / 3600:.2g} h"
