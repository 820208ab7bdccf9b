"""A small task for `benchmarks.auto`: a recurrent network on random sequences."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

import tfdist

_LENGTH, _FEATURES, _WIDTH = 64, 16, 64


@dataclass(frozen=True, kw_only=True)
class Recurrent(tfdist.Task):
    """Two LSTM layers that classify sequences."""

    def make_data(self, *, seed: int, quiet: bool) -> tfdist.Data:
        rng = np.random.default_rng(seed)
        x = rng.normal(size=(512, _LENGTH, _FEATURES)).astype("float32")
        y = rng.integers(0, 4, 512)
        return tfdist.Data(train=(x, y), val=(x[:64], y[:64]))

    def build_model(self, info: Mapping[str, Any], *, seed: int) -> keras.Model:
        inputs = keras.Input((_LENGTH, _FEATURES))
        x = keras.layers.LSTM(_WIDTH, return_sequences=True)(inputs)
        return keras.Model(inputs, keras.layers.Dense(4)(keras.layers.LSTM(_WIDTH)(x)))

    def compile_model(self, model: keras.Model, optimizer: Any, info: Mapping[str, Any]) -> None:
        model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
