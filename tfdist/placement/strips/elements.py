"""Layers whose outputs depend on the elements at the same place only, and random ones."""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf
from keras import layers

from tfdist.placement.graph import Operation
from tfdist.placement.strips.image import StripedImage

if TYPE_CHECKING:
    from tfdist.placement.strips.call import Pass

Values = Sequence[Any]


def compute_elements(run: "Pass", operation: Operation, taken: Values) -> list[Any] | None:
    """Elements that depend on elements at the same place only."""
    first = next(value for value in taken if isinstance(value, StripedImage))
    is_joined = isinstance(operation.layer, layers.Concatenate)
    if not set(_list_axes(operation.layer)) <= ({-1, -2, 2, 3} if is_joined else {-1, 3}):
        return None
    for value, spec in zip(taken, operation.node.arguments.keras_tensors, strict=True):
        if isinstance(value, StripedImage):
            differs = value.height != first.height
        else:  # the same for all rows
            differs = is_joined or (len(spec.shape) == 4 and spec.shape[1] != 1)
        if differs:
            return None
    parts: list[list[tf.Tensor]] = [[] for _ in operation.outputs]
    for place, (low, high) in enumerate(itertools.pairwise(first.bounds)):
        given = [
            run.take_rows(value, low, high)[0] if isinstance(value, StripedImage) else [value]
            for value in taken
        ]
        found = run.call(
            operation,
            [tensor for pieces in given for tensor in pieces],
            device=run.devices[place],
            prepare=functools.partial(_join_pieces, [len(pieces) for pieces in given]),
        )
        for own, part in zip(parts, found, strict=True):
            own.append(part)
    return [StripedImage(tuple(own), first.bounds) for own in parts]


def _list_axes(layer: Any) -> list[int]:
    axis = getattr(layer, "axis", -1)
    return [axis] if isinstance(axis, int) else list(axis)


def _join_pieces(counts: Sequence[int], *tensors: tf.Tensor) -> list[tf.Tensor]:
    """Returns tensors each of which is the next some pieces."""
    left = iter(tensors)
    pieces = [list(itertools.islice(left, count)) for count in counts]
    return [tf.concat(own, 1) if len(own) > 1 else own[0] for own in pieces]


def multiply_noise(run: "Pass", operation: Operation, taken: Values) -> list[Any] | None:
    """Random factors."""
    return _draw(run, operation, taken, tf.ones, tf.multiply)


def add_noise(run: "Pass", operation: Operation, taken: Values) -> list[Any] | None:
    """Random terms."""
    return _draw(run, operation, taken, tf.zeros, tf.add)


def _draw(
    run: "Pass", operation: Operation, taken: Values, make: Any, combine: Any
) -> list[Any] | None:
    """The numbers are drawn for the whole image, as on one device, and divided."""
    if not run.is_training(operation):
        return compute_elements(run, operation, taken)
    (strips,) = taken
    sizes = tf.unstack(tf.shape(strips.parts[0]))
    sizes[1] = strips.height
    neutral = make(sizes, strips.parts[0].dtype)
    neutral.set_shape([None, strips.height, *strips.parts[0].shape[2:]])
    (noise,) = run.call(operation, [neutral], device=None)
    noises = [noise[:, low:high] for low, high in itertools.pairwise(strips.bounds)]
    return [map_parts(run, strips, lambda x, noise: combine(x, noise), noises)]


def map_parts(
    run: "Pass",
    strips: StripedImage,
    function: Callable[..., tf.Tensor],
    own: Values,
    *shared: tf.Tensor,
) -> StripedImage:
    """Returns a function of each strip, of one further tensor each and of some for all."""
    parts = []
    for device, part, further in zip(run.devices, strips.parts, own, strict=True):
        parts += run.cells.run(device, lambda *x: [function(*x)], [part, further, *shared])
    return StripedImage(tuple(parts), strips.bounds)
