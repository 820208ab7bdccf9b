"""Reads and creates a strategy's variables in one worker, without the others."""

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfdist.internals import SyncOnReadVariable
from tfdist.replacing import replaced

_START = "_get_variable_creator_initial_value"


@contextlib.contextmanager
def alone(strategy: tf.distribute.Strategy) -> Iterator[None]:
    """Lets this worker read and create variables by itself, to save a model.

    Each worker has a copy of all weights. The values of metrics are those of this worker's
    replicas.
    """
    if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        yield
        return
    with (
        creating_alone(strategy),
        replaced(SyncOnReadVariable, "_get_cross_replica", _read_own),
        replaced(strategy.extended, "read_var", lambda variable: variable._get_cross_replica()),
    ):
        yield


@contextlib.contextmanager
def creating_alone(strategy: tf.distribute.Strategy) -> Iterator[None]:
    """Lets a worker create variables by itself, with its own initial values.

    TensorFlow sends the chief's to all workers, all of which must then create the variable.
    """
    if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        yield
        return
    extended: Any = strategy.extended
    create = getattr(super(type(extended), extended), _START)
    with replaced(extended, _START, create):
        yield


def _read_own(variable: tf.Variable) -> Any:
    """Returns the value of a variable over this process's replicas."""
    first, *others = variable.values
    is_sum = variable.aggregation == tf.VariableAggregation.SUM
    if variable.aggregation == tf.VariableAggregation.ONLY_FIRST_REPLICA or not others:
        return tf.convert_to_tensor(first)
    total = tf.add_n([tf.convert_to_tensor(copy) for copy in variable.values])
    return total if is_sum else total / len(variable.values)
