"""The callbacks that write to a run directory."""

import math
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.devices import measure_process_age
from tfdist.errors import shorten_error
from tfdist.launch.progress import StepFile, append_record
from tfdist.records.recorded_run import read_recorded_run
from tfdist.records.run_directory import WITHIN_EPOCHS, RunDirectory
from tfdist.runs.events import forget_events_after, write_hyperparameters
from tfdist.runs.reporting import write_report
from tfdist.runs.trackers import Trackers
from tfdist.tasks.base import Task
from tfdist.tasks.data import SourceData
from tfdist.training.fit.trainer import Trainer

_MOST_POINTS = 200  # of a curve; more are not told apart
_WRITE_EVERY_S = 5.0
_MOST_OF_TIME = 0.01  # that the report may take


class Throughput(keras.callbacks.Callback):
    """Measures the training speed, without the first step and those that ran in one loop with it.

    Attributes:
      first_step_s: seconds from the start of the process to the end of its first step; None before.
    """

    async_safe = True

    def __init__(self, trainer: Trainer, global_batch_size: int):
        super().__init__()
        self.first_step_s: float | None = None
        self._trainer = trainer
        self._global_batch_size = global_batch_size
        self._seconds = 0.0
        self._steps = 0
        self._begun = 0.0
        self._before = (0.0, 0.0)  # seconds in steps and of input wait at the first step's end

    @property
    def examples_per_second(self) -> float:
        """Training examples per second, over the measured steps."""
        return self._steps * self._global_batch_size / self._seconds if self._seconds else 0.0

    @property
    def input_fraction(self) -> float | None:
        """The input fraction: the part of the time spent waiting for batches; None if unknown."""
        total = self._trainer.engine.seconds_of_input
        if total is None or not self._seconds:
            return None
        return min(1.0, (total - self._before[1]) / self._seconds)

    @property
    def host_fraction(self) -> float | None:
        """The fraction of the time spent between steps, on logs and callbacks; None at first."""
        if not self._seconds:
            return None
        return 1 - (self._trainer.progress.steps_s - self._before[0]) / self._seconds

    def on_train_batch_begin(self, batch, logs=None):
        self._begun = time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        if self.first_step_s is None:
            self.first_step_s = measure_process_age()
            trainer = self._trainer
            self._before = trainer.progress.steps_s, trainer.engine.seconds_of_input or 0.0
        elif self._trainer.progress.steps_s > self._before[0]:
            self._seconds += time.perf_counter() - self._begun
            self._steps += 1
        self._begun = time.perf_counter()  # the next step may have begun before


class MetricsLog(keras.callbacks.Callback):
    """Writes lines of `metrics.jsonl`: one per epoch, and one every `log_every` steps, if any."""

    def __init__(
        self,
        run: RunDirectory,
        trainer: Trainer,
        throughput: Throughput,
        *,
        log_every: int = 0,
        trackers: Trackers | None = None,
    ):
        super().__init__()
        self._run = run
        self._trackers = trackers
        self._trainer = trainer
        self._throughput = throughput
        self._log_every = log_every
        self._epoch = 0

    @property
    def async_safe(self) -> bool:
        """Whether no line has the learning rate of a certain step."""
        return not self._log_every

    def on_train_begin(self, logs=None):
        # An open epoch ends again in this run, and then writes its line again.
        lines = int(self._is_logged()) if self._trainer.progress.is_epoch_open else None
        self._run.forget_metrics_after(self._trainer.step, lines_of_step=lines)
        if self._trackers:
            self._trackers.begin(self._run.read_metrics())

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None):
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None):
        if self._is_logged():
            self._write(logs)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None):
        self._write(logs)

    def on_train_end(self, logs=None):
        if self._trackers:
            self._trackers.end(is_finished=not self._trainer.progress.was_stopped)

    def _is_logged(self) -> bool:
        """Returns whether the current step has a line of its own, besides the epoch's."""
        return self._log_every > 0 and self._trainer.step % self._log_every == 0

    def _write(self, logs: dict[str, Any] | None) -> None:
        line = {"step": self._trainer.step, "epoch": self._epoch + 1, **(logs or {})}
        line |= self._trainer.engine.summarize()
        line |= read_learning_rate(self._trainer)
        line["examples_per_second"] = round(self._throughput.examples_per_second, 2)
        self._run.append_metrics(line)
        if self._trackers:
            self._trackers.log(line)


class CurvesLog(keras.callbacks.Callback):
    """Writes lines of `steps.jsonl` within epochs, for the curves of a report.

    They are written every few seconds, so that a crash loses some of them, but no step waits.
    """

    async_safe = True

    def __init__(self, run: RunDirectory, trainer: Trainer, *, total_steps: int):
        super().__init__()
        self._run = run
        self._trainer = trainer
        self._every = math.ceil(total_steps / _MOST_POINTS) or 1
        self._epoch = 0
        self._lines: list[dict[str, Any]] = []
        self._written = time.monotonic()

    def on_train_begin(self, logs=None):
        self._run.forget_metrics_after(self._trainer.step, name=WITHIN_EPOCHS)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None):
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None):
        step = self._trainer.step
        if step % self._every == 0:
            values = {
                name: value
                for name, value in (logs or {}).items()
                if isinstance(value, (int, float)) and "/" not in name
            }
            self._lines.append({"step": step, "epoch": self._epoch + 1, **values})
            if time.monotonic() - self._written >= _WRITE_EVERY_S:
                self._write()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None):
        self._write()

    def on_train_end(self, logs=None):
        self._write()

    def _write(self) -> None:
        if self._lines:
            self._run.append_metrics(*self._lines, name=WITHIN_EPOCHS)
            self._lines.clear()
        self._written = time.monotonic()


class MarkBest(keras.callbacks.Callback):
    """Keeps the checkpoint of the epoch with the best value of the log `monitor` so far."""

    def __init__(self, trainer: Trainer, monitor: str, *, is_higher_better: bool):
        super().__init__()
        self._trainer = trainer
        self._monitor = monitor
        self._sign = 1.0 if is_higher_better else -1.0

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None):
        # Checkpoints hold the history, so the best value from before a restart is known.
        seen = [self._sign * x for x in self._trainer.history.history.get(self._monitor, [])]
        value = self._sign * (logs or {}).get(self._monitor, math.nan)
        recovery = self._trainer.recovery
        if value >= max(seen, default=-math.inf) and recovery is not None:
            recovery.mark_best()


class TensorBoardLog(keras.callbacks.Callback):
    """Writes each epoch's logs for TensorBoard, with validation in its own directory.

    Unlike Keras's callback, it removes the events that were written after the checkpoint from
    which a run continues, so that no curve doubles back.

    Args:
      write_more: writes more about an epoch with `tf.summary`; its argument is the step.
    """

    def __init__(
        self,
        run: RunDirectory,
        trainer: Trainer,
        *,
        hyperparameters: Mapping[str, Any] | None = None,
        write_more: Callable[[int], None] = lambda step: None,
    ):
        super().__init__()
        self._run = run
        self._trainer = trainer
        self._hyperparameters = hyperparameters
        self._write_more = write_more
        self._writers: dict[str, Any] = {}

    def on_train_begin(self, logs=None):
        for part in ("train", "validation", "task"):
            directory = f"{self._run.tensorboard}/{part}"
            forget_events_after(
                directory, self._trainer.step - self._trainer.progress.is_epoch_open
            )
            self._writers[part] = tf.summary.create_file_writer(directory)
        if self._hyperparameters:
            write_hyperparameters(self._run.tensorboard, self._hyperparameters)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None):
        step = self._trainer.step
        for name, value in (read_learning_rate(self._trainer) | (logs or {})).items():
            part = "validation" if name.startswith("val_") else "train"
            with self._writers[part].as_default():
                tf.summary.scalar(name.removeprefix("val_"), value, step=step)
        with self._writers["task"].as_default():
            self._write_more(step)
        for writer in self._writers.values():
            writer.flush()

    def on_train_end(self, logs=None):
        for writer in self._writers.values():
            writer.close()


class Profile(keras.callbacks.Callback):
    """Writes a trace of some steps, counted from 1, for TensorBoard's profile plugin."""

    def __init__(self, run: RunDirectory, trainer: Trainer, *, first: int, last: int):
        super().__init__()
        self._run = run
        self._trainer = trainer
        self._first, self._last = first, last
        self._is_tracing = False

    def on_train_batch_begin(self, batch, logs=None):
        if self._trainer.step + 1 == self._first:
            tf.profiler.experimental.start(self._run.tensorboard)
            self._is_tracing = True

    def on_train_batch_end(self, batch, logs=None):
        if self._trainer.step == self._last:
            self._stop()

    def on_train_end(self, logs=None):
        self._stop()

    def _stop(self) -> None:
        if self._is_tracing:
            tf.profiler.experimental.stop()
        self._is_tracing = False


def read_learning_rate(trainer: Trainer) -> dict[str, float]:
    """Returns `learning_rate`, that of the next step; nothing if the model has no optimizer."""
    optimizer = trainer.model.optimizer
    if optimizer is None:
        return {}
    return {"learning_rate": float(keras.ops.convert_to_numpy(optimizer.learning_rate))}


class ReportSteps(keras.callbacks.Callback):
    """Writes completed steps to the launcher's file, and records which ones a run repeats."""

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


class DrawSamples(keras.callbacks.Callback):
    """Lets the task draw predictions; for all workers, because all of them predict.

    The chief writes `samples/NAME.png`, in place of the picture of an earlier epoch.
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


class WriteReport(keras.callbacks.Callback):
    """Writes the report at the end of an epoch, unless that takes too much of the time.

    A report that cannot be written costs one line, not the run.
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
