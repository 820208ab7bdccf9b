"""Pointwise layers, and those that draw random numbers, on strips of an image."""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf
from keras import layers

from tfdist.placement.graph import Operation
from tfdist.placement.strips.forward import StripForward
from tfdist.placement.strips.image import Pieces, StripedImage

if TYPE_CHECKING:
    import keras

Values = Sequence[Any]
_NONE = ((0, 0), (0, 0))


def compute_elements(run: StripForward, operation: Operation, taken: Values) -> list[Any] | None:
    """Pointwise operations."""
    first = next(value for value in taken if isinstance(value, StripedImage))
    is_joined = isinstance(operation.layer, layers.Concatenate)
    is_divided = [count > 1 for count in run.grid]
    own_axes = {-1, 3} | ({-2, 2} if is_joined and not is_divided[1] else set())
    if not set(_list_axes(operation.layer)) <= own_axes:
        return None
    for value, spec in zip(taken, operation.node.arguments.keras_tensors, strict=True):
        if isinstance(value, StripedImage):
            differs = value.size != first.size
        else:  # the same for all parts
            lengths = [*[1] * (4 - len(spec.shape)), *spec.shape[1:]][:2]
            differs = is_joined or any(
                divided and length != 1 for divided, length in zip(is_divided, lengths, strict=True)
            )
        if differs:
            return None
    parts: list[list[tf.Tensor]] = [[] for _ in operation.outputs]
    for device, area in zip(run.devices, first.areas, strict=True):
        given = [
            run.take(value, *area) if isinstance(value, StripedImage) else Pieces([value], 1, _NONE)
            for value in taken
        ]
        found = run.call(
            operation,
            [tensor for pieces in given for tensor in pieces.tensors],
            device=device,
            prepare=functools.partial(_join_all, given),
        )
        for own, part in zip(parts, found, strict=True):
            own.append(part)
    return [StripedImage(tuple(own), first.bounds) for own in parts]


def _list_axes(layer: "keras.Layer") -> list[int]:
    axis = getattr(layer, "axis", -1)
    return [axis] if isinstance(axis, int) else list(axis)


def _join_all(given: Sequence[Pieces], *tensors: tf.Tensor) -> list[tf.Tensor]:
    """Returns the operation's inputs."""
    left = iter(tensors)
    return [pieces.join(*itertools.islice(left, len(pieces.tensors))) for pieces in given]


def multiply_noise(run: StripForward, operation: Operation, taken: Values) -> list[Any] | None:
    """Random factors."""
    return _draw(run, operation, taken, tf.ones, tf.multiply)


def add_noise(run: StripForward, operation: Operation, taken: Values) -> list[Any] | None:
    """Random terms."""
    return _draw(run, operation, taken, tf.zeros, tf.add)


def _draw(
    run: StripForward, operation: Operation, taken: Values, make: Any, combine: Any
) -> list[Any] | None:
    """The numbers are drawn for the whole image, as on one device, and divided."""
    if not run.is_training(operation):
        return compute_elements(run, operation, taken)
    (image,) = taken
    height, width = image.size
    first = image.parts[0]
    neutral = make([tf.shape(first)[0], height, width, tf.shape(first)[3]], first.dtype)
    neutral.set_shape([None, height, width, first.shape[3]])
    (noise,) = run.call(operation, [neutral], device=None)
    noises = [noise[:, low:high, left:right] for (low, high), (left, right) in image.areas]
    return [map_parts(run, image, combine, own=noises)]


def map_parts(
    run: StripForward,
    image: StripedImage,
    function: Callable[..., tf.Tensor],
    *shared: tf.Tensor,
    own: Values | None = None,
) -> StripedImage:
    """Returns a function of each part, of one further tensor each, if any, and of some for all."""
    each = [[part] for part in image.parts]
    if own is not None:
        each = [[part, further] for part, further in zip(image.parts, own, strict=True)]
    parts = []
    for device, tensors in zip(run.devices, each, strict=True):
        parts += run.cells.run(device, lambda *x: [function(*x)], [*tensors, *shared])
    return StripedImage(tuple(parts), image.bounds)
