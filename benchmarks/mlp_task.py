"""A small task for `benchmarks.plan_accuracy`: an MLP on noise."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

import tfdist


@dataclass(frozen=True, kw_only=True)
class Mlp(tfdist.Task):
    """An MLP on noise."""

    def make_data(self, *, seed: int, quiet: bool) -> tfdist.Data:
        random = np.random.default_rng(seed)
        x = random.normal(size=(1024, 784)).astype("float32")
        y = random.integers(0, 10, 1024).astype("int32")
        return tfdist.Data(train=(x, y), val=(x[:64], y[:64]))

    def build_model(self, info: Mapping[str, Any], *, seed: int) -> keras.Model:
        layers = [keras.layers.Dense(1024, activation="relu") for _ in range(3)]
        return keras.Sequential([keras.Input((784,)), *layers, keras.layers.Dense(10)])

    def compile_model(self, model: keras.Model, optimizer: Any, info: Mapping[str, Any]) -> None:
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss)
