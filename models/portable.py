"""Replaces tfdist's layers in a model with Keras's own, and back.

A file of a model with only Keras's layers can be read wherever Keras is installed.
"""

from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np

from tfdist.models.layers import FusedBatchNormalization, ReverseChannels

Makers = Mapping[type, Callable[[Any], keras.layers.Layer]]
_OPTIONS = ("name", "momentum", "epsilon", "center", "scale", "dtype", "trainable")


def to_keras_layers(model: keras.Model) -> keras.Model:
    """Returns a model of Keras's own layers with the same weights and, up to rounding, outputs.

    Returns:
      An uncompiled model, because losses and metrics may be tfdist's, too.
    """
    makers: Makers = {
        FusedBatchNormalization: lambda layer: keras.layers.BatchNormalization(
            **_get_options(layer)
        ),
        ReverseChannels: _make_convolution,
    }
    made = _replace(model, makers)
    return keras.Model(made.input, made.output, name=model.name)


def to_fused_layers(model: keras.Model) -> keras.Model:
    """Returns a model whose batch normalization over the last axis is `FusedBatchNormalization`."""
    return _replace(
        model,
        {
            keras.layers.BatchNormalization: lambda layer: FusedBatchNormalization(
                **_get_options(layer)
            )
        },
    )


def _replace(model: keras.Model, makers: Makers) -> keras.Model:
    if not any(type(layer) in makers for layer in model.layers):
        return model

    def clone(layer: keras.layers.Layer) -> keras.layers.Layer:
        make = makers.get(type(layer))
        return make(layer) if make else type(layer).from_config(layer.get_config())

    def call(layer: keras.layers.Layer, *args: Any, **kwargs: Any) -> Any:
        if isinstance(layer, FusedBatchNormalization):
            kwargs.pop("mask", None)  # images have none
        return layer(*args, **kwargs)

    made = keras.models.clone_model(model, clone_function=clone, call_function=call)
    for old, new in zip(model.layers, made.layers, strict=True):
        is_reversal = isinstance(old, ReverseChannels)
        new.set_weights([_make_reversal(old)] if is_reversal else old.get_weights())
    return made


def _get_options(layer: keras.layers.Layer) -> dict:
    config = layer.get_config()
    return {name: config[name] for name in _OPTIONS}


def _make_convolution(layer: ReverseChannels) -> keras.layers.Layer:
    channels = layer.output.shape[-1]
    options = {"dtype": layer.dtype_policy, "name": layer.name, "trainable": False}
    return keras.layers.Conv2D(channels, 1, use_bias=False, **options)


def _make_reversal(layer: ReverseChannels) -> np.ndarray:
    """Returns the kernel of a 1x1 convolution that reverses the channels."""
    return np.eye(layer.output.shape[-1])[::-1][None, None]
