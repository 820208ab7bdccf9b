"""Layers of random programs, from and to 8 numbers an example, and classes of models."""

from collections.abc import Callable
from typing import Any

import keras

from tests.training import programs


def _nest(x):
    inputs = keras.Input((8,))
    inner = keras.layers.Dropout(0.2)(keras.layers.Dense(8, "relu")(inputs))
    return keras.Model(inputs, inner)(x)


def _share(x):
    layer = keras.layers.Dense(8, "tanh")
    return layer(layer(x))


def _freeze(x):
    layer = keras.layers.Dense(8, "tanh")
    layer.trainable = False
    return layer(x)


def _share_normalization(x):
    layer = keras.layers.BatchNormalization(momentum=0.7)
    return layer(keras.layers.Dense(8)(layer(x)))


def _normalize_frozen(x):
    layer = keras.layers.BatchNormalization()
    layer.trainable = False
    return layer(x)


def _normalize_groups(x):
    x = keras.layers.GroupNormalization(2)(keras.layers.Reshape((4, 2))(x))
    return keras.layers.Flatten()(x)


def _gate(x):
    return keras.layers.Multiply()([x, keras.layers.Dense(8, "softmax")(x)])


def _stop_gradients(x):
    return keras.layers.Concatenate()([keras.ops.stop_gradient(x)[:, :3], x[:, 3:]])


def _scale_rows(x):
    return x / (1.0 + keras.ops.sum(x**2, -1, keepdims=True))


def _dense(**options):
    return lambda x: keras.layers.Dense(8, "tanh", **options)(x)


LAYERS: dict[str, Callable[[Any], Any]] = {
    "dense": _dense(),
    "nothing": lambda x: x,
    "batch normalization": lambda x: keras.layers.BatchNormalization(momentum=0.8)(x),
    "synchronized": lambda x: keras.layers.BatchNormalization(synchronized=True)(x),
    "layer normalization": lambda x: keras.layers.LayerNormalization()(x),
    "shared normalization": _share_normalization,
    "frozen normalization": _normalize_frozen,
    "group normalization": _normalize_groups,
    "RMS normalization": lambda x: keras.layers.RMSNormalization()(x),
    "unit normalization": lambda x: keras.layers.UnitNormalization()(x),
    "dropout": lambda x: keras.layers.Dropout(0.3)(x),
    "multiplied noise": lambda x: keras.layers.GaussianDropout(0.2)(x),
    "alpha dropout": lambda x: keras.layers.AlphaDropout(0.2)(keras.layers.Activation("selu")(x)),
    "seeded dropout": lambda x: keras.layers.Dropout(0.3, seed=7)(x),
    "noise": lambda x: keras.layers.GaussianNoise(0.2)(x),
    "spectral": lambda x: keras.layers.SpectralNormalization(keras.layers.Dense(8))(x),
    "penalty": lambda x: keras.layers.Dense(8, kernel_regularizer="l2", bias_regularizer="l1")(x),
    "activity": lambda x: keras.layers.Dense(8, activity_regularizer="l2")(x),
    "constraint": _dense(kernel_constraint=keras.constraints.MaxNorm(0.7)),
    "low rank": lambda x: keras.layers.Dense(8, lora_rank=2)(x),
    "einsum": lambda x: keras.layers.EinsumDense("ab,bc->ac", 8, bias_axes="c")(x),
    "orthogonal": lambda x: keras.layers.Dense(
        8, kernel_regularizer=keras.regularizers.OrthogonalRegularizer(0.1)
    )(x),
    "float32": _dense(dtype="float32"),
    "gate": _gate,
    "stopped gradients": _stop_gradients,
    "residual": lambda x: x + keras.layers.Dense(8, "gelu")(x),
    "nested": _nest,
    "shared": _share,
    "frozen": _freeze,
    "lambda": lambda x: keras.layers.Lambda(_scale_rows)(x),
    "PReLU": lambda x: keras.layers.PReLU()(x),
    "added loss": lambda x: programs.Adds(lambda x: 0.1 * keras.ops.mean(x**2))(x),
    "moving mean": lambda x: programs.MovingMean()(x),
    "measured": lambda x: programs.Measures()(x),
    "drawn": lambda x: programs.Noise()(x),
    "always drawn": lambda x: programs.DrawsAlways()(x),
    "centered": lambda x: programs.Centered()(x),
}


class Subclassed(keras.Model):
    """Not a functional model."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.inner = keras.Model(inputs, outputs)

    def call(self, x, training=None):
        return self.inner(x, training=training)


class Sequence(keras.Sequential):
    def __init__(self, inputs, outputs):
        super().__init__([keras.Model(inputs, outputs), keras.layers.Activation("linear")])


_CLASSES: dict[str, type[keras.Model]] = {
    "Model": keras.Model,
    "subclassed": Subclassed,
    "Sequential": Sequence,
}
CLASSES: dict[str, dict[str, type[keras.Model]]] = {
    "classes": _CLASSES,
    "two": {"Model": keras.Model, "subclassed": Subclassed},
    "numbers": {
        **_CLASSES,
        "own steps": programs.OwnSteps,
        "own loss": programs.MoreLoss,
        "plain loss": programs.PlainLoss,
        "own metric": programs.MoreMetrics,
        "measuring loss": programs.MeasuringLoss,
        "gradient penalty": programs.Smooth,
        "adversarial": programs.Adversarial,
    },
}
"""Kind of output -> name -> class of models."""
