"""An exponential moving average of a model's weights, which is evaluated and saved."""

import keras

from tfdist.training.optimizers import OptimizerOptions


def average_statistics(model: keras.Model, options: OptimizerOptions) -> None:
    """Makes batch normalization average its statistics as the optimizer averages the weights.

    The averaged weights would be evaluated with the statistics of the latest ones otherwise.

    Args:
      model: the model, before it is trained.
      options: with `ema_momentum` of 0, nothing is changed.
    """
    if not options.ema_momentum:
        return
    for layer in model._flatten_layers(include_self=False):
        if hasattr(layer, "moving_mean") and hasattr(layer, "momentum"):
            layer.momentum = options.ema_momentum


def make_averaging(options: OptimizerOptions) -> list[keras.callbacks.Callback]:
    """Returns the callbacks that evaluate and save the average; the first of an epoch's end.

    Args:
      options: with `ema_momentum` of 0, there are none.
    """
    if not options.ema_momentum:
        return []
    return [keras.callbacks.SwapEMAWeights(swap_on_epoch=True)]
