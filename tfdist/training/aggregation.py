"""How the replicas that update a variable agree on its value."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.training.replacing import replaced


def aggregate_state(next_creator: Callable[..., Any], **arguments: Any) -> tf.Variable:
    """Creates a variable with an aggregation that keeps replicas equal when they update it.

    Keras creates weights, moving statistics and seeds without an aggregation, so replicas drift
    apart and CentralStorageStrategy rejects the update. Floats get their mean, other types the
    first replica's value. For use with `tf.variable_creator_scope`.
    """
    if arguments.get("aggregation") in (None, tf.VariableAggregation.NONE):
        dtype = arguments.get("dtype")
        value = arguments.get("initial_value")
        if dtype is None and value is not None and not callable(value):
            dtype = getattr(value, "dtype", None) or np.asarray(value).dtype
        arguments["aggregation"] = _choose(dtype)
    return next_creator(**arguments)


def set_aggregation(variable: keras.Variable) -> None:
    """Sets the aggregation of a variable that was created without one."""
    value = variable.value
    if getattr(value, "_aggregation", None) == tf.VariableAggregation.NONE:
        value._aggregation = _choose(value.dtype)


@contextlib.contextmanager
def aggregating() -> Iterator[None]:
    """Sets the aggregation of every variable that a step assigns. Opened around all replicas.

    The step may assign variables that the model does not track, such as those of a loss.
    """
    assign = keras.Variable.assign

    def assign_aggregated(variable: keras.Variable, value: Any) -> Any:
        set_aggregation(variable)
        return assign(variable, value)

    with replaced(keras.Variable, "assign", assign_aggregated):
        yield


def _choose(dtype: Any) -> tf.VariableAggregation:
    if dtype is None or tf.as_dtype(dtype).is_floating:
        return tf.VariableAggregation.MEAN
    return tf.VariableAggregation.ONLY_FIRST_REPLICA
