"""Optimizers, losses, metrics and callbacks of random programs."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from tests.training import programs

_O = keras.optimizers
OPTIMIZERS: dict[str, Callable[..., keras.optimizers.Optimizer]] = {
    "SGD": lambda **options: _O.SGD(0.05, **options),
    "momentum": lambda **options: _O.SGD(0.05, momentum=0.9, nesterov=True, **options),
    "Adam": lambda **options: _O.Adam(0.01, **options),
    "amsgrad": lambda **options: _O.Adam(0.01, amsgrad=True, **options),
    "AdamW": lambda **options: _O.AdamW(0.01, **{"weight_decay": 0.1, **options}),
    "RMSprop": lambda **options: _O.RMSprop(0.01, centered=True, **options),
    "Adagrad": lambda **options: _O.Adagrad(0.05, **options),
    "Adadelta": lambda **options: _O.Adadelta(1.0, **options),
    "Nadam": lambda **options: _O.Nadam(0.01, **options),
    "Adamax": lambda **options: _O.Adamax(0.01, **options),
    "Adafactor": lambda **options: _O.Adafactor(0.01, **options),
    "Lamb": lambda **options: _O.Lamb(0.01, **options),
    "Muon": lambda **options: _O.Muon(0.01, **options),
    "steps": lambda **options: _O.SGD(
        _O.schedules.PiecewiseConstantDecay([2, 5], [0.1, 0.05, 0.01]), **options
    ),
    "Ftrl": lambda **options: _O.Ftrl(0.05, **options),
    "schedule": lambda **options: _O.Adam(_O.schedules.CosineDecay(0.02, 6), **options),
    "scaled": lambda **options: _O.LossScaleOptimizer(
        _O.SGD(0.05, **options), initial_scale=64, dynamic_growth_steps=2
    ),
}
OPTIMIZER_OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "none": dict,
    "clipnorm": lambda: {"clipnorm": 0.1},
    "clipvalue": lambda: {"clipvalue": 0.02},
    "weight_decay": lambda: {"weight_decay": 0.02},
    "average": lambda: {"use_ema": True, "ema_momentum": 0.7},
    "overwritten": lambda: {"use_ema": True, "ema_momentum": 0.7, "ema_overwrite_frequency": 3},
}

_L, _M = keras.losses, keras.metrics


def _classes():
    return _L.SparseCategoricalCrossentropy(from_logits=True)


def _encode(labels, like):
    return keras.ops.one_hot(keras.ops.cast(labels, "int32"), like.shape[-1], dtype="float64")


def _focal(y_true, y_pred):
    return _L.categorical_focal_crossentropy(_encode(y_true, y_pred), y_pred, from_logits=True)


def _dice(y_true, y_pred):
    return _L.dice(_encode(y_true, y_pred), keras.ops.softmax(y_pred))


LOSSES: dict[str, dict[str, Callable[[], dict[str, Any]]]] = {
    "numbers": {
        "mse": lambda: {"loss": "mse"},
        "Huber": lambda: {"loss": _L.Huber(0.5)},
        "sum": lambda: {"loss": _L.MeanAbsoluteError(reduction="sum")},
        "weighted mean": lambda: {"loss": _L.LogCosh(reduction="mean_with_sample_weight")},
        "cosine": lambda: {"loss": _L.CosineSimilarity()},
        "function": lambda: {"loss": lambda y, found: keras.ops.mean((y - found) ** 4, -1)},
        "squared hinge": lambda: {"loss": "squared_hinge"},
        "percentage": lambda: {"loss": _L.MeanAbsolutePercentageError()},
        "one number": lambda: {"loss": programs.MeanLoss()},
    },
    "classes": {
        "crossentropy": lambda: {"loss": _classes()},
        "focal": lambda: {"loss": _focal},
        "Dice": lambda: {"loss": _dice},
        "ignored": lambda: {
            "loss": _L.SparseCategoricalCrossentropy(from_logits=True, ignore_class=1)
        },
    },
    "two": {
        "both": lambda: {"loss": {"numbers": "mse", "classes": _classes()}},
        "weighted": lambda: {
            "loss": {"numbers": "mae", "classes": _classes()},
            "loss_weights": {"numbers": 0.3, "classes": 2.0},
        },
        "one": lambda: {"loss": {"numbers": "mse"}},
    },
}
METRICS: dict[str, dict[str, Callable[[], Any]]] = {
    "numbers": {
        "none": lambda: None,
        "mae": lambda: ["mae"],
        "R2": lambda: [_M.R2Score(), _M.RootMeanSquaredError()],
        "cosine": lambda: [_M.CosineSimilarity(), "mean_squared_logarithmic_error"],
        "correlation": lambda: [_M.PearsonCorrelation()],
        "function": lambda: [lambda y, found: keras.ops.mean(keras.ops.abs(y - found) ** 3, -1)],
        "largest": lambda: [programs.Largest()],
    },
    "classes": {
        "none": lambda: None,
        "accuracy": lambda: ["accuracy"],
        "crossentropy": lambda: [_M.SparseCategoricalCrossentropy(from_logits=True)],
        "IoU": lambda: [_M.MeanIoU(4, sparse_y_pred=False)],
    },
    "two": {
        "none": lambda: None,
        "one": lambda: {"classes": ["accuracy"]},
        "both": lambda: {"classes": ["accuracy"], "numbers": ["mae", "mse"]},
    },
}


def weigh_nothing(rows):
    return None


WEIGHTS: dict[str, Callable[[int], Any]] = {
    "none": weigh_nothing,
    "rising": lambda rows: np.linspace(0.0, 3.0, rows),
    "some zero": lambda rows: (np.arange(rows) % 3 > 0).astype("float64"),
    "first half zero": lambda rows: (np.arange(rows) >= rows // 2).astype("float64"),
}


class _Rates(keras.callbacks.Callback):
    """Changes the learning rate after each batch."""

    def on_train_batch_end(self, batch, logs=None):
        rate = self.model.optimizer.learning_rate
        if isinstance(rate, keras.Variable):
            rate.assign(rate * 0.9)


class _Logs(keras.callbacks.Callback):
    """Adds what it was given after each batch to what the epoch gives."""

    def __init__(self):
        super().__init__()
        self._sums = {}

    def on_train_batch_end(self, batch, logs=None):
        for name, value in logs.items():
            self._sums[name] = self._sums.get(name, 0.0) + float(value) * (batch + 1)

    def on_epoch_end(self, epoch, logs=None):
        logs.update({f"sum of {name}": value for name, value in self._sums.items()})


class _Stops(keras.callbacks.Callback):
    """Ends the training in the middle of the first epoch, which Keras ends first."""

    def on_train_batch_begin(self, batch, logs=None):
        self.model.stop_training = batch == 1


_C = keras.callbacks
CALLBACKS: dict[str, Callable[[], list[keras.callbacks.Callback]]] = {
    "none": list,
    "plateau": lambda: [_C.ReduceLROnPlateau("loss", 0.5, patience=0, min_delta=10.0)],
    "stops": lambda: [_C.EarlyStopping("loss", patience=0, min_delta=10.0)],
    "best": lambda: [_C.EarlyStopping("loss", patience=1, restore_best_weights=True)],
    "schedule": lambda: [_C.LearningRateScheduler(lambda epoch, rate: rate * 0.5**epoch)],
}
BATCH_CALLBACKS: dict[str, Callable[[], list[keras.callbacks.Callback]]] = {
    "rates": lambda: [_Rates()],
    "logs": lambda: [_Logs()],
    "stops early": lambda: [_Stops()],
}
"""These do the same only if they are called after each step."""
COMPILED: dict[str, dict[str, Any]] = {
    "plain": {},
    "XLA": {"jit_compile": True},
    "two steps": {"steps_per_execution": 2},
    "scale by hand": {"auto_scale_loss": False},
}
