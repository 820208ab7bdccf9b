"""The display of a command that trains: a progress bar in a terminal, lines elsewhere."""

import sys
import time
from typing import Any

import keras

from tfdist.cluster import can_redraw
from tfdist.data.progress import Pace, print_line
from tfdist.runs.callbacks import Throughput
from tfdist.training.fit.trainer import Trainer

_EVERY_S = 60.0  # between two lines within an epoch, later on


def make_display(trainer: Trainer, throughput: Throughput, *, total_steps: int) -> "ProgressBar":
    """Builds the display of `fit`: a bar in a terminal, elsewhere lines."""
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
    """Prints lines for files, pipes and notebooks: of each epoch, and within it.

    The first one comes after the first step, further ones after seconds, and later minutes.
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
        self._pace = Pace(every_s)
        self._epoch = 0
        self._start: tuple[float, int] | None = None  # time and step after the first step

    def set_params(self, params: dict[str, Any]) -> None:
        super().set_params(params)
        self.params = params

    def on_train_begin(self, logs=None):
        pass

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch

    def on_train_batch_begin(self, batch, logs=None):
        pass

    def on_train_batch_end(self, batch, logs=None):
        if self._start is None:
            self._start = time.monotonic(), self._trainer.step
        if self._pace.is_due():
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
        self._pace.note()
        values = ", ".join(f"{name} {value:.4g}" for name, value in _drop_details(logs).items())
        epochs, step = self.params["epochs"], self._trainer.step
        line = f"epoch {self._epoch + 1}/{epochs}, step {step}/"
        line += f"{self._total_steps}: {values}"
        if rate := self._throughput.examples_per_second:
            line += f"; {rate:.4g} examples/s"
        began, first = self._start or (0.0, step)
        left = self._total_steps - step
        if left and step > first:
            seconds = (time.monotonic() - began) / (step - first) * left
            line += f", {_format_time(seconds)} left"
        print_line(line)


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
