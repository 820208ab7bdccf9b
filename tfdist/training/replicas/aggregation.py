"""How the replicas that update a variable agree on its value."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.internals import AggregatingVariable, DistributedVariable
from tfdist.replacing import find_function, replaced
from tfdist.training.replicas.optimizers import list_optimizers

_MEAN, _FIRST = tf.VariableAggregation.MEAN, tf.VariableAggregation.ONLY_FIRST_REPLICA

Agree = Callable[[tf.Tensor, tf.Variable], tf.Tensor]


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


def set_aggregation(variable: tf.Variable) -> None:
    """Sets the aggregation of a TensorFlow variable that was created without one."""
    if getattr(variable, "_aggregation", None) == tf.VariableAggregation.NONE:
        variable._aggregation = _choose(variable.dtype)


@contextlib.contextmanager
def aggregating(agree: Agree, model: keras.Model) -> Iterator[None]:
    """Makes replicas agree on every variable that a step assigns. Opened around all replicas.

    The step may assign variables that the model does not track, such as those of a loss.

    Args:
      agree: a replica's value and the variable -> the value that all replicas assign.
      model: the model. Its optimizers and batch normalization assign equal values anyway, but a
        learning rate is assigned by the program.
    """

    def wrap(original: Callable[..., Any]) -> Any:
        @functools.wraps(original)
        def assign(variable: tf.Variable, value: tf.Tensor, *args: Any, **kwargs: Any) -> Any:
            set_aggregation(variable)
            is_one = variable._aggregation in (_MEAN, _FIRST)
            is_in_replica = not tf.distribute.in_cross_replica_context()
            if is_one and is_in_replica and id(variable) not in _list_equal(model):
                value = agree(tf.convert_to_tensor(value, variable.dtype), variable)
            return original(variable, value, *args, **kwargs)

        return assign

    with contextlib.ExitStack() as stack:
        for owner in (DistributedVariable, AggregatingVariable):
            for name in ("assign", "assign_add", "assign_sub"):
                stack.enter_context(replaced(owner, name, wrap(find_function(owner, name))))
        yield


def _list_equal(model: keras.Model) -> set[int]:
    """Returns the ids of the variables to which all replicas assign equal values."""
    holders: list[Any] = list(list_optimizers(model))
    layers = model._flatten_layers()
    holders += [a for a in layers if isinstance(a, keras.layers.BatchNormalization)]
    own = [variable for holder in holders for variable in holder.variables]
    return {id(variable.value) for variable in own if variable.name != "learning_rate"}


def _choose(dtype: tf.DType | np.dtype | None) -> tf.VariableAggregation:
    if dtype is None or tf.as_dtype(dtype).is_floating:
        return _MEAN
    return _FIRST
