"""Keras's batch normalization over the global batch, on the fused kernel where there is one."""

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdist.internals import renormalizes
from tfdist.models.batch_norm import (
    Moments,
    Replicas,
    normalize_by_global_batch,
    pool_moments,
    restore_shape,
    to_pictures,
)
from tfdist.replacing import find_function
from tfdist.training.replicas.batch_share import BatchShare

Normalize = Callable[[tf.Tensor, tf.Tensor, tf.Tensor, float], tuple[tf.Tensor, Moments]]


def list_norm_replacements(
    find_part: Callable[[], BatchShare | None],
) -> list[tuple[type, str, Any]]:
    """Returns what is replaced in Keras, on replicas with a part of a batch: owner, name, value."""
    norm = keras.layers.BatchNormalization

    def find_normalize() -> Normalize | None:
        part = find_part()
        if part is None:
            return None
        return functools.partial(normalize_by_global_batch, replicas=Replicas(part.weight))

    return [
        (norm, "call", make_norm_call(find_function(norm, "call"), find_normalize)),
        (norm, "_moments", _make_moments(find_function(norm, "_moments"), find_part)),
    ]


def make_norm_call(
    original: Callable[..., Any], find_normalize: Callable[[], Normalize | None]
) -> Any:
    """Returns a `call` of Keras's layer that normalizes on the fused kernel in training.

    Args:
      original: the layer's own `call`, which computes everything else.
      find_normalize: returns the function that normalizes a batch; None for `original`.
    """

    @functools.wraps(original)
    def call(
        layer: keras.Layer,
        inputs: tf.Tensor,
        training: bool | None = None,
        mask: tf.Tensor | None = None,
    ) -> Any:
        normalize = find_normalize()
        is_training = training and layer.trainable
        if normalize is None or not is_training or mask is not None or not _fits(layer, inputs):
            return original(layer, inputs, training=training, mask=mask)
        channels = inputs.shape[-1]
        gamma = layer.gamma if layer.scale else tf.ones([channels])
        beta = layer.beta if layer.center else tf.zeros([channels])
        y, moments = normalize(
            to_pictures(inputs),
            tf.cast(gamma, tf.float32),
            tf.cast(beta, tf.float32),
            layer.epsilon,
        )
        keep = layer.momentum
        for moving, new in (
            (layer.moving_mean, moments.mean),
            (layer.moving_variance, moments.variance),
        ):
            moving.assign(tf.cast(moving, tf.float32) * keep + new * (1.0 - keep))
        return tf.cast(restore_shape(y, inputs), layer.compute_dtype)

    return call


def _fits(layer: keras.Layer, inputs: tf.Tensor) -> bool:
    """Returns whether a layer normalizes the last axis, in a precision of the kernel."""
    has_kernel = inputs.dtype in (tf.float32, tf.bfloat16, tf.float16)
    is_last = layer.axis in (-1, inputs.shape.rank - 1)
    return has_kernel and is_last and not renormalizes(layer)


def _make_moments(original: Callable[..., Any], find_part: Callable[[], BatchShare | None]) -> Any:
    @functools.wraps(original)
    def moments(layer: keras.Layer, inputs: tf.Tensor, mask: tf.Tensor | None) -> Any:
        part = find_part()
        if part is None:
            return original(layer, inputs, mask)
        axes = layer._reduction_axes
        replicas = Replicas(part.weight)
        if mask is None:
            mean, variance = tf.nn.moments(inputs, axes)
            count = tf.cast(tf.size(inputs) / tf.size(mean), mean.dtype)
            _, mean, variance = pool_moments(Moments(count, mean, variance), replicas)
            return mean, variance
        weights = tf.cast(tf.expand_dims(tf.cast(mask, tf.bool), -1), inputs.dtype)
        weights = tf.broadcast_to(weights, tf.shape(inputs))
        # Keras adds a number to the count, which is that of one copy of the batch.
        share = tf.cast(tf.where(part.is_copy, part.weight, 1.0), inputs.dtype)

        def add(values: tf.Tensor) -> tf.Tensor:
            return replicas.sum(tf.reduce_sum(values, axes) * share)

        count = add(weights) + keras.backend.epsilon()
        mean = add(tf.where(weights > 0, inputs, 0)) / count
        shape = [1] * inputs.shape.rank
        shape[layer.axis] = -1
        squares = tf.where(weights > 0, tf.square(inputs - tf.reshape(mean, shape)), 0)
        return mean, add(squares) / count

    return moments
