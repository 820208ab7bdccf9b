"""A small task for `benchmarks.auto`: a transformer on random tokens."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

import tfdist

_LENGTH, _WORDS, _WIDTH = 64, 1000, 128


@dataclass(frozen=True, kw_only=True)
class Transformer(tfdist.Task):
    """A transformer with two blocks that predicts a token at each position."""

    def make_data(self, *, seed: int, quiet: bool) -> tfdist.Data:
        tokens = np.random.default_rng(seed).integers(0, _WORDS, (512, _LENGTH + 1), np.int32)
        x, y = tokens[:, :-1], tokens[:, 1:]
        return tfdist.Data(train=(x, y), val=(x[:64], y[:64]))

    def build_model(self, info: Mapping[str, Any], *, seed: int) -> keras.Model:
        inputs = keras.Input((_LENGTH,), dtype="int32")
        x = keras.layers.Embedding(_WORDS, _WIDTH)(inputs)
        for _ in range(2):
            normalized = keras.layers.LayerNormalization()(x)
            x += keras.layers.MultiHeadAttention(4, _WIDTH // 4)(normalized, normalized)
            wide = keras.layers.Dense(4 * _WIDTH, "gelu")(keras.layers.LayerNormalization()(x))
            x += keras.layers.Dense(_WIDTH)(wide)
        return keras.Model(inputs, keras.layers.Dense(_WORDS)(x))

    def compile_model(self, model: keras.Model, optimizer: Any, info: Mapping[str, Any]) -> None:
        model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
