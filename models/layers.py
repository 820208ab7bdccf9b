"""Batch normalization on TensorFlow's fused kernel, per replica or over all replicas."""

import math
from typing import NamedTuple

import keras
import tensorflow as tf

NORMS = ("sync_batch", "batch", "group", "none")
"""The kinds of normalization that `make_norm` accepts."""

_GROUPS = 32  # Wu and He 2018, table 3: the default, and never far from the best.


def make_norm(kind: str, *, channels: int, name: str | None = None) -> keras.layers.Layer:
    """Returns a new normalization layer over the last axis.

    Args:
      kind: `sync_batch`, batch normalization over all replicas' examples; `batch`, over those of
        one replica; `group`, group normalization, with the largest group count that divides both
        32 and `channels`; `none`, the identity.
      channels: the size of the last axis.
      name: the layer's name.

    Raises:
      ValueError: `kind` is not one of these.

    Source: Ioffe and Szegedy 2015 (arXiv:1502.03167); Wu and He 2018 (arXiv:1803.08494).
    """
    if kind in ("sync_batch", "batch"):
        # Not Keras's 0.99, with which the initial statistics still show after hundreds of steps.
        return FusedBatchNormalization(synchronized=kind == "sync_batch", momentum=0.9, name=name)
    if kind == "group":
        return keras.layers.GroupNormalization(groups=math.gcd(_GROUPS, channels), name=name)
    if kind == "none":
        return keras.layers.Identity(name=name)
    raise ValueError(f"Unknown norm {kind!r}. Valid: {', '.join(NORMS)}.")


@keras.saving.register_keras_serializable(package="tfdist")
class FusedBatchNormalization(keras.layers.Layer):
    """Batch normalization over the last axis, on the fused kernel.

    The weights, their names and order, the defaults and the results are those of
    `keras.layers.BatchNormalization`, so weights can be copied either way. Two things differ.

    The kernel: a single call of `FusedBatchNormV3` (oneDNN on the CPU, cuDNN on the GPU), which
    Keras 3 never uses. Statistics are float32. There is no such kernel for float64, for which the
    layer uses plain operations.

    The replicas: the moving statistics follow those of the global batch and are the same on
    every replica. With `synchronized`, the output is normalized by the global batch too, so that
    the number of replicas does not change the result. This costs one all-reduce in the forward
    pass and one in the backward pass. Replicas are weighted by their number of elements, so their
    batches may differ in size, or be empty. Gradients are correct if each replica differentiates
    the mean loss of its own part, and the mean of the gradients is then weighted in the same way.

    Outside `strategy.run`, or with one replica, nothing is reduced.

    Args:
      synchronized: whether to normalize by the statistics of the global batch, rather than by those
        of the replica's part of it.
      momentum: the momentum of the moving statistics.
      epsilon: added to the variance.
      center: whether to add `beta`.
      scale: whether to multiply by `gamma`.
      **kwargs: arguments of `keras.layers.Layer`: `name`, `dtype`, `trainable`.

    Call arguments:
      inputs: float [batch, ..., channels], rank 2 or more; *batch* is per replica.
      training: whether to normalize by the batch's statistics and update the moving ones. As in
        Keras, a layer that is not trainable never does.

    Raises:
      ValueError: on build, the number of channels is unknown.

    Source: Ioffe and Szegedy 2015 (arXiv:1502.03167), algorithm 1 and section 3; the pooling of
    replicas' variances is that of Chan, Golub and LeVeque 1979.
    """

    def __init__(
        self,
        *,
        synchronized: bool = False,
        momentum: float = 0.99,
        epsilon: float = 1e-3,
        center: bool = True,
        scale: bool = True,
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.synchronized = synchronized
        self.momentum = momentum
        self.epsilon = epsilon
        self.center = center
        self.scale = scale
        self.gamma = None
        self.beta = None

    def build(self, input_shape):
        """Creates the weights: gamma, beta, moving_mean, moving_variance, each [channels]."""
        channels = input_shape[-1]
        if channels is None:
            raise ValueError(
                f"Cannot build {self.name}: the last axis of its input {tuple(input_shape)} is "
                "unknown. Give the input a fixed number of channels."
            )

        def add(name, initializer, trainable):
            return self.add_weight(
                shape=(channels,),
                name=name,
                initializer=initializer,
                trainable=trainable,
                autocast=False,
                # Every replica assigns the same values, so those of the first one are enough.
                # CentralStorageStrategy rejects the default, none.
                aggregation="none" if trainable else "only_first_replica",
            )

        if self.scale:
            self.gamma = add("gamma", "ones", True)
        if self.center:
            self.beta = add("beta", "zeros", True)
        self.moving_mean = add("moving_mean", "zeros", False)
        self.moving_variance = add("moving_variance", "ones", False)

    def compute_output_shape(self, input_shape):
        """Returns `input_shape`."""
        return input_shape

    def call(self, inputs, training=None):
        """Returns the normalized inputs, in their shape and dtype."""
        dtype = tf.float64 if inputs.dtype == tf.float64 else tf.float32
        moving_mean = tf.cast(self.moving_mean, dtype)
        moving_variance = tf.cast(self.moving_variance, dtype)
        gamma = tf.cast(self.gamma, dtype) if self.scale else tf.ones_like(moving_mean)
        beta = tf.cast(self.beta, dtype) if self.center else tf.zeros_like(moving_mean)

        x = inputs if inputs.shape.rank == 4 else tf.reshape(inputs, [1, -1, 1, inputs.shape[-1]])
        if training and self.trainable:
            y, moments = self._normalize_by_batch(x, gamma, beta)
            keep = self.momentum
            self.moving_mean.assign(moving_mean * keep + moments.mean * (1.0 - keep))
            self.moving_variance.assign(moving_variance * keep + moments.variance * (1.0 - keep))
        else:
            y = _normalize(x, gamma, beta, moving_mean, moving_variance, self.epsilon)
        if inputs.shape.rank != 4:
            y = tf.ensure_shape(tf.reshape(y, tf.shape(inputs)), inputs.shape)
        return y

    def _normalize_by_batch(self, x, gamma, beta):
        context = tf.distribute.get_replica_context()
        replicas = context.num_replicas_in_sync if context else 1
        if x.dtype == tf.float64 and not (self.synchronized and replicas > 1):
            local = _plain_moments(x)
            y = _normalize(x, gamma, beta, local.mean, local.variance, self.epsilon)
        elif self.synchronized and replicas > 1:
            return _normalize_by_global_batch(x, gamma, beta, self.epsilon, context)
        else:
            y, local = _fused_training_call(x, gamma, beta, self.epsilon)
        local = _Moments(*map(tf.stop_gradient, local))
        return y, _pool(local, context) if replicas > 1 else local

    def get_config(self):
        """Returns the constructor's arguments."""
        return {
            **super().get_config(),
            "synchronized": self.synchronized,
            "momentum": self.momentum,
            "epsilon": self.epsilon,
            "center": self.center,
            "scale": self.scale,
        }


@keras.saving.register_keras_serializable(package="tfdist")
class ReverseChannels(keras.layers.Layer):
    """Reverses the last axis: from red, green, blue to blue, green, red and back.

    Call arguments:
      inputs: [..., channels].
    """

    def compute_output_shape(self, input_shape):
        """Returns `input_shape`."""
        return input_shape

    def call(self, inputs):
        """Returns the inputs with their channels in the opposite order."""
        return tf.reverse(inputs, axis=[-1])


class _Moments(NamedTuple):
    """The number of elements per channel (scalar), and each channel's mean and biased variance."""

    count: tf.Tensor
    mean: tf.Tensor
    variance: tf.Tensor


def _normalize_by_global_batch(x, gamma, beta, epsilon, context):
    """Returns x normalized by the moments of all replicas' x, and these moments."""

    @tf.custom_gradient
    def normalize(x, gamma, beta):
        moments = _pool(_local_moments(x, epsilon), context)
        count, mean, variance = moments
        y = _normalize(x, gamma, beta, mean, variance, epsilon)

        def gradient(dy, *_):
            # With x' = (x - mean) / std, the gradient of x is
            #   gamma / std * (dy - mean(dy) - x' * mean(dy * x'))
            # with means over the global batch. The first term is the gradient with constant
            # moments. Its kernel also returns the gradients of beta and gamma, which are this
            # replica's sums of dy and dy * x'. With global sums, the other terms normalize x again.
            dx, dgamma, dbeta = _gradients_at_fixed_moments(x, dy, gamma, mean, variance, epsilon)
            rows = _count(x, dgamma.dtype)
            sums = context.all_reduce(tf.distribute.ReduceOp.SUM, tf.stack([dgamma, dbeta]) * rows)
            sums = tf.math.divide_no_nan(sums, rows)
            scale, offset = tf.unstack(
                -gamma * tf.math.rsqrt(variance + epsilon) * tf.math.divide_no_nan(sums, count)
            )
            return dx + _normalize(x, scale, offset, mean, variance, epsilon), dgamma, dbeta

        return (y, *map(tf.stop_gradient, moments)), gradient

    y, *moments = normalize(x, gamma, beta)
    return y, _Moments(*moments)


def _pool(local, context):
    """Returns the moments of the union of all replicas' elements, in one all-reduce.

    Every replica fills its own row of a table of zeros, so the sum of the tables is exact, and
    all replicas pool the same numbers in the same order. Unlike a sum of squares, this does not
    cancel digits when the mean is large.
    """
    channels = local.mean.shape[0]
    row = tf.concat([local.count[None], local.mean, local.variance], 0)
    # The mean of an empty batch is NaN.
    row = tf.where(local.count > 0, row, tf.zeros_like(row))
    place = tf.one_hot(
        context.replica_id_in_sync_group, context.num_replicas_in_sync, dtype=row.dtype
    )
    table = context.all_reduce(tf.distribute.ReduceOp.SUM, place[:, None] * row)
    counts, means, variances = tf.split(table, [1, channels, channels], axis=1)
    count = tf.reduce_sum(counts)
    shares = tf.math.divide_no_nan(counts, count)
    offsets = means - means[0]
    mean_offset = tf.reduce_sum(shares * offsets, 0)
    variance = tf.reduce_sum(shares * (variances + tf.square(offsets - mean_offset)), 0)
    return _Moments(count, means[0] + mean_offset, variance)


def _local_moments(x, epsilon):
    if x.dtype == tf.float64:
        return _plain_moments(x)
    ones = tf.ones([x.shape[-1]])
    _, moments = _fused_training_call(x, ones, tf.zeros_like(ones), epsilon)
    return moments


def _plain_moments(x):
    count = _count(x, x.dtype)
    mean = tf.math.divide_no_nan(tf.reduce_sum(x, [0, 1, 2]), count)
    squares = tf.reduce_sum(tf.math.squared_difference(x, mean), [0, 1, 2])
    return _Moments(count, mean, tf.math.divide_no_nan(squares, count))


def _fused_training_call(x, gamma, beta, epsilon):
    empty = tf.zeros([0])
    out = tf.raw_ops.FusedBatchNormV3(
        x=x, scale=gamma, offset=beta, mean=empty, variance=empty, epsilon=epsilon, is_training=True
    )
    count = _count(x, gamma.dtype)
    # The kernel's variance has Bessel's correction; Keras's does not. For a single element, the
    # corrected variance is 0 on the CPU and may be 0 * inf on the GPU.
    biased = tf.math.multiply_no_nan(out.batch_variance, 1.0 - tf.math.reciprocal_no_nan(count))
    return out.y, _Moments(count, out.batch_mean, biased)


def _normalize(x, scale, offset, mean, variance, epsilon):
    if x.dtype == tf.float64:
        return (x - mean) * (scale * tf.math.rsqrt(variance + epsilon)) + offset
    return tf.raw_ops.FusedBatchNormV3(
        x=x,
        scale=scale,
        offset=offset,
        mean=mean,
        variance=variance,
        epsilon=epsilon,
        is_training=False,
    ).y


def _gradients_at_fixed_moments(x, dy, gamma, mean, variance, epsilon):
    """Returns the gradients of x, gamma and beta through `_normalize`."""
    if x.dtype == tf.float64:
        std_reciprocal = tf.math.rsqrt(variance + epsilon)
        dgamma = tf.reduce_sum(dy * (x - mean), [0, 1, 2]) * std_reciprocal
        return dy * (gamma * std_reciprocal), dgamma, tf.reduce_sum(dy, [0, 1, 2])
    out = tf.raw_ops.FusedBatchNormGradV3(
        y_backprop=dy,
        x=x,
        scale=gamma,
        reserve_space_1=mean,
        reserve_space_2=variance,
        reserve_space_3=tf.zeros([0]),
        epsilon=epsilon,
        is_training=False,
    )
    return out.x_backprop, out.scale_backprop, out.offset_backprop


def _count(x, dtype):
    """Returns the number of elements per channel."""
    return tf.cast(tf.reduce_prod(tf.shape(x, out_type=tf.int64)[:-1]), dtype)
