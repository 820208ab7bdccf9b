"""Layers that need a number from all pixels: normalization by moments, global pooling."""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tfdist.internals import renormalizes
from tfdist.models.batch_norm import Moments, measure_part, normalize_part
from tfdist.models.layers import FusedBatchNormalization
from tfdist.placement.graph import Operation
from tfdist.placement.strips.elements import Values, compute_elements, map_parts
from tfdist.placement.strips.forward import StripForward
from tfdist.placement.strips.image import StripedImage

if TYPE_CHECKING:
    import keras


def normalize_batch(run: StripForward, operation: Operation, taken: Values) -> list[Any] | None:
    """The moments of the parts are pooled, and then those of the replicas."""
    (image,), layer = taken, operation.layer
    if not (run.is_training(operation) and layer.trainable):
        return compute_elements(run, operation, taken)
    if getattr(layer, "axis", -1) not in (-1, 3) or renormalizes(layer):
        return None
    image = _cast(run, image, layer.compute_dtype)
    dtype = tf.float64 if image.parts[0].dtype == tf.float64 else tf.float32
    moments = _measure(run, image, measure_part)
    is_shared = getattr(layer, "synchronized", True) or not isinstance(
        layer, FusedBatchNormalization
    )

    def pool(*flat: tf.Tensor) -> list[tf.Tensor]:
        local = _pool(flat)
        everywhere = run.pool(local)
        used = everywhere if is_shared else local
        return [used.mean, used.variance, everywhere.mean, everywhere.variance]

    mean, variance, *moving = run.cells.run(None, pool, moments)
    for variable, new in zip((layer.moving_mean, layer.moving_variance), moving, strict=True):
        old = tf.cast(run.read(variable), dtype)
        new = old * layer.momentum + new * (1.0 - layer.momentum)
        run.states[id(variable)] = tf.cast(new, variable.dtype)
    return [_normalize(run, image, layer, normalize_part, mean, variance)]


def normalize_groups(run: StripForward, operation: Operation, taken: Values) -> list[Any] | None:
    """The moments of each example's groups of channels are pooled."""
    (image,), layer = taken, operation.layer
    channels = image.parts[0].shape[-1]
    if layer.axis not in (-1, 3):
        return None
    groups = channels if layer.groups == -1 else layer.groups
    image = _cast(run, image, layer.compute_dtype)
    dtype = tf.float64 if image.parts[0].dtype == tf.float64 else tf.float32

    def measure(x: tf.Tensor) -> Moments:
        shape = tf.shape(x)
        x = tf.reshape(tf.cast(x, dtype), [shape[0], -1, groups, channels // groups])
        count = tf.cast(shape[1] * shape[2] * (channels // groups), dtype)
        return Moments(count, *tf.nn.moments(x, [1, 3]))

    def pool(*flat: tf.Tensor) -> list[tf.Tensor]:
        found = _pool(flat)
        return [
            tf.repeat(t, channels // groups, axis=1)[:, None, None, :]
            for t in (found.mean, found.variance)
        ]

    moments = _measure(run, image, measure)
    mean, variance = run.cells.run(None, pool, moments)
    return [_normalize(run, image, layer, _normalize_plainly, mean, variance)]


def _cast(run: StripForward, image: StripedImage, dtype: str) -> StripedImage:
    """Returns an image in the dtype in which its layer computes, as Keras gives it to the layer."""
    if image.parts[0].dtype == dtype:
        return image
    return map_parts(run, image, lambda x: tf.cast(x, dtype))


def _measure(
    run: StripForward, image: StripedImage, measure: Callable[[tf.Tensor], Moments]
) -> list[tf.Tensor]:
    """Returns the count, mean and variance of each part, one after the other."""
    found = []
    for device, part in zip(run.devices, image.parts, strict=True):
        found += run.cells.run(device, lambda x: list(measure(x)), [part])
    return found


def _pool(flat: Sequence[tf.Tensor]) -> Moments:
    """Returns the moments of all parts. Source: Chan, Golub and LeVeque 1979."""
    counts, means, variances = flat[::3], flat[1::3], flat[2::3]
    count = tf.add_n(list(counts))
    shares = [tf.stop_gradient(c / count) for c in counts]
    offsets = [mean - means[0] for mean in means]
    offset = tf.add_n([s * o for s, o in zip(shares, offsets, strict=True)])
    squares = [
        s * (v + tf.square(o - offset)) for s, v, o in zip(shares, variances, offsets, strict=True)
    ]
    return Moments(count, means[0] + offset, tf.add_n(squares))


def _normalize(
    run: StripForward,
    image: StripedImage,
    layer: "keras.Layer",
    normalize: Callable[..., tf.Tensor],
    mean: tf.Tensor,
    variance: tf.Tensor,
) -> StripedImage:
    found = [getattr(layer, name, None) for name in ("gamma", "beta")]
    weights = [run.read(variable) for variable in found if variable is not None]

    def compute(x: tf.Tensor, mean: tf.Tensor, variance: tf.Tensor, *weights: tf.Tensor) -> Any:
        left = [tf.cast(weight, mean.dtype) for weight in weights]
        channels = [x.shape[-1]]
        gamma = tf.ones(channels, mean.dtype) if found[0] is None else left.pop(0)
        beta = tf.zeros(channels, mean.dtype) if found[1] is None else left.pop(0)
        y = normalize(x, gamma, beta, mean, variance, layer.epsilon)
        return tf.cast(y, layer.compute_dtype)

    return map_parts(run, image, compute, mean, variance, *weights)


def _normalize_plainly(
    x: tf.Tensor,
    gamma: tf.Tensor,
    beta: tf.Tensor,
    mean: tf.Tensor,
    variance: tf.Tensor,
    epsilon: float,
) -> tf.Tensor:
    return (tf.cast(x, mean.dtype) - mean) * (tf.math.rsqrt(variance + epsilon) * gamma) + beta


def average_all(run: StripForward, operation: Operation, taken: Values) -> list[Any]:
    """The means of all pixels."""
    (image,), keeps = taken, operation.layer.keepdims

    def compute(*parts: tf.Tensor) -> list[tf.Tensor]:
        return [tf.add_n(list(parts)) / math.prod(image.size)]

    return _reduce(run, image, tf.reduce_sum, compute, keeps)


def maximize_all(run: StripForward, operation: Operation, taken: Values) -> list[Any]:
    """The largest values of all pixels."""
    (image,), keeps = taken, operation.layer.keepdims

    def compute(*parts: tf.Tensor) -> list[tf.Tensor]:
        return [tf.reduce_max(tf.stack(parts), 0)]

    return _reduce(run, image, tf.reduce_max, compute, keeps)


def _reduce(
    run: StripForward,
    image: StripedImage,
    each: Any,
    together: Callable[..., list[tf.Tensor]],
    keeps: bool,
) -> list[Any]:
    parts = []
    for device, part in zip(run.devices, image.parts, strict=True):
        parts += run.cells.run(device, lambda x: [each(x, [1, 2], keepdims=keeps)], [part])
    return run.cells.run(None, together, parts)
