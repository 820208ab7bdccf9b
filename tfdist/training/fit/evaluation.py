"""Evaluates and predicts in one pass over the data, with Keras's callbacks."""

import functools
import math
from collections.abc import Callable
from typing import Any, TypeVar

import keras
import tensorflow as tf

from tfdist.aliases import Callbacks
from tfdist.errors import TfdistError
from tfdist.internals import RESETS_ON_BATCH
from tfdist.launch.pulse import BUSY, OWN, STEP, Pulse
from tfdist.training.fit.averaging import exchange_divided
from tfdist.training.fit.callback_list import CallbackList, list_callbacks
from tfdist.training.fit.engine import Engine
from tfdist.training.fit.schedule import Reading, warn_of_end
from tfdist.training.inputs.data_adapter import DataAdapter
from tfdist.training.inputs.data_errors import explain_data_errors
from tfdist.training.step.outputs import join_batches, join_replicas
from tfdist.training.workers.agreement import compare_batches

T = TypeVar("T")


def make_callbacks(
    callbacks: Callbacks,
    model: keras.Model,
    *,
    verbose: int,
    epochs: int = 1,
    steps: int | None = None,
    history: keras.callbacks.History | None = None,
) -> CallbackList:
    """Returns the callbacks for `fit`, `evaluate` and `predict`, with Keras's progress bar.

    Args:
      callbacks: the user's callbacks: None, one, several, or a Keras `CallbackList`.
      history: the history, called last if it is not among the user's, to see what they log.
    """
    chosen = list_callbacks(callbacks)
    exchange_divided(chosen)
    if verbose and not any(isinstance(c, keras.callbacks.ProgbarLogger) for c in chosen):
        chosen.append(keras.callbacks.ProgbarLogger())
    if history is not None and not any(c is history for c in chosen):
        chosen.append(history)
    return CallbackList(chosen, model=model, verbose=verbose, epochs=epochs, steps=steps)


def _explained(function: Callable[..., T]) -> Callable[..., T]:
    """Makes a function of an engine and an adapter explain errors about the data."""

    @functools.wraps(function)
    def call(engine: Engine, adapter: DataAdapter, **options: Any) -> T:
        with explain_data_errors(adapter.batch_spec), engine.workers.pulse.at(OWN):
            return function(engine, adapter, **options)

    return call


@_explained
def evaluate(
    engine: Engine,
    adapter: DataAdapter,
    *,
    steps: int | None,
    make_callbacks: Callable[[int | None], CallbackList],
    is_stopped: Callable[[], bool] = lambda: False,
    compares_weights: bool = False,
) -> dict[str, Any] | None:
    """Evaluates a model on every batch, or on the first `steps`.

    Args:
      make_callbacks: number of batches, or None if unknown -> the callbacks.
      is_stopped: returns whether to stop; called before each batch.
      compares_weights: whether to check that all workers have the same weights.

    Returns:
      The losses and metrics, or None if the evaluation was stopped.
    """
    model, of_model = engine.model, engine.build(adapter, kind="test")
    if compares_weights:
        engine.compare_weights()
    reading, adapter = _begin_reading(steps, adapter, model)
    callbacks = make_callbacks(steps or adapter.num_steps)
    if RESETS_ON_BATCH or not adapter.is_single:
        engine.reset_metrics()
    num_resets = engine.num_resets
    adapter.on_epoch_end()
    model.stop_evaluating = False
    callbacks.on_test_begin()
    adapter.on_epoch_begin()
    iterator = of_model.iterate_eval(adapter, steps=_find_end(reading))
    logs: dict[str, Any] = {}

    def start() -> Callable[[], dict[str, Any]]:
        nonlocal iterator
        iterator = engine.check_division("test", iterator, adapter)
        engine.announce_first("test", "Tracing and compiling")
        return of_model.start_evaluation(iterator)

    def end(number: int | None, found: dict[str, Any]) -> None:
        nonlocal logs
        logs = found
        _compare_first(engine, adapter, reading.seen)
        if number is not None:
            callbacks.on_test_batch_end(number, logs)

    has_ended = _run_steps(
        start,
        callbacks.on_test_batch_begin,
        end,
        reading=reading,
        is_stopped=lambda: model.stop_evaluating or is_stopped(),
        is_ahead=of_model.runs_ahead and callbacks.may_be_late("test"),
        pulse=engine.workers.pulse,
    )
    _compare(engine, adapter, reading.seen)
    if is_stopped():
        callbacks.on_test_end(None)
        return None
    if not reading.seen:
        raise TfdistError("Cannot evaluate: the validation data are empty.")
    if not model.stop_evaluating:
        _end_reading(reading, adapter, has_ended=has_ended)
    anew = engine.may_have_other_metrics(num_resets, late=callbacks.may_be_late("test"))
    logs = of_model.conclude("test", of_model.read_logs(logs), anew=anew)
    callbacks.on_test_end(logs)
    return logs


@_explained
def predict(
    engine: Engine,
    adapter: DataAdapter,
    *,
    steps: int | None,
    callbacks: CallbackList,
    compares_weights: bool = False,
) -> list[Any]:
    """Returns the outputs for this process's part of every batch, or of the first `steps`."""
    model, predictor = engine.model, engine.build_prediction(adapter)
    if compares_weights:
        engine.compare_weights()
    reading, adapter = _begin_reading(steps, adapter, model)
    batches: list[Any] = []
    of_execution: list[Any] = []
    model.stop_predicting = False
    callbacks.on_predict_begin()
    adapter.on_epoch_begin()
    iterator = predictor.iterate_predict(adapter, steps=_find_end(reading))

    def start() -> Callable[[], list[tuple[Any, bool]]]:
        nonlocal iterator
        iterator = engine.check_division("predict", iterator, adapter)
        engine.announce_first("predict", "Tracing and compiling")
        return predictor.start_prediction(iterator)

    def end(number: int | None, replicas: list[tuple[Any, bool]]) -> None:
        batches.append(join_replicas(replicas))
        _compare_first(engine, adapter, reading.seen)
        of_execution.append(batches[-1])
        if number is not None:
            callbacks.on_predict_batch_end(number, {"outputs": join_batches(of_execution)})
            of_execution.clear()

    has_ended = _run_steps(
        start,
        callbacks.on_predict_batch_begin,
        end,
        reading=reading,
        is_stopped=lambda: model.stop_predicting,
        is_ahead=predictor.runs_ahead and callbacks.may_be_late("predict"),
        pulse=engine.workers.pulse,
    )
    _compare(engine, adapter, reading.seen)
    if not model.stop_predicting:
        _end_reading(reading, adapter, has_ended=has_ended)
    callbacks.on_predict_end()
    if not batches:
        raise TfdistError("Cannot predict: the data are empty.")
    return batches


def _run_steps(
    start: Callable[[], Callable[[], T]],
    begin: Callable[[int], None],
    end: Callable[[int | None, T], None],
    *,
    reading: Reading,
    is_stopped: Callable[[], bool],
    is_ahead: bool,
    pulse: Pulse,
) -> bool:
    """Runs steps until no batch is left, or all that were asked for are done.

    Args:
      start: starts a step, and returns a function that waits for its results.
      begin: number of a batch -> None; called before the steps that Keras takes at a time.
      end: (number of a batch, results of its step) -> None; called after each step. The number is
        None if it is not the last one of those that Keras takes at a time.
      reading: how the data are read; it counts the steps.
      is_stopped: returns whether to stop; called before the steps that Keras takes at a time.
      is_ahead: whether a step starts before the results of the last one are read.

    Returns:
      Whether a request found no batch.
    """
    started: list[tuple[int | None, Callable[[], T]]] = []
    steps, at_a_time = reading.count_steps(0), reading.at_a_time

    def end_started() -> None:
        while started:
            number, read = started.pop()
            with pulse.at(STEP if reading.seen > 1 else BUSY):
                found = read()
            end(number, found)

    while reading.seen < steps and not is_stopped():
        number, left = reading.seen, int(min(at_a_time, steps - reading.seen))
        begin(number)
        for place in range(left):
            try:
                with pulse.at(STEP if reading.seen else BUSY):
                    read = start()
            except (tf.errors.OutOfRangeError, StopIteration):
                if place:  # fewer batches than Keras takes at a time; then it asks for more
                    started.append((number + at_a_time - 1, started.pop()[1]))
                    end_started()
                    if is_stopped() or not reading.end_short(number):
                        return False
                    begin(number + at_a_time)
                end_started()
                return True
            end_started()
            reading.seen += 1
            started.append((number + at_a_time - 1 if place == left - 1 else None, read))
        if not is_ahead:
            end_started()
    end_started()
    return False


def _compare_first(engine: Engine, adapter: DataAdapter, seen: int) -> None:
    """Compares the first batches of a pass among the workers; all if their number is unknown."""
    if seen <= 2 or adapter.num_steps is None:
        _compare(engine, adapter, seen)


def _compare(engine: Engine, adapter: DataAdapter, end: int) -> None:
    if adapter.digests is not None:
        compare_batches(engine.workers, adapter.digests.take(end))


def _begin_reading(
    steps: int | None, adapter: DataAdapter, model: keras.Model
) -> tuple[Reading, DataAdapter]:
    if steps and steps < 0:
        adapter = adapter.read_to_end()
    reading = Reading(
        steps, adapter.num_steps, model.steps_per_execution, is_exact=adapter.is_endless
    )
    reading.begin_epoch()
    return reading, adapter


def _find_end(reading: Reading) -> int | None:
    """Returns the number of batches to read; None if unknown."""
    steps = reading.count_steps(0)
    return None if steps == math.inf else int(steps)


def _end_reading(reading: Reading, adapter: DataAdapter, *, has_ended: bool) -> None:
    """Ends the reading of data, as Keras's `EpochIterator` does."""
    if has_ended and (reading.asked or adapter.num_steps):
        warn_of_end()
    elif reading.is_at_end and not has_ended:
        if reading.is_cut(reading.seen):
            warn_of_end()
        adapter.drop_evaluated()
    adapter.on_epoch_end()
