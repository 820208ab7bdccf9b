"""Sums over the examples of a batch, which some programs divide by the size of the global batch.

TensorFlow's tutorials for training loops compute `tf.reduce_sum(losses) * (1 / batch_size)`. Keras
differentiates a loss with `reduction="none"` as it is, which adds up the examples. On replicas,
such a sum is scaled, so that the weighted mean of the replicas' sums is that of the global batch.

A program does not say whether it divides a sum by a constant or by the number of examples that it
sees, which is a mean and must not be scaled. So the guard tries both. It sees the same sums as a
step, because both hide how many examples there are: a sum over examples is one over an axis of
unknown size.
"""

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.aliases import Nested
from tfdist.replacing import find_function

_Scale = Callable[[tf.Tensor], tf.Tensor]
_LIBRARIES = "keras.", "tfdist.", "tensorflow."


def list_sum_replacements(
    find_scale: Callable[[], _Scale | None], look: Callable[[tf.Tensor], None]
) -> list[tuple[Any, str, Any]]:
    """Returns what to replace by functions that scale sums over examples, where there is one.

    Args:
      look: is called with what is differentiated with respect to variables.
    """
    sums = [(owner, name) for owner, name in _SUMS if hasattr(owner, name)]
    return [
        *((owner, name, _make_sum(owner, name, find_scale)) for owner, name in sums),
        (tf.GradientTape, "gradient", _make_gradient(find_scale, look)),
    ]


_SUMS = (tf, "reduce_sum"), (tf.math, "reduce_sum"), (keras.ops, "sum")


def _make_sum(owner: object, name: str, find_scale: Callable[[], _Scale | None]) -> Any:
    original = find_function(owner, name)

    @functools.wraps(original)
    def add(
        x: tf.Tensor, axis: int | Sequence[int] | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        total = original(x, axis, *args, **kwargs)
        scale = find_scale()
        if scale is None or not _adds_examples(x, axis) or _is_called_by_library():
            return total
        return scale(total)

    return add


def _make_gradient(
    find_scale: Callable[[], _Scale | None], look: Callable[[tf.Tensor], None]
) -> Any:
    original = find_function(tf.GradientTape, "gradient")

    @functools.wraps(original)
    def gradient(
        tape: tf.GradientTape,
        target: Nested[tf.Tensor],
        sources: Nested[tf.Variable],
        output_gradients: tf.Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        scale = find_scale()
        updates = any(hasattr(source, "assign") for source in keras.tree.flatten(sources))
        if updates:
            keras.tree.map_structure(look, target)
        if scale is not None and output_gradients is None and updates:
            targets = keras.tree.flatten(target)
            if any(_adds_examples(each, None) for each in targets):
                target = targets
                output_gradients = [
                    scale(tf.ones_like(each)) if _adds_examples(each, None) else None
                    for each in targets
                ]
        return original(tape, target, sources, output_gradients, *args, **kwargs)

    return gradient


def _adds_examples(x: tf.Tensor, axis: int | Sequence[int] | None) -> bool:
    """Returns whether a sum is one over the examples of a replica."""
    if not (
        isinstance(x, tf.Tensor) and x.dtype.is_floating and x.shape.rank and x.shape[0] is None
    ):
        return False
    axes = keras.tree.flatten(axis)
    is_known = all(isinstance(each, int) for each in axes)
    return axis is None or (is_known and any(each in (0, -x.shape.rank) for each in axes))


def _is_called_by_library() -> bool:
    """Returns whether Keras or TensorFlow adds up, rather than the user's own code."""
    frame = sys._getframe(2)
    while frame.f_globals["__name__"] == find_function.__module__ and frame.f_back:
        frame = frame.f_back
    return frame.f_globals.get("__name__", "").startswith(_LIBRARIES)
