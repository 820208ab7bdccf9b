"""What is needed to run the layers of a functional model in another way, while a step is traced."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist.aliases import Nested
from tfdist.internals import (
    Functional,
    get_autocast_scope,
    get_keras_mask,
    global_state,
    set_keras_mask,
)
from tfdist.placement.graph import Graph
from tfdist.replacing import find_function, replaced

Backward = Callable[..., list[Any]]
"""The gradients of a function's results -> those of its arguments."""


@contextlib.contextmanager
def intercepting(model: keras.Model, run: Callable[..., list[Any]]) -> Iterator[None]:
    """Replaces a functional model's call by (inputs, training=..., **context) -> flat outputs."""
    original = find_function(Functional, "call")

    def call(
        called: keras.Layer,
        inputs: Nested[tf.Tensor],
        training: bool | None = None,
        mask: Nested[tf.Tensor] | None = None,
        **context: Any,
    ) -> Any:
        if called is not model:
            return original(called, inputs, training=training, mask=mask, **context)
        given = model._standardize_inputs(inputs)
        for tensor, known in zip(given, keras.tree.flatten(mask), strict=False):
            set_mask(tensor, known)
        flat = run(given, training=training, **context)
        packed = keras.tree.pack_sequence_as(model._outputs_struct, flat)
        is_single = isinstance(packed, (list, tuple)) and len(packed) == 1
        return packed[0] if is_single else packed

    with replaced(Functional, "call", call):
        yield


@contextlib.contextmanager
def autocasting(scope: Any) -> Iterator[None]:
    """Opens a Keras autocast scope again; None casts nothing."""
    before = get_autocast_scope()
    global_state.set_global_attribute("autocast_scope", scope)
    try:
        yield
    finally:
        global_state.set_global_attribute("autocast_scope", before)


def add_penalties(graph: Graph, penalties: list[tf.Tensor]) -> None:
    """Makes the losses that the layers of a functional model have added those of its call."""
    graph.model._clear_losses()
    if penalties:
        layers = (op.layer for op in graph.operations if op.node is not None)
        layer = next(layer for layer in layers if isinstance(layer, keras.Layer))
        layer.add_loss(penalties)  # a functional model rejects add_loss


def set_mask(tensor: tf.Tensor, mask: tf.Tensor | None) -> None:
    """Gives a tensor a Keras mask, if there is one."""
    if mask is not None:
        set_keras_mask(tensor, mask)


def copy_with_mask(tensor: tf.Tensor) -> Any:
    """Returns a tensor on the current device, with its Keras mask."""
    copy = tf.identity(tensor)
    set_mask(copy, get_keras_mask(tensor))
    return copy


def has_gradient(value: tf.Tensor | tf.IndexedSlices) -> bool:
    """Returns whether a value is a floating-point tensor."""
    return isinstance(value, tf.Tensor) and value.dtype.is_floating


def call_with_gradient(
    function: Callable[..., tuple[list[tf.Tensor], Backward]], *given: tf.Tensor
) -> list[tf.Tensor]:
    """Returns the results of a function that also returns its backward pass.

    That gets None for a result on which the loss does not depend, where `tf.custom_gradient` gives
    zeros: Keras's optimizers leave a variable without a gradient as it is, but apply their weight
    decay and their moments to one with a gradient of zeros.
    """
    # The tape calls the backward pass of a result's copy first, and only if it has a gradient.
    reached: set[int] = set()

    def forward(*given: tf.Tensor) -> tuple[list[tf.Tensor], Backward]:
        results, differentiate = function(*given)

        def backward(*upstream: tf.Tensor) -> list[Any]:
            known = [value if i in reached else None for i, value in enumerate(upstream)]
            reached.clear()
            return differentiate(*known)

        return results, backward

    def copy(position: int, result: tf.Tensor) -> tf.Tensor:
        @tf.custom_gradient
        def mark(result: tf.Tensor) -> tuple[tf.Tensor, Backward]:
            def backward(upstream: tf.Tensor) -> list[tf.Tensor]:
                reached.add(position)
                return [upstream]

            return tf.identity(result), backward

        return mark(result)

    results = tf.custom_gradient(forward)(*given)
    return [copy(position, result) for position, result in enumerate(results)]
