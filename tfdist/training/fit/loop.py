"""The loop of `fit`: epochs of steps, validation, callbacks, checkpoints and stops."""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, NoReturn

import numpy as np
import tensorflow as tf

from tfdist.distributed_variables import spread_raw_writes
from tfdist.errors import TfdistError, TrainingError
from tfdist.internals import STEP_TAKES_BATCH
from tfdist.launch.pulse import BUSY, OWN, STEP
from tfdist.strategies.logical_replicas import describe_change
from tfdist.training.checkpoint.files import find_nonfinite
from tfdist.training.checkpoint.recovery import Recovery
from tfdist.training.fit.averaging import finalize_weights
from tfdist.training.fit.callback_list import (
    CallbackList,
    find_history,
    keep_epochs,
    read_history,
    write_history,
)
from tfdist.training.fit.callback_state import read_callbacks, to_json, write_callbacks
from tfdist.training.fit.engine import Engine
from tfdist.training.fit.schedule import Interval, Progress, Schedule, warn_of_end
from tfdist.training.inputs.data_adapter import DataAdapter
from tfdist.training.inputs.data_errors import explain_data_errors
from tfdist.training.inputs.example_order import read_order
from tfdist.training.kinds.base import StepLogs, TrainingSteps
from tfdist.training.step.model_variables import hash_changes, hash_values, keeping_values
from tfdist.training.workers.agreement import agree, check_data


class Validation(NamedTuple):
    """The validation of an epoch.

    Attributes:
      adapter: its data.
      run: validates and returns the logs, or None once its argument reports a stop.
    """

    adapter: DataAdapter
    run: Callable[[Callable[[], bool]], dict[str, float] | None]


class FitLoop:
    """One call of a trainer's `fit`, which runs identically on every worker.

    Args:
      recovery: writes and restores checkpoints; None for none.
      data: what a checkpoint records about the data: the fingerprint, and the batch size.
      validation: validates after an epoch; None for no validation.
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
        validation: Validation | None,
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
        self._reading = schedule.reading
        self._at_a_time = schedule.reading.at_a_time
        self._epoch = self._start = 0  # the current epoch, and the step at which it begins
        self._learned_steps = schedule.steps_per_epoch if schedule.is_known else 0
        self._last_step, self._is_complete = 0.0, True
        self._history = find_history(callbacks)
        self._callbacks = callbacks
        self._interval = interval
        self._validation = validation
        self._begin_epoch: Callable[[int], None] = callbacks.on_epoch_begin
        self._data = data
        self._iterator: Any = None
        self._opened_at = self._num_resets = 0
        self._started: tuple[int, int | None, Callable[[], list[StepLogs]]] | None = None
        self._nonfinite = ""  # which loss, until callbacks have seen it
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
        self._check_lengths()
        self._agree()
        while not (progress.was_stopped or self._is_over()):
            epoch = self._epoch
            self._begin_epoch(epoch)
            self._engine.compare_weights()  # before a step makes averages of them
            self._begin_epoch = self._callbacks.on_epoch_begin
            if not progress.is_epoch_open:
                self._adapter.on_epoch_begin()
                self._run_epoch()
                if not (progress.was_stopped or self._model.stop_training):
                    self._adapter.on_epoch_end()
            if progress.was_stopped or not self._end_epoch(epoch):
                self._save()
                break
        with self._pulse.at(BUSY):
            self._steps.wait()
            if self._recovery:
                self._recovery.wait()
            if not progress.was_stopped:  # else the next run needs the weights
                finalize_weights(self._model)
        self._callbacks.on_train_end(self._logs)

    def _run_epoch(self) -> None:
        """Trains to the end of an epoch or of the data, as Keras's `EpochIterator` does."""
        progress, reading, steps = self._progress, self._reading, self._steps
        batch = progress.step - self._start
        if batch == 0 and reading.begin_epoch() and self._adapter.begins_anew:
            self._iterator = self._iterator if steps.passes_on else None
        count = reading.count_steps(batch)
        most = self._schedule.max_steps
        last = count if most is None else min(count, most - self._start)
        if self._iterator is None:
            self._open()
        steps.begin_epoch(self._adapter)
        if batch == 0:
            self._engine.reset_metrics()
        self._num_resets, self._is_complete = self._engine.num_resets, False
        has_ended = self._run_steps(batch, last)
        batch = progress.step - self._start
        self._is_complete |= has_ended or batch == count
        if has_ended:
            self._take_end_of_data(batch)
        elif progress.was_stopped or self._model.stop_training:
            if not progress.was_stopped and batch < last:
                self._conclude()
        elif reading.is_at_end:
            if reading.is_cut(batch):
                self._check_even()
                warn_of_end()
            self._end_pass()

    def _open(self) -> None:
        self._opened_at = self._progress.step
        self._is_compiled = False  # and the first step may fill a buffer
        self._iterator = self._steps.iterate_train(
            self._adapter,
            start_step=self._progress.step,
            steps_per_epoch=self._schedule.steps_per_epoch,
            total_steps=self._schedule.total_steps,
        )

    def _end_pass(self) -> None:
        """Begins another pass over a dataset that was read to its end, before the validation.

        Keras does so after each such pass, and drops the new one if each epoch begins one.
        """
        passes_on, adapter = self._steps.passes_on, self._adapter
        self._reading.is_open = False
        is_last = self._is_last_epoch()
        if not passes_on and adapter.begins_anew:
            self._iterator = None
            if not (adapter.drops_between or adapter.is_python or is_last):
                self._reading.begin_epoch()
                self._open()
        if is_last or (adapter.drops_between and not passes_on):
            adapter.drop_pass()

    def _take_end_of_data(self, batch: int) -> None:
        """Ends an epoch with its data, after a request that found no batch."""
        reading = self._reading
        if reading.asked or self._adapter.num_steps:
            self._check_even()
            warn_of_end()
        elif batch != (self._learned_steps or batch):
            self._check_even()
        if not self._steps.passes_on:
            self._iterator = None
        reading.end_data()
        self._learned_steps = self._learned_steps or batch
        if self._at_a_time == 1 and STEP_TAKES_BATCH:
            self._steps.count_empty_step()
        self._end_steps(is_empty=batch == 0)

    def _check_even(self) -> None:
        """Refuses data that end in the middle of an epoch where steps are planned ahead."""
        if self._steps.needs_even_epochs:
            raise TfdistError(
                "The data end in the middle of an epoch, or have other numbers of batches in other "
                "epochs, which this strategy cannot follow. Give `steps_per_epoch` and a dataset "
                "that ends with .repeat(), or use another strategy."
            )

    def _check_lengths(self) -> None:
        reading, schedule = self._reading, self._schedule
        known = reading.num_batches if reading.asked else None
        if known and known % schedule.steps_per_epoch and schedule.total_steps > known:
            self._check_even()

    def _is_last_epoch(self) -> bool:
        most = self._schedule.max_steps
        is_over = most is not None and self._progress.step >= most
        return is_over or self._epoch + 1 >= self._schedule.num_epochs

    def _begin(self, *, verbose: int) -> None:
        """Starts from the newest checkpoint, or else from the trainer's current state."""
        progress, history = self._progress, self._history
        self._model.stop_training = False
        self._adapter.on_epoch_end()
        found = None
        with self._pulse.at(BUSY):
            if self._recovery:
                self._engine.announce_first("train", "Tracing")
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
            self._epoch = max(self._schedule.first_epoch, restored_epoch)
            progress.step = self._start = self._schedule.find_first_step(self._epoch)
            return
        progress.step, state, arrays = found
        self._take_order(state["data"].get("train", {}))
        check_data(state["data"], self._data, step=progress.step)
        progress.resumed_from_step = progress.step
        progress.is_epoch_open = state["is_epoch_open"]
        self._learned_steps = self._learned_steps or state["steps_per_epoch"]
        self._restore_reading(state["reading"])
        if self._validation is not None:
            self._validation.adapter.replay_evaluated((state["reading"] or {}).get("evaluated", 0))
        num_epochs, batch = self._epoch, progress.step - self._start
        epochs_read = num_epochs - self._schedule.first_epoch + progress.is_epoch_open
        self._adapter.replay(epochs_read, self._learned_steps)
        if progress.step:
            self._engine.reset_metrics()
        self._steps.write_states(state["metric_states"])
        self._interval.reset(step=progress.step)
        self._callbacks.on_train_begin()
        if verbose:
            total = self._schedule.total_steps
            if not self._schedule.is_known:
                total = self._schedule.num_epochs * self._learned_steps
            end = f" of {total}" if total else ""
            how = self._adapter.how_to_continue
            print(f"Continuing after step {progress.step}{end}{how}.", flush=True)
            if change := describe_change(state.get("numerics", {}), self._engine.numerics):
                print(change, flush=True)
        parts = self._callbacks.callbacks, state["callbacks"], arrays
        write_callbacks(*parts)
        if batch or progress.is_epoch_open:
            self._begin_epoch = lambda epoch: self._begin_again(
                epoch, lambda: write_callbacks(*parts)
            )
        write_history(history, state["history"])
        if not progress.is_epoch_open:
            # Without an epoch that a callback ended midway and that now continues.
            keep_epochs(history, num_epochs + (self._is_at_end() and batch > 0))
        # While the length of an epoch is unknown, this may be the end of the first one.
        is_last = self._progress.is_epoch_open or not self._learned_steps
        self._logs = dict(state["logs"]) if is_last else {}
        # A run that a callback ended continues if it is asked for a different number of steps.
        same_end = state["total_steps"] == self._schedule.total_steps
        self._model.stop_training = state["stop_training"] and same_end

    def _hash_beginning(self) -> str | None:
        """Returns a hash of the state from which `fit` begins; None if it does not matter.

        The first one of a process may begin from other initial weights, or those that it has saved.
        """
        if not self._progress.num_fits_of_all:
            return None
        if not self._progress.num_fits:
            return hash_changes(self._model.weights, self._progress.initial_values)
        own = getattr(self._model.optimizer, "variables", [])
        return hash_values([*self._model.variables, *own])

    def _take_order(self, before: Mapping[str, Any]) -> None:
        """Continues with the order that the data of a checkpoint have, if it may be another one."""
        recorded, own = (data.get("order", {}) for data in (before, self._data["train"]))
        reorder = self._adapter.reorder
        if reorder is None or "seed" not in recorded or recorded == own:
            return
        self._adapter, train = reorder(read_order(recorded))
        self._data = {**self._data, "train": train}

    def _begin_again(self, epoch: int, restore_callbacks: Callable[[], None]) -> None:
        """Calls `on_epoch_begin` for an epoch that continues, without changing any variable."""
        with keeping_values(self._engine.list_state()):
            self._callbacks.on_epoch_begin(epoch)
        restore_callbacks()

    def _restore_reading(self, saved: dict[str, Any] | None) -> None:
        """Finds the epoch and the place in the data where a run continues, from what was saved."""
        progress, reading, length = self._progress, self._reading, self._learned_steps
        if saved and saved["asked"] == [reading.asked, self._at_a_time]:
            self._epoch, self._start = saved["epoch"], saved["start"]
            reading.num_batches = reading.num_batches or saved["num_batches"]
            reading.seen, reading.is_open = saved["seen"], saved["is_open"]
            if self._adapter.begins_anew:
                self._adapter = replace(
                    self._adapter, read_before=(saved["passes"], saved["offset"])
                )
            return
        # A checkpoint of other steps, or one that does not say: all epochs have the same number of
        # steps, or the first one is not over.
        first, is_open = self._schedule.first_epoch, progress.is_epoch_open
        self._epoch = (progress.step - is_open) // length if length else first
        self._start = self._epoch * length
        batch, known = progress.step - self._start, reading.num_batches
        if known or reading.asked:
            read = progress.step - self._schedule.first_step
            passes, reading.seen = divmod(read, known) if known else (0, read)
        else:
            passes = self._epoch - first + is_open
            reading.seen = 0 if is_open else batch
            if length:
                whole = replace(reading, seen=length)
                whole.end_data()
                reading.num_batches = whole.num_batches
        reading.is_open = reading.seen > 0
        if self._adapter.begins_anew:
            self._adapter = replace(self._adapter, read_before=(passes, reading.seen))

    def _save_reading(self) -> dict[str, Any]:
        """Returns what `_restore_reading` needs, for a checkpoint."""
        reading, adapter = self._reading, self._adapter
        goes_on = reading.is_open and not reading.is_at_end
        epoch, start = self._epoch, self._start
        return {
            "asked": [reading.asked, self._at_a_time],
            "epoch": epoch,
            "start": start,
            "num_batches": reading.num_batches,
            "seen": reading.seen,
            "is_open": goes_on,
            "passes": adapter.pass_number if goes_on else adapter.num_opened,
            "offset": reading.seen if goes_on else 0,
            "evaluated": self._validation.adapter.num_evaluated if self._validation else 0,
        }

    def _is_at_end(self) -> bool:
        most = self._schedule.max_steps
        return self._epoch >= self._schedule.num_epochs or (
            most is not None and self._progress.step >= most
        )

    def _is_over(self) -> bool:
        done = self._is_at_end() and not self._progress.is_epoch_open
        return done or self._model.stop_training

    def _run_steps(self, batch: int, last: float) -> bool:
        """Trains to the end of an epoch, or until all workers agree to stop.

        Args:
          batch: the steps of the epoch that are done.
          last: its number of steps; infinite if it ends where the data end.

        Returns:
          Whether the data have ended before.
        """
        at_a_time = self._at_a_time
        self._last_step = self._start + last
        while batch < last:
            number = -(-batch // at_a_time) * at_a_time  # Keras counts whole executions
            left = min(last - batch, self._interval.count_steps_left(self._start + batch))
            size = int(
                min(self._most_steps, left) if at_a_time == 1 else min(at_a_time, last - batch)
            )
            with self._pulse.at(BUSY):
                self._iterator = self._engine.check_division("train", self._iterator, self._adapter)
            self._callbacks.on_train_batch_begin(number)
            try:
                done = self._start_steps(number, size)
            except (tf.errors.OutOfRangeError, StopIteration):
                self._end_started()
                return True
            batch += done
            is_due = self._interval.is_due(self._start + batch)
            if batch < last and done == size and not is_due and self._runs_ahead():
                continue
            if not self._end_started():
                continue
            is_due = self._agree(save=is_due)
            if batch == last:
                self._end_steps()
            if self._progress.was_stopped or self._model.stop_training:
                return False
            if done < size:
                if not self._reading.end_short(number):
                    self._end_steps()
                    self._is_complete = True
                    return False
                self._callbacks.on_train_batch_begin(number + at_a_time)
                return True
            if is_due and batch < last:
                self._save()
        return False

    @property
    def _most_steps(self) -> int:
        """The most steps that one loop takes."""
        # A loop that finds no data for one of its steps loses the results of those before.
        return self._steps.most_steps if self._adapter.is_endless else 1

    def _start_steps(self, number: int, size: int) -> int:
        """Starts to train on some batches; ends the steps that were started before.

        Args:
          number: the first batch, as callbacks see it.
          size: the number of batches: those of one execution if Keras takes several at a time.

        Returns:
          The number of steps that were started: fewer than `size` if no more data are left.

        Raises:
          StopIteration, tf.errors.OutOfRangeError: no data are left.
        """
        spread_raw_writes()  # of a callback, too
        done, end = 0, number + self._at_a_time - 1 if self._at_a_time > 1 else None
        while done < size:
            num_steps = min(self._most_steps, size - done)
            began = time.perf_counter()
            if not self._is_compiled:
                what = "Compiling" if self._recovery else "Tracing and compiling"
                self._engine.announce_first("train", what)
            try:
                with self._pulse.at(STEP if self._is_compiled else BUSY):
                    read = self._steps.start(self._iterator, num_steps)
            except (tf.errors.OutOfRangeError, StopIteration):
                if done:
                    break
                raise
            self._progress.steps_s += time.perf_counter() - began
            self._end_started()
            done += num_steps
            self._started = (number, end if done == size else None, read)
        if done < size and self._started:
            self._started = (number, end, self._started[2])
        return done

    def _runs_ahead(self) -> bool:
        """Returns whether to start the next step before the results of the last one are read."""
        is_stopping = self._progress.is_asked_to_stop or self._model.stop_training
        return self._steps.runs_ahead and not is_stopping and self._callbacks.may_be_late("train")

    def _end_started(self) -> bool:
        """Ends the steps started last, with their callbacks; returns if workers are in sync."""
        if self._started is None:
            return True
        (batch, end, read), self._started = self._started, None
        progress = self._progress
        began = time.perf_counter()
        with self._pulse.at(STEP if self._is_compiled else BUSY):
            found = read()
        self._is_compiled = True
        progress.steps_s += time.perf_counter() - began
        is_single = self._at_a_time == 1
        for index, trained in enumerate(found, start=batch):
            if index > batch and is_single:
                self._callbacks.on_train_batch_begin(index)
            progress.step += 1
            self._reading.seen += 1
            loss = trained.logs.get("loss", 0.0)
            if not np.all(np.isfinite(loss)):
                self._nonfinite = self._nonfinite or f"The loss of step {progress.step} is {loss}."
            with self._pulse.at(STEP):
                is_last = progress.step == self._last_step
                is_synced = self._steps.sync(progress.step, is_last=is_last)
            self._logs = self._steps.read_training_logs(trained)
            if is_single:
                self._callbacks.on_train_batch_end(index, self._logs)
                self._check_loss()
        if end is not None:
            self._callbacks.on_train_batch_end(end, self._logs)
            self._check_loss()
        return is_synced

    def _check_loss(self) -> None:
        """Fails if a loss was not finite, unless a callback ends training or has mended weights."""
        reason, self._nonfinite = self._nonfinite, ""
        if not reason or self._model.stop_training:
            return
        # Independent weights differ, and can only be read together.
        if self._engine.local_updates or find_nonfinite(self._model.trainable_variables):
            self._fail(reason)

    def _end_steps(self, *, is_empty: bool = False) -> None:
        if self._logs or not is_empty:  # else no batch has come yet, and Keras has no logs
            self._conclude(is_empty=is_empty)
        self._progress.is_epoch_open = True

    def _conclude(self, *, is_empty: bool = False) -> None:
        anew = is_empty or self._engine.may_have_other_metrics(
            self._num_resets, late=self._callbacks.may_be_late("train")
        )
        self._logs = self._steps.conclude("train", self._logs, anew=anew)

    def _end_epoch(self, epoch: int) -> bool:
        """Validates and ends an epoch; returns False if a stop was requested meanwhile."""
        if self._validation is not None and self._schedule.validation_epochs(epoch):
            is_alone = self._workers.count == 1  # else all workers must agree to stop
            logs = self._validation.run(lambda: is_alone and self._progress.is_asked_to_stop)
            if logs is None:
                self._agree()
                return False
            self._logs |= {f"val_{name}": value for name, value in logs.items()}
        self._callbacks.on_epoch_end(epoch, self._logs)
        self._progress.is_epoch_open = False
        if self._is_complete:
            self._epoch, self._start = epoch + 1, self._progress.step
        self._agree()
        if not self._progress.was_stopped:
            self._save()
        return not self._progress.was_stopped

    def _agree(self, *, save: bool = False) -> bool:
        """Agrees with all workers on a stop; returns whether one of them requests a checkpoint."""
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
            if self._model.stop_training:  # by a callback, such as `TerminateOnNaN`
                return
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
                "steps_per_epoch": self._learned_steps,
                "reading": self._save_reading(),
                "data": self._data,
                "numerics": self._engine.numerics,
            },
            optimizer=self._model.optimizer,
        )
        self._interval.reset(step=self._progress.step)

    def _fail(self, reason: str) -> NoReturn:
        last_good = self._recovery.describe_newest() if self._recovery else "No checkpoint yet."
        raise TrainingError(
            f"{reason} {last_good} Lower the learning rate, clip the gradients, or check the data."
        )
