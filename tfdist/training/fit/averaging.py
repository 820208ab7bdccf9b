"""An exponential moving average of a model's weights, which is evaluated and saved."""

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import keras

from tfdist.internals import BaseOptimizer, TFOptimizer
from tfdist.placement.shards.divided import find_divided
from tfdist.replacing import replace_always, replaced
from tfdist.training.optimizers import OptimizerOptions


def average_statistics(model: keras.Model, options: OptimizerOptions) -> None:
    """Makes batch normalization average its statistics as the optimizer averages the weights.

    The averaged weights would be evaluated with the statistics of the latest ones otherwise.

    Args:
      options: with `ema_momentum` of 0, nothing is changed.
    """
    if not options.ema_momentum:
        return
    for layer in model._flatten_layers(include_self=False):
        if hasattr(layer, "moving_mean") and hasattr(layer, "momentum"):
            layer.momentum = options.ema_momentum


def make_averaging(options: OptimizerOptions) -> list[keras.callbacks.Callback]:
    """Returns the callbacks that evaluate and save the average; the first of an epoch's end."""
    if not options.ema_momentum:
        return []
    return [keras.callbacks.SwapEMAWeights(swap_on_epoch=True)]


def exchange_divided(callbacks: Iterable[keras.callbacks.Callback]) -> None:
    """Makes Keras's `SwapEMAWeights` exchange weights that are divided over devices.

    Keras updates the one by the other on each replica, which has only parts of them. Their whole
    values are exchanged instead.
    """
    for callback in callbacks:
        is_known = "_tf_swap_variables" in vars(callback)
        if isinstance(callback, keras.callbacks.SwapEMAWeights) and not is_known:
            for name in ("swap_variables", "finalize_ema_values"):
                choices = (getattr(callback, f"_{kind}_{name}") for kind in ("tf", "backend"))
                replace_always(callback, f"_tf_{name}", _choose(*choices))


def _choose(
    of_replicas: Callable[[Any], None], of_whole: Callable[[Any], None]
) -> Callable[[Any], None]:
    def call(optimizer: keras.optimizers.Optimizer) -> None:
        is_divided = any(map(find_divided, optimizer._trainable_variables))
        (of_whole if is_divided else of_replicas)(optimizer)

    return call


def finalize_weights(model: keras.Model) -> None:
    """Replaces the weights by their average if the optimizer has one, as Keras does."""
    optimizer = model.optimizer
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        return
    overwrite = "_overwrite_model_variables_with_average_value"
    weights = model.trainable_weights
    with contextlib.ExitStack() as stack:
        stack.enter_context(model.distribute_strategy.scope())
        if any(map(find_divided, weights)):
            stack.enter_context(replaced(TFOptimizer, overwrite, getattr(BaseOptimizer, overwrite)))
        optimizer.finalize_variable_values(weights)
