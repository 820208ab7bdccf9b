"""The layers of the networks: normalization, and the order of channels."""

import math

import keras
import tensorflow as tf

from tfdist.models.batch_norm import (
    Moments,
    Replicas,
    count_elements,
    measure_moments,
    normalize,
    normalize_by_batch,
    normalize_by_global_batch,
    pool_moments,
    restore_shape,
    to_pictures,
)

NORMS = ("sync_batch", "batch", "group", "none")
"""The kinds of normalization that `make_norm` accepts."""

_GROUPS = 32  # Wu and He 2018, table 3: the default, and never far from the best.


def make_norm(kind: str, *, channels: int, name: str | None = None) -> keras.layers.Layer:
    """Returns a new normalization layer over the last axis.

    Args:
      kind: `sync_batch`, batch normalization over all replicas' examples; `batch`, over those of
        one replica; `group`, group normalization, with the largest group count that divides both
        32 and `channels`; `none`, the identity.

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
        return input_shape

    def call(self, inputs, training=None):
        """Returns the normalized inputs, in their shape and dtype."""
        dtype = tf.float64 if inputs.dtype == tf.float64 else tf.float32
        moving_mean = tf.cast(self.moving_mean, dtype)
        moving_variance = tf.cast(self.moving_variance, dtype)
        gamma = tf.cast(self.gamma, dtype) if self.scale else tf.ones_like(moving_mean)
        beta = tf.cast(self.beta, dtype) if self.center else tf.zeros_like(moving_mean)

        x = to_pictures(inputs)
        if training and self.trainable:
            y, moments = self._normalize_by_batch(x, gamma, beta)
            keep, rest = (tf.constant(c, dtype) for c in (self.momentum, 1.0 - self.momentum))
            self.moving_mean.assign(moving_mean * keep + moments.mean * rest)
            self.moving_variance.assign(moving_variance * keep + moments.variance * rest)
        else:
            y = normalize(x, gamma, beta, moving_mean, moving_variance, self.epsilon)
        return restore_shape(y, inputs)

    def _normalize_by_batch(self, x, gamma, beta):
        context = tf.distribute.get_replica_context()
        replicas = None
        if context and context.num_replicas_in_sync > 1:
            replicas = Replicas(count_elements(x, gamma.dtype))
        if self.synchronized and replicas:
            return normalize_by_global_batch(x, gamma, beta, self.epsilon, replicas)
        if x.dtype == tf.float64:
            local = measure_moments(x)
            y = normalize(x, gamma, beta, local.mean, local.variance, self.epsilon)
        else:
            y, local = normalize_by_batch(x, gamma, beta, self.epsilon)
        local = Moments(*map(tf.stop_gradient, local))
        return y, pool_moments(local, replicas) if replicas else local

    def get_config(self):
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
        return input_shape

    def call(self, inputs):
        """Returns the inputs with their channels in the opposite order."""
        return tf.reverse(inputs, axis=[-1])
