"""The loop of `fit`: epochs of steps, validation, callbacks, checkpoints and stops."""

import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NoReturn

import keras
import numpy as np
import tensorflow as tf

from tfdist.errors import TfdistError, TrainingError
from tfdist.launch.pulse import BUSY, OWN, STEP
from tfdist.training.agreement import agree, check_data
from tfdist.training.averaging import finalize_weights
from tfdist.training.callback_list import CallbackList
from tfdist.training.callback_state import read_callbacks, to_json, write_callbacks
from tfdist.training.checkpoints import find_nonfinite
from tfdist.training.data_adapter import DataAdapter
from tfdist.training.data_errors import explain_data_errors
from tfdist.training.engine import Engine
from tfdist.training.example_order import ExampleOrder, read_order
from tfdist.training.history import find_history, keep_epochs, read_history, write_history
from tfdist.training.model_variables import hash_values, keeping_values
from tfdist.training.recovery import Recovery
from tfdist.training.schedule import Interval, Progress, Schedule
from tfdist.training.training_steps import Trained, TrainingSteps


class FitLoop:
    """One call of a trainer's `fit`, which runs identically on every worker.

    Args:
      engine: the engine of the trainer's model, which is built.
      adapter: the data.
      progress: the trainer's progress, which is updated.
      recovery: writes and restores checkpoints; None for none.
      schedule: steps and epochs.
      callbacks: Keras's callbacks, including the history.
      interval: the interval between checkpoints, in addition to one per epoch.
      data: what a checkpoint records about the data: the fingerprint, and the batch size.
      evaluate: validates and returns the logs, or None once its argument reports a stop;
        None for no validation.
      reorder: order -> the data in this order, and their fingerprint; None if the order of a
        checkpoint must be that of the data.
    """

    def __init__(
        self,
        engine: Engine,
        adapter: DataAdapter,
        *,
        progress: Progress,
        recovery: Recovery | None,
        schedule: Schedule,
        callbacks: CallbackList,
        interval: Interval,
        data: Mapping[str, Any],
        evaluate: Callable[[Callable[[], bool]], dict[str, float] | None] | None,
        reorder: Callable[[ExampleOrder], tuple[DataAdapter, dict[str, Any]]] | None = None,
    ):
        self._engine = engine
        self._adapter = adapter.begin_at(schedule.first_step)
        self._model = engine.model
        self._steps: TrainingSteps = engine.build(adapter)
        self._progress = progress
        self._workers = engine.workers
        self._pulse = engine.workers.pulse
        self._is_compiled = False
        self._recovery = recovery
        self._schedule = schedule
        self._history = find_history(callbacks)
        self._callbacks = callbacks
        self._interval = interval
        self._evaluate = evaluate
        self._reorder = reorder
        self._begin_epoch: Callable[[int], None] = callbacks.on_epoch_begin
        self._data = data
        self._iterator: Any = None
        self._opened_at = 0
        self._started: tuple[int, int, Callable[[], list[Trained]]] | None = None
        self._ends_with_data = not schedule.is_known
        progress.is_epoch_open = False
        self._logs: dict[str, Any] = {}

    def run(self, *, verbose: int) -> None:
        """Trains to the end of the schedule, or until it is stopped."""
        try:
            with explain_data_errors(self._adapter.batch_spec), self._pulse.at(OWN):
                self._run(verbose=verbose)
        except BaseException:
            if self._recovery:
                self._recovery.finish_writing()
            raise

    def _run(self, *, verbose: int) -> None:
        progress = self._progress
        self._begin(verbose=verbose)
        if self._ends_with_data and self._schedule.is_known:
            self._adapter = replace(self._adapter, learned_steps=self._schedule.steps_per_epoch)
        self._agree()
        self._engine.compare_weights()
        while not (progress.was_stopped or self._is_over()):
            epoch = (progress.step - progress.is_epoch_open) // self._schedule.steps_per_epoch
            self._begin_epoch(epoch)
            self._begin_epoch = self._callbacks.on_epoch_begin
            if not progress.is_epoch_open:
                self._adapter.on_epoch_begin()
                if not self._run_epoch(epoch):
                    break
                if not (progress.was_stopped or self._model.stop_training):
                    self._adapter.on_epoch_end()
            if progress.was_stopped or not self._end_epoch(epoch):
                self._save()
                break
        with self._pulse.at(BUSY):
            self._steps.wait()
            if self._recovery:
                self._recovery.wait()
            self._finalize()
        self._callbacks.on_train_end(self._logs)

    def _run_epoch(self, epoch: int) -> bool:
        """Trains to the end of an epoch or of the data; returns whether the epoch is complete."""
        progress = self._progress
        while True:
            if self._iterator is None:
                self._open()
            try:
                self._run_steps(epoch)
            except (tf.errors.OutOfRangeError, StopIteration):
                self._end_started()
                if not self._steps.passes_on:
                    self._iterator = None
                is_between_epochs = self._opened_at < progress.step == self._find_start(epoch)
                if self._adapter.begins_anew and is_between_epochs:
                    continue
                return self._take_end_of_data(epoch)
            if self._model.stop_training:
                return True
            if self._ends_with_data and progress.is_epoch_open:
                self._run_out(progress.step - self._find_start(epoch))
            if self._ends_with_data or self._adapter.is_read(progress.step):
                self._end_pass()
            return True

    def _open(self) -> None:
        self._opened_at = self._progress.step
        self._is_compiled = False  # and the first step may fill a buffer
        self._iterator = self._steps.iterate_train(
            self._adapter,
            start_step=self._progress.step,
            steps_per_epoch=self._schedule.steps_per_epoch,
            total_steps=self._schedule.total_steps,
        )

    def _run_out(self, batch: int) -> None:
        """Requests one more batch, as Keras does in each epoch of data of unknown length.

        The part of a step that needs no data still runs: the optimizer counts and decays weights.
        """
        self._callbacks.on_train_batch_begin(batch)
        try:
            self._steps.train(self._iterator)
        except (tf.errors.OutOfRangeError, StopIteration):
            self._steps.count_empty_step()
            return
        raise TfdistError(
            "The data have more batches in this epoch than the "
            f"{self._schedule.steps_per_epoch} of the first. Give `steps_per_epoch`, or data with "
            "the same number of batches in each epoch."
        )

    def _end_pass(self) -> None:
        """Drops a dataset that was read to its end, as Keras does, before the validation."""
        is_last = self._progress.step >= self._schedule.total_steps
        if not self._steps.passes_on:
            self._iterator = None
            if not (self._adapter.drops_between or self._adapter.is_python or is_last):
                self._open()
        if is_last or (self._adapter.drops_between and not self._steps.passes_on):
            self._adapter.drop_pass()

    def _take_end_of_data(self, epoch: int) -> bool:
        """Ends an epoch with its data, as Keras does; returns whether the epoch is complete."""
        batch = self._progress.step - self._find_start(epoch)
        if batch == 0:
            warnings.warn("The data ran out; training ends before its last epoch.", stacklevel=2)
            return False
        if self._schedule.is_known:
            warnings.warn("The data ran out in the middle of an epoch.", stacklevel=2)
            return False
        self._schedule = self._schedule.learn(batch)
        self._adapter = self._adapter.begin_at(self._schedule.first_step)
        self._progress.step = self._find_start(epoch) + batch
        self._steps.count_empty_step()
        self._end_steps()
        return True

    def _find_start(self, epoch: int) -> int:
        return epoch * self._schedule.steps_per_epoch

    def _finalize(self) -> None:
        """Finalizes the weights, but not after a stop: the next run continues from the weights."""
        optimizer = self._model.optimizer
        if isinstance(optimizer, keras.optimizers.Optimizer) and not self._progress.was_stopped:
            finalize_weights(self._model, optimizer)

    def _begin(self, *, verbose: int) -> None:
        """Starts from the newest checkpoint, or else from the trainer's current state."""
        progress, history = self._progress, self._history
        self._model.stop_training = False
        self._adapter.on_epoch_end()
        found = None
        with self._pulse.at(BUSY):
            if self._recovery:
                self._steps.prepare(self._adapter)
                found = self._recovery.restore(
                    self._engine.list_state(),
                    optimizer=self._model.optimizer,
                    begun_from=self._hash_beginning(),
                )
            self._steps.begin(restored=found is not None)
        if found is None:
            self._callbacks.on_train_begin()
            restored_epoch = self._model._initial_epoch or 0  # set by BackupAndRestore
            first = restored_epoch * self._schedule.steps_per_epoch
            progress.step = max(self._schedule.first_step, first)
            return
        progress.step, state, arrays = found
        if self._ends_with_data and state.get("steps_per_epoch"):
            self._schedule = self._schedule.learn(state["steps_per_epoch"])
        self._take_order(state.get("data", {}).get("train", {}))
        check_data(state.get("data", {}), self._data, step=progress.step)
        progress.resumed_from_step = progress.step
        progress.is_epoch_open = state["is_epoch_open"]
        num_epochs, batch = divmod(progress.step, self._schedule.steps_per_epoch)
        self._adapter = self._adapter.begin_at(self._schedule.first_step)
        epochs_read = num_epochs - self._schedule.first_epoch
        self._adapter.replay(epochs_read, self._schedule.steps_per_epoch)
        sums = state.get("metrics", [])  # of a checkpoint of an older version: all replicas' sum
        self._steps.write_states(state.get("metric_states") or [[value] for value in sums])
        self._interval.reset(step=progress.step)
        self._callbacks.on_train_begin()
        if verbose:
            print(
                f"Continuing after step {progress.step} of {self._schedule.total_steps}"
                f"{self._adapter.how_to_continue}."
            )
        parts = self._callbacks.callbacks, state["callbacks"], arrays
        write_callbacks(*parts)
        if batch or progress.is_epoch_open:
            self._begin_epoch = lambda epoch: self._begin_again(
                epoch, lambda: write_callbacks(*parts)
            )
        write_history(history, state["history"])
        if not progress.is_epoch_open:
            # Without an epoch that a callback ended midway and that now continues.
            is_over = progress.step >= self._schedule.total_steps
            keep_epochs(history, num_epochs + (is_over and batch > 0))
        # While the length of an epoch is unknown, this may be the end of the first one.
        is_last = self._progress.is_epoch_open or not self._schedule.is_known
        self._logs = dict(state["logs"]) if is_last else {}
        # A run that a callback ended continues if it is asked for a different number of steps.
        same_end = state["total_steps"] == self._schedule.total_steps
        self._model.stop_training = state["stop_training"] and same_end

    def _hash_beginning(self) -> str | None:
        """Returns a hash of the state from which a further `fit` begins; None for the first.

        The first `fit` of a new process begins from other weights than before.
        """
        if not self._progress.num_fits:
            return None
        optimizer = self._model.optimizer
        own = optimizer.variables if optimizer is not None else []
        return hash_values([*self._model.variables, *own])

    def _take_order(self, before: Mapping[str, Any]) -> None:
        """Continues with the order that the data of a checkpoint have, if it may be another one."""
        recorded, own = (data.get("order", {}) for data in (before, self._data["train"]))
        if self._reorder is None or "seed" not in recorded or recorded == own:
            return
        self._adapter, train = self._reorder(read_order(recorded))
        self._data = {**self._data, "train": train}

    def _begin_again(self, epoch: int, restore_callbacks: Callable[[], None]) -> None:
        """Calls `on_epoch_begin` for an epoch that continues, without changing any variable."""
        with keeping_values(self._engine.list_state()):
            self._callbacks.on_epoch_begin(epoch)
        restore_callbacks()

    def _is_over(self) -> bool:
        progress = self._progress
        done = progress.step >= self._schedule.total_steps and not progress.is_epoch_open
        return done or self._model.stop_training

    def _run_steps(self, epoch: int) -> None:
        """Trains to the end of an epoch, or until all workers agree to stop."""
        start = self._find_start(epoch)
        batch = self._progress.step - start
        last = self._schedule.count_steps(epoch)
        is_sure = self._adapter.has_known_end or (self._ends_with_data and self._schedule.is_known)
        # A loop that finds no data for one of its steps loses the results of those before.
        most = self._engine.options.steps_per_loop if is_sure else 1
        if batch == 0:
            self._steps.reset_metrics()
        while batch < last:
            left = min(last - batch, self._interval.count_steps_left(start + batch))
            num_steps = int(min(most, left))
            self._start_steps(batch, num_steps, last)
            batch += num_steps
            is_due = self._interval.is_due(start + batch)
            if batch < last and not is_due and self._runs_ahead():
                continue
            if not self._end_started():
                continue
            is_due = self._agree(save=is_due)
            if batch == last:
                self._end_steps()
            if self._progress.was_stopped or self._model.stop_training:
                return
            if is_due and batch < last:
                self._save()

    def _start_steps(self, batch: int, num_steps: int, last: int) -> None:
        """Starts to train on some batches of an epoch with `last` batches; ends those before."""
        with self._pulse.at(BUSY):
            self._iterator = self._engine.check_division("train", self._iterator, self._adapter)
        self._callbacks.on_train_batch_begin(batch)
        began = time.perf_counter()
        with self._pulse.at(STEP if self._is_compiled else BUSY):
            read = self._steps.start(self._iterator, num_steps)
        self._progress.steps_s += time.perf_counter() - began
        self._end_started()
        self._started = (batch, last, read)

    def _runs_ahead(self) -> bool:
        """Returns whether to start the next step before the results of the last one are read."""
        is_stopping = self._progress.is_asked_to_stop or self._model.stop_training
        return self._steps.runs_ahead and not is_stopping and self._callbacks.may_be_late("train")

    def _end_started(self) -> bool:
        """Waits for the steps that were started last, if any, and calls callbacks for each.

        Returns:
          Whether the workers are in sync.
        """
        if self._started is None:
            return True
        (batch, last, read), self._started = self._started, None
        progress = self._progress
        began = time.perf_counter()
        with self._pulse.at(STEP if self._is_compiled else BUSY):
            found = read()
        self._is_compiled = True
        progress.steps_s += time.perf_counter() - began
        for index, trained in enumerate(found, start=batch):
            if index > batch:
                self._callbacks.on_train_batch_begin(index)
            progress.step += 1
            loss = trained.logs.get("loss", 0.0)
            if not np.all(np.isfinite(loss)):
                self._fail(f"The loss of step {progress.step} is {loss}.")
            with self._pulse.at(STEP):
                is_synced = self._steps.sync(progress.step, is_last=index + 1 == last)
            self._logs = self._steps.read_training_logs(trained)
            self._callbacks.on_train_batch_end(index, self._logs)
        return is_synced

    def _end_steps(self) -> None:
        self._logs = self._steps.conclude("train", self._logs)
        self._progress.is_epoch_open = True

    def _end_epoch(self, epoch: int) -> bool:
        """Validates and ends an epoch; returns False if a stop was requested meanwhile."""
        if self._evaluate is not None and self._schedule.validation_epochs(epoch):
            is_alone = self._workers.count == 1  # else all workers must agree to stop
            logs = self._evaluate(lambda: is_alone and self._progress.is_asked_to_stop)
            if logs is None:
                self._agree()
                return False
            self._logs |= {f"val_{name}": value for name, value in logs.items()}
        self._callbacks.on_epoch_end(epoch, self._logs)
        self._progress.is_epoch_open = False
        self._agree()
        if not self._progress.was_stopped:
            self._save()
        return not self._progress.was_stopped

    def _agree(self, *, save: bool = False) -> bool:
        """Makes all workers stop if one of them was asked to, or if a callback of one requests it.

        Returns:
          Whether one of them requests a checkpoint.
        """
        stop, self._model.stop_training, save = agree(
            self._workers,
            self._model,
            self._progress.is_asked_to_stop,
            self._model.stop_training,
            save,
            read=self._take_digests(),
        )
        self._progress.was_stopped = stop
        return save

    def _take_digests(self) -> dict[str, Any]:
        """Returns the digests of the batches that were used since the last call."""
        digests = self._adapter.digests
        return digests.take(self._progress.step - self._opened_at) if digests else {}

    def _save(self) -> None:
        """Compares the weights; starts writing a checkpoint if checkpoints are kept."""
        self._engine.compare_weights()
        if self._recovery is not None:
            with self._pulse.at(BUSY):
                self._save_to(self._recovery)

    def _save_to(self, recovery: Recovery) -> None:
        if name := find_nonfinite(self._model.trainable_variables):
            self._fail(f"The weight {name} is not finite after step {self._progress.step}.")
        self._steps.prepare_checkpoint()
        callbacks, arrays = read_callbacks(self._callbacks.callbacks)
        recovery.save(
            step=self._progress.step,
            variables=self._engine.list_state(),
            arrays=arrays,
            state={
                "history": to_json(read_history(self._history)),
                "logs": to_json(self._logs),
                "metric_states": [parts.tolist() for parts in self._steps.read_states()],
                "callbacks": callbacks,
                "is_epoch_open": self._progress.is_epoch_open,
                "stop_training": self._model.stop_training,
                "total_steps": self._schedule.total_steps,
                "steps_per_epoch": self._schedule.steps_per_epoch if self._schedule.is_known else 0,
                "data": self._data,
            },
            optimizer=self._model.optimizer,
        )
        self._interval.reset(step=self._progress.step)

    def _fail(self, reason: str) -> NoReturn:
        last_good = self._recovery.describe_newest() if self._recovery else "No checkpoint yet."
        raise TrainingError(
            f"{reason} {last_good} Lower the learning rate, clip the gradients, or check the data."
        )
