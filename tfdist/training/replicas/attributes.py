"""Tensors that a layer keeps in its attributes during a call: each replica has its own."""

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist.replacing import find_function, replaced


@contextlib.contextmanager
def attributes_by_replica(model: keras.Model) -> Iterator[None]:
    """Keeps the tensors in attributes of layers separate for each replica.

    While a replica waits for the others, they run in the middle of its forward pass, with the same
    layers. Keras's own layers keep no tensors that matter.
    """
    merge_call = find_function(tf.distribute.ReplicaContext, "merge_call")
    layers = [e for e in model._flatten_layers() if not type(e).__module__.startswith("keras.")]
    at_start = [(vars(layer), dict(vars(layer))) for layer in layers]

    def call_apart(replica: Any, *args: Any, **kwargs: Any) -> Any:
        own = [(attributes, dict(attributes)) for attributes, _ in at_start]
        _set_tensors(at_start)
        try:
            return merge_call(replica, *args, **kwargs)
        finally:
            _set_tensors(own)

    with replaced(tf.distribute.ReplicaContext, "merge_call", call_apart):
        yield


def _set_tensors(states: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    """Gives attributes the values that they had, where these or those of today are tensors."""
    for attributes, values in states:
        for name in [name for name in attributes if name not in values]:
            if _has_tensors(attributes[name]):
                del attributes[name]
        for name, value in values.items():
            other = attributes.get(name)
            if other is not value and (_has_tensors(value) or _has_tensors(other)):
                attributes[name] = value


def _has_tensors(value: object) -> bool:
    """Returns whether a value is a tensor or a structure of some; a list may still get them."""
    if isinstance(value, (list, tuple, dict)):
        leaves = value.values() if isinstance(value, dict) else value
        return not value or any(map(_has_tensors, leaves))
    return isinstance(value, tf.Tensor)
