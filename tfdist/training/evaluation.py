"""Evaluates and predicts in one pass over the data, with Keras's callbacks."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import keras
import tensorflow as tf

from tfdist.errors import TfdistError
from tfdist.launch.pulse import BUSY, OWN, STEP, Pulse
from tfdist.training.agreement import compare_batches
from tfdist.training.averaging import exchange_divided
from tfdist.training.callback_list import CallbackList
from tfdist.training.data_adapter import DataAdapter
from tfdist.training.data_errors import explain_data_errors
from tfdist.training.engine import Engine
from tfdist.training.history import list_callbacks
from tfdist.training.outputs import join_replicas
from tfdist.training.schedule import check_steps_at_a_time

T = TypeVar("T")


def make_callbacks(
    callbacks: Any,
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
      model: the trainer's model.
      verbose: whether to show the bar.
      epochs, steps: those of this call, if known.
      history: the history, called last if it is not among the user's, to see what they log.
    """
    chosen = list_callbacks(callbacks)
    exchange_divided(chosen)
    if verbose and not any(isinstance(c, keras.callbacks.ProgbarLogger) for c in chosen):
        chosen.append(keras.callbacks.ProgbarLogger())
    if history is not None and not any(c is history for c in chosen):
        chosen.append(history)
    return CallbackList(
        chosen,
        model=model,
        verbose=verbose,
        epochs=epochs,
        steps=steps,
    )


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
      engine: the model's engine.
      adapter: the data.
      steps: the number of batches; None for all.
      make_callbacks: number of batches, or None if unknown -> the callbacks.
      is_stopped: returns whether to stop; called before each batch.
      compares_weights: whether to check that all workers have the same weights.

    Returns:
      The losses and metrics, or None if the evaluation was stopped.

    Raises:
      TfdistError: there are no data.
    """
    model, of_model = engine.model, engine.build(adapter, kind="test")
    if compares_weights:
        engine.compare_weights()
    is_whole = adapter.num_steps is not None and not steps
    steps = _find_end(steps, adapter, model)
    callbacks = make_callbacks(steps)
    of_model.reset_metrics()
    adapter.on_epoch_end()
    model.stop_evaluating = False
    callbacks.on_test_begin()
    adapter.on_epoch_begin()
    iterator = of_model.iterate_eval(adapter, steps=steps)
    logs: dict[str, Any] = {}

    def start() -> Callable[[], dict[str, Any]]:
        nonlocal iterator
        iterator = engine.check_division("test", iterator, adapter)
        return of_model.start_evaluation(iterator)

    def end(batch: int, found: dict[str, Any]) -> None:
        nonlocal logs
        logs = found
        _compare_first(engine, adapter, batch)
        callbacks.on_test_batch_end(batch, logs)

    count = _run_steps(
        start,
        callbacks.on_test_batch_begin,
        end,
        steps=steps,
        is_stopped=lambda: model.stop_evaluating or is_stopped(),
        is_ahead=of_model.runs_ahead and callbacks.may_be_late("test"),
        pulse=engine.workers.pulse,
    )
    _compare(engine, adapter, count)
    if is_stopped():
        callbacks.on_test_end(None)
        return None
    if not count:
        raise TfdistError("Cannot evaluate: the validation data are empty.")
    if not model.stop_evaluating:
        if is_whole:
            adapter.drop_pass()
        adapter.on_epoch_end()
    logs = of_model.conclude("test", of_model.read_logs(logs))
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
    """Returns the outputs for this process's part of every batch, or of the first `steps`.

    Raises:
      TfdistError: there are no data.
    """
    model, predictor = engine.model, engine.build_prediction(adapter)
    if compares_weights:
        engine.compare_weights()
    is_whole = adapter.num_steps is not None and not steps
    steps = _find_end(steps, adapter, model)
    batches: list[Any] = []
    model.stop_predicting = False
    callbacks.on_predict_begin()
    adapter.on_epoch_begin()
    iterator = predictor.iterate_predict(adapter, steps=steps)

    def start() -> Callable[[], list[tuple[Any, bool]]]:
        nonlocal iterator
        iterator = engine.check_division("predict", iterator, adapter)
        return predictor.start_prediction(iterator)

    def end(batch: int, replicas: list[tuple[Any, bool]]) -> None:
        outputs = join_replicas(replicas)
        _compare_first(engine, adapter, batch)
        callbacks.on_predict_batch_end(batch, {"outputs": outputs})
        batches.append(outputs)

    count = _run_steps(
        start,
        callbacks.on_predict_batch_begin,
        end,
        steps=steps,
        is_stopped=lambda: model.stop_predicting,
        is_ahead=predictor.runs_ahead and callbacks.may_be_late("predict"),
        pulse=engine.workers.pulse,
    )
    _compare(engine, adapter, count)
    if not model.stop_predicting:
        if is_whole:
            adapter.drop_pass()
        adapter.on_epoch_end()
    callbacks.on_predict_end()
    if not batches:
        raise TfdistError("Cannot predict: the data are empty.")
    return batches


def _run_steps(
    start: Callable[[], Callable[[], T]],
    begin: Callable[[int], None],
    end: Callable[[int, T], None],
    *,
    steps: int | None,
    is_stopped: Callable[[], bool],
    is_ahead: bool,
    pulse: Pulse,
) -> int:
    """Runs steps until no batch is left; returns their number.

    Args:
      start: starts a step, and returns a function that waits for its results.
      begin: number of a batch -> None; called before its step.
      end: (number of a batch, results of its step) -> None; called after it.
      steps: the most steps; None for all.
      is_stopped: returns whether to stop; called before each step.
      is_ahead: whether a step starts before the results of the last one are read.
      pulse: tells the launcher what this process is doing.
    """
    started: list[Callable[[], T]] = []
    count = 0

    def end_started() -> None:
        while started:
            with pulse.at(STEP if count > 1 else BUSY):
                found = started.pop()()
            end(count - 1, found)

    while (steps is None or count < steps) and not is_stopped():
        begin(count)
        try:
            with pulse.at(STEP if count else BUSY):
                read = start()
        except (tf.errors.OutOfRangeError, StopIteration):
            break
        end_started()
        started.append(read)
        count += 1
        if not is_ahead:
            end_started()
    end_started()
    return count


def _compare_first(engine: Engine, adapter: DataAdapter, batch: int) -> None:
    """Compares the first batches of a pass among the workers; all if their number is unknown."""
    if batch < 2 or adapter.num_steps is None:
        _compare(engine, adapter, batch + 1)


def _compare(engine: Engine, adapter: DataAdapter, end: int) -> None:
    if adapter.digests is not None:
        compare_batches(engine.workers, adapter.digests.take(end))


def _find_end(steps: int | None, adapter: DataAdapter, model: keras.Model) -> int | None:
    """Returns the number of batches to read, at most those of a pass; None if unknown."""
    check_steps_at_a_time(steps, adapter.num_steps, model)
    if not steps or adapter.num_steps is None:
        return steps or adapter.num_steps
    return min(steps, adapter.num_steps)
