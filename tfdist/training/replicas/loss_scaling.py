"""Dynamic loss scaling for float16, decided on the gradient of the global batch.

Keras 3.15 wraps the optimizer of a `mixed_float16` model in a `LossScaleOptimizer`. Its own `apply`
cannot change its state under every strategy, so this module makes the same decisions instead.
"""

from collections.abc import Sequence

import keras
import tensorflow as tf


def get_inner_optimizer(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """Returns the optimizer that updates the weights: the given one, or the one it wraps."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return optimizer.inner_optimizer
    return optimizer


def apply_scaled_gradients(
    optimizer: keras.optimizers.LossScaleOptimizer,
    gradients: Sequence[tf.Tensor | tf.IndexedSlices | None],
    variables: Sequence[keras.Variable],
) -> None:
    """Updates the variables, or skips the update if a scaled gradient is not finite.

    As in Keras, a skipped update halves the scale and does not advance a learning-rate schedule.
    Must be called in replica context.

    Args:
      gradients: the gradients of the loss after `optimizer.scale_loss`, the same on all replicas.
    """
    pairs = [(g, v) for g, v in zip(gradients, variables, strict=True) if g is not None]
    gradients, variables = [g for g, _ in pairs], [v for _, v in pairs]
    is_finite = optimizer.check_finite(gradients)
    scale = tf.convert_to_tensor(optimizer.dynamic_scale)
    unscaled = [keras.ops.divide(gradient, scale) for gradient in gradients]

    def update(
        strategy: tf.distribute.Strategy,
        is_finite: tf.Tensor,
        gradients: Sequence[tf.Tensor | tf.IndexedSlices | None],
    ) -> None:
        finite = strategy.experimental_local_results(is_finite)[0]

        def apply() -> tf.Tensor:
            strategy.extended.call_for_each_replica(
                optimizer.inner_optimizer.apply, args=(gradients, variables)
            )
            return finite

        tf.cond(finite, apply, lambda: finite)
        _update_scale(optimizer, finite)

    # In replica context, no strategy can update a variable under a condition.
    tf.distribute.get_replica_context().merge_call(update, args=(is_finite, unscaled))


def _update_scale(optimizer: keras.optimizers.LossScaleOptimizer, finite: tf.Tensor) -> None:
    scale = tf.convert_to_tensor(optimizer.dynamic_scale)
    steps = tf.convert_to_tensor(optimizer.step_counter) + 1
    grows = tf.logical_and(finite, tf.equal(steps, optimizer.dynamic_growth_steps))
    keeps = tf.logical_and(finite, tf.logical_not(grows))
    optimizer.step_counter.assign(tf.where(keeps, steps, tf.zeros_like(steps)))
    optimizer.dynamic_scale.assign(scale * tf.where(finite, tf.where(grows, 2.0, 1.0), 0.5))
