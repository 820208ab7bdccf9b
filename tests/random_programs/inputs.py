"""Inputs of random programs, and what makes one vector an example of them."""

from collections.abc import Callable

import keras
import numpy as np

VOCABULARY, TOKENS = 20, 8


class Input:
    """Numbers."""

    def build(self):
        inputs = keras.Input((6,))
        return inputs, keras.layers.Dense(8, "tanh")(inputs)

    def draw(self, rng, rows):
        return rng.normal(size=(rows, 6))


class Images(Input):
    def build(self):
        inputs = keras.Input((6, 6, 2))
        x = keras.layers.Conv2D(4, 3, use_bias=False)(inputs)
        x = keras.layers.BatchNormalization()(x)
        return inputs, keras.layers.Dense(8)(keras.layers.Flatten()(keras.layers.ReLU()(x)))

    def draw(self, rng, rows):
        return rng.uniform(size=(rows, 6, 6, 2))


class AugmentedImages(Images):
    """Images of many kinds of layers, some of which draw random numbers."""

    def build(self):
        inputs = keras.Input((6, 6, 2))
        x = keras.layers.RandomFlip(seed=1)(keras.layers.Rescaling(2.0, -1.0)(inputs))
        x = keras.layers.SeparableConv2D(4, 3, padding="same")(x)
        x = keras.layers.GroupNormalization(2)(x)
        x = keras.layers.SpatialDropout2D(0.2)(keras.layers.MaxPooling2D()(x))
        x = keras.layers.DepthwiseConv2D(2, depth_multiplier=2)(x)
        x = keras.layers.Conv2DTranspose(3, 2, strides=2, activation="silu")(x)
        return inputs, keras.layers.Dense(8)(keras.layers.GlobalAveragePooling2D()(x))


class Series(Input):
    """Series of numbers."""

    def build(self):
        inputs = keras.Input((TOKENS, 3))
        x = keras.layers.Conv1D(5, 3, padding="causal", activation="relu")(inputs)
        x = keras.layers.GRU(5, return_sequences=True)(x)
        x = keras.layers.TimeDistributed(keras.layers.Dense(4))(x)
        x = keras.layers.SimpleRNN(6, recurrent_dropout=0.2)(x)
        return inputs, keras.layers.Dense(8, "tanh")(x)

    def draw(self, rng, rows):
        return rng.normal(size=(rows, TOKENS, 3))


class Tokens(Input):
    """Rows of tokens, of different lengths.

    Args:
      reduce: returns a layer that makes one vector of those of all tokens.
    """

    def __init__(self, reduce=lambda: keras.layers.GlobalAveragePooling1D()):
        self._reduce = reduce

    def build(self):
        inputs = keras.Input((TOKENS,), dtype="int32")
        x = keras.layers.Embedding(VOCABULARY, 6, mask_zero=True)(inputs)
        return inputs, keras.layers.Dense(8, "tanh")(self._reduce()(x))

    def draw(self, rng, rows):
        tokens = rng.integers(1, VOCABULARY, (rows, TOKENS)).astype("int32")
        lengths = rng.integers(1, TOKENS + 1, rows)
        return np.where(np.arange(TOKENS) < lengths[:, None], tokens, 0)


class Pairs(Input):
    """A dictionary of numbers and tokens."""

    _numbers, _tokens = Input(), Tokens()

    def build(self):
        numbers, x = self._numbers.build()
        tokens, y = self._tokens.build()
        return {"numbers": numbers, "tokens": tokens}, keras.layers.Add()([x, y])

    def draw(self, rng, rows):
        return {"numbers": self._numbers.draw(rng, rows), "tokens": self._tokens.draw(rng, rows)}


def _attend(x):
    x = keras.layers.MultiHeadAttention(2, 3)(x, x)
    return keras.layers.GlobalMaxPooling1D()(x)


INPUTS: dict[str, Callable[[], Input]] = {
    "numbers": Input,
    "images": Images,
    "augmented images": AugmentedImages,
    "series": Series,
    "tokens": Tokens,
    "LSTM": lambda: Tokens(lambda: keras.layers.LSTM(5)),
    "GRU": lambda: Tokens(lambda: keras.layers.Bidirectional(keras.layers.GRU(4))),
    "attention": lambda: Tokens(lambda: _attend),
    "two": Pairs,
}
