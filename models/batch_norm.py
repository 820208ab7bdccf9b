"""Batch normalization of a part of a batch: fused kernels, and pooled moments.

On CPUs, the kernel is TensorFlow's. On GPUs, XLA makes it: cuDNN's, which TensorFlow calls, copies
float32 with channels last to channels first and back, and took five times as long.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

_SUM = tf.distribute.ReduceOp.SUM


class Moments(NamedTuple):
    """The number of elements per channel (scalar), and each channel's mean and biased variance."""

    count: tf.Tensor
    mean: tf.Tensor
    variance: tf.Tensor


class Replicas:
    """The replicas that share a batch, as one of them sees them.

    Gradients are correct if each replica differentiates the loss of its own part, and the mean of
    the replicas' gradients is then weighted in the same way as here.

    Args:
      weight: float scalar, the weight of this replica; only ratios to those of others matter.
    """

    def __init__(self, weight: tf.Tensor):
        self._context = tf.distribute.get_replica_context()
        self._weight = weight

    def mark(self, dtype: tf.DType) -> tf.Tensor:
        """Returns [replicas, 1], 1 for this replica and 0 for the others."""
        index, count = self._context.replica_id_in_sync_group, self._context.num_replicas_in_sync
        return tf.one_hot(tf.reshape(index, [1]), count, axis=0, dtype=dtype)

    def sum(self, value: tf.Tensor) -> tf.Tensor:
        """Returns the sum of the replicas' values."""

        @tf.custom_gradient
        def reduce(value):
            return self._context.all_reduce(_SUM, value), self.sum_gradients

        return reduce(value)

    def sum_gradients(self, upstream: tf.Tensor) -> tf.Tensor:
        """Returns the gradient of `sum`: the weighted sum, relative to this replica's weight."""
        weight = tf.cast(self._weight, upstream.dtype)

        @tf.custom_gradient
        def reduce(upstream):
            total = self._context.all_reduce(_SUM, upstream * weight)
            return tf.math.divide_no_nan(total, weight), self.sum

        return reduce(upstream)


def normalize_by_global_batch(
    x: tf.Tensor, gamma: tf.Tensor, beta: tf.Tensor, epsilon: float, replicas: Replicas
) -> tuple[tf.Tensor, Moments]:
    """Returns x normalized by the moments of all replicas' x, and these moments.

    This costs one all-reduce in the forward pass and one in the backward pass.

    Args:
      x: float [batch, height, width, channels], the batch of this replica.
      gamma, beta: [channels], float64 if x is, otherwise float32.
    """
    if _is_for_xla(x):
        return _normalize_by_xla(x, gamma, beta, epsilon, replicas)

    @tf.custom_gradient
    def normalize_all(x, gamma, beta):
        local = measure_moments(x) if x.dtype == tf.float64 else _measure_fused(x, epsilon)
        moments = pool_moments(local, replicas)
        count, mean, variance = moments
        y = normalize(x, gamma, beta, mean, variance, epsilon)

        def gradient(dy, *_):
            # With x' = (x - mean) / std, the gradient of x is
            #   gamma / std * (dy - mean(dy) - x' * mean(dy * x'))
            # with means over the global batch. The first term is the gradient with constant
            # moments. Its kernel also returns the gradients of beta and gamma, which are this
            # replica's sums of dy and dy * x'. With global sums, the other terms normalize x again.
            dx, dgamma, dbeta = _gradients_at_fixed_moments(x, dy, gamma, mean, variance, epsilon)
            sums = replicas.sum_gradients(tf.stack([dgamma, dbeta]))
            scale, offset = tf.unstack(
                -gamma * tf.math.rsqrt(variance + epsilon) * tf.math.divide_no_nan(sums, count)
            )
            return dx + normalize(x, scale, offset, mean, variance, epsilon), dgamma, dbeta

        return (y, *map(tf.stop_gradient, moments)), gradient

    y, *moments = normalize_all(x, gamma, beta)
    return y, Moments(*moments)


def pool_moments(local: Moments, replicas: Replicas) -> Moments:
    """Returns the moments of the union of all replicas' elements, in one all-reduce.

    Every replica fills its own row of a table of zeros, so the sum of the tables is exact, and
    all replicas pool the same numbers in the same order. Unlike a sum of squares, this does not
    cancel digits when the mean is large.

    Source: Chan, Golub and LeVeque 1979.
    """
    row = tf.concat([tf.reshape(local.count, [1]), local.mean, local.variance], 0)
    # The mean of an empty batch is NaN.
    row = tf.where(local.count > 0, row, tf.zeros_like(row))
    table = replicas.sum(replicas.mark(row.dtype) * row)
    channels = local.mean.shape[0] or tf.size(local.mean)
    counts, means, variances = tf.split(table, [1, channels, channels], axis=1)
    count = tf.reduce_sum(counts)
    shares = tf.stop_gradient(tf.math.divide_no_nan(counts, count))
    first = means[0]
    offsets = means - first
    mean_offset = tf.reduce_sum(shares * offsets, 0)
    variance = tf.reduce_sum(shares * (variances + tf.square(offsets - mean_offset)), 0)
    shape = local.mean.shape
    return Moments(
        count, tf.ensure_shape(first + mean_offset, shape), tf.ensure_shape(variance, shape)
    )


def measure_moments(x: tf.Tensor) -> Moments:
    """Returns the moments of x, [batch, height, width, channels], by plain operations."""
    count = count_elements(x, x.dtype)
    mean = tf.math.divide_no_nan(tf.reduce_sum(x, [0, 1, 2]), count)
    squares = tf.reduce_sum(tf.math.squared_difference(x, mean), [0, 1, 2])
    return Moments(count, mean, tf.math.divide_no_nan(squares, count))


def normalize_by_batch(
    x: tf.Tensor, gamma: tf.Tensor, beta: tf.Tensor, epsilon: float
) -> tuple[tf.Tensor, Moments]:
    """Returns x normalized by its own moments, and these. On the fused kernel, not in float64."""
    if _is_for_xla(x):
        return _normalize_by_xla(x, gamma, beta, epsilon)
    empty = tf.zeros([0])
    out = tf.raw_ops.FusedBatchNormV3(
        x=x, scale=gamma, offset=beta, mean=empty, variance=empty, epsilon=epsilon, is_training=True
    )
    count = count_elements(x, gamma.dtype)
    # The kernel's variance has Bessel's correction; Keras's does not. For a single element, the
    # corrected variance is 0 on the CPU and may be 0 * inf on the GPU.
    biased = tf.math.multiply_no_nan(out.batch_variance, 1.0 - tf.math.reciprocal_no_nan(count))
    return out.y, Moments(count, out.batch_mean, biased)


def _measure_fused(x, epsilon):
    ones = tf.ones([x.shape[-1]])
    return normalize_by_batch(x, ones, tf.zeros_like(ones), epsilon)[1]


def normalize(
    x: tf.Tensor,
    scale: tf.Tensor,
    offset: tf.Tensor,
    mean: tf.Tensor,
    variance: tf.Tensor,
    epsilon: float,
) -> tf.Tensor:
    """Returns x normalized by given moments."""
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


def measure_part(x: tf.Tensor) -> Moments:
    """Returns the moments of x, a part of an image, for `normalize_part`. Both have gradients."""
    if x.dtype == tf.float64 or _is_for_xla(x):
        return measure_moments(x if x.dtype == tf.float64 else tf.cast(x, tf.float32))

    @tf.custom_gradient
    def measure(x):
        count, mean, variance = _measure_fused(x, 0.0)

        def gradient(_, dmean, dvariance):
            # Of each element: (dmean + 2 * dvariance * (x - mean)) / count.
            one = tf.ones_like(variance)
            return normalize(x, 2.0 * dvariance / count, dmean / count, mean, one, 0.0)

        return (count, mean, variance), gradient

    return Moments(*measure(x))


def normalize_part(
    x: tf.Tensor,
    gamma: tf.Tensor,
    beta: tf.Tensor,
    mean: tf.Tensor,
    variance: tf.Tensor,
    epsilon: float,
) -> tf.Tensor:
    """Returns `normalize(...)`, which here also has gradients with respect to the moments."""
    if _is_for_xla(x):
        return _scale(x, mean, gamma * tf.math.rsqrt(variance + epsilon), beta)

    @tf.custom_gradient
    def normalize_at(x, gamma, beta, mean, variance):
        def gradient(dy):
            given = (x, dy, gamma, mean, variance, epsilon)
            dx, dgamma, dbeta = _gradients_at_fixed_moments(*given)
            scale = gamma * tf.math.rsqrt(variance + epsilon)
            dvariance = -0.5 * gamma * dgamma / (variance + epsilon)
            return dx, dgamma, dbeta, -scale * dbeta, dvariance

        return normalize(x, gamma, beta, mean, variance, epsilon), gradient

    return normalize_at(x, gamma, beta, mean, variance)


def _gradients_at_fixed_moments(x, dy, gamma, mean, variance, epsilon):
    """Returns the gradients of x, gamma and beta through `normalize`."""
    if x.dtype == tf.float64:
        std_reciprocal = tf.math.rsqrt(variance + epsilon)
        return (dy * (gamma * std_reciprocal), *_sum_gradients(x, dy, mean, std_reciprocal))
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


def _is_for_xla(x: tf.Tensor) -> bool:
    """Whether x is on a GPU, as far as is known while a function is traced; not in float64."""
    on_gpu = "CPU" not in x.device and bool(tf.config.list_logical_devices("GPU"))
    return on_gpu and x.dtype != tf.float64


def _normalize_by_xla(
    x: tf.Tensor,
    gamma: tf.Tensor,
    beta: tf.Tensor,
    epsilon: float,
    replicas: Replicas | None = None,
) -> tuple[tf.Tensor, Moments]:
    """Returns x normalized by the moments of all replicas' x, or by its own; and these moments."""

    def call(function: Callable[..., Any], *arguments: Any) -> Any:
        return _compile(function, x.dtype, tuple(x.shape), epsilon)(*arguments)

    # To start what XLA compiles takes time: it is one function where no replicas must meet in it.
    @tf.custom_gradient
    def normalize_all(x, gamma, beta):
        if replicas is None:
            y, moments, std_reciprocal = call(_normalize_alone, x, gamma, beta, epsilon)
        else:
            moments = pool_moments(call(_measure_wide, x), replicas)
            std_reciprocal = tf.math.rsqrt(moments.variance + epsilon)
            y = call(_scale, x, moments.mean, gamma * std_reciprocal, beta)
        count, mean, _ = moments

        def gradient(dy, *_):
            given = (x, dy, mean, std_reciprocal)
            if replicas is None:
                return call(_differentiate_alone, *given, gamma, count)
            dgamma, dbeta = call(_sum_gradients, *given)
            sums = replicas.sum_gradients(tf.stack([dgamma, dbeta]))
            means = tf.math.divide_no_nan(sums, count)
            return call(_combine_gradients, *given, gamma, means), dgamma, dbeta

        return (y, *map(tf.stop_gradient, moments)), gradient

    y, *moments = normalize_all(x, gamma, beta)
    return y, Moments(*moments)


@functools.cache
def _compile(function: Callable[..., Any], *signature: Any) -> Callable[..., Any]:
    """Returns a function that XLA compiles; one for each signature, which layers share."""
    return tf.function(function, jit_compile=True, autograph=False)


def _normalize_alone(x, gamma, beta, epsilon):
    moments = _measure_wide(x)
    std_reciprocal = tf.math.rsqrt(moments.variance + epsilon)
    return _scale(x, moments.mean, gamma * std_reciprocal, beta), moments, std_reciprocal


def _differentiate_alone(x, dy, mean, std_reciprocal, gamma, count):
    """Returns the gradients of x, gamma and beta."""
    dgamma, dbeta = _sum_gradients(x, dy, mean, std_reciprocal)
    means = tf.math.divide_no_nan(tf.stack([dgamma, dbeta]), count)
    return _combine_gradients(x, dy, mean, std_reciprocal, gamma, means), dgamma, dbeta


def _measure_wide(x):
    return measure_moments(tf.cast(x, tf.float32))


def _scale(x, mean, scale, offset):
    return tf.cast((tf.cast(x, mean.dtype) - mean) * scale + offset, x.dtype)


def _sum_gradients(x, dy, mean, std_reciprocal):
    """Returns the gradients of gamma and beta."""
    wide = tf.cast(dy, mean.dtype)
    dgamma = tf.reduce_sum(wide * (tf.cast(x, mean.dtype) - mean), [0, 1, 2]) * std_reciprocal
    return dgamma, tf.reduce_sum(wide, [0, 1, 2])


def _combine_gradients(x, dy, mean, std_reciprocal, gamma, means):
    """Returns the gradient of x; means are those of the gradients of gamma and beta."""
    normalized = (tf.cast(x, mean.dtype) - mean) * std_reciprocal
    dx = tf.cast(dy, mean.dtype) - means[1] - normalized * means[0]
    return tf.cast(dx * (gamma * std_reciprocal), x.dtype)


def count_elements(x: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Returns the number of elements per channel."""
    return tf.cast(tf.size(x, out_type=tf.int64) // x.shape[-1], dtype)


def to_pictures(x: tf.Tensor) -> tf.Tensor:
    """Returns x, [batch, ..., channels], with the rank that these functions take, 4."""
    return x if x.shape.rank == 4 else tf.reshape(x, [1, -1, 1, x.shape[-1]])


def restore_shape(y: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    """Returns what was computed from `to_pictures(x)` in the shape of x."""
    return y if x.shape.rank == 4 else tf.ensure_shape(tf.reshape(y, tf.shape(x)), x.shape)
