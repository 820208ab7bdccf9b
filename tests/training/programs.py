"""Programs that a stranger would write: each compiles a model and says what to train it on."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.zoo import seeded

RNG = np.random.default_rng(0)
X = RNG.normal(size=(32, 6)).astype("f4")
Y = RNG.normal(size=(32, 2)).astype("f4")
KINDS = np.eye(2, dtype="f4")[RNG.integers(0, 2, 32)]
WEIGHTS = np.linspace(0.0, 3.0, 32).astype("f4")
TOKENS = RNG.integers(1, 20, (32, 8)).astype("int32")
for row in range(32):
    TOKENS[row, 2 + row % 5 :] = 0
SGD = lambda: keras.optimizers.SGD(0.1)  # noqa: E731


@dataclass(frozen=True)
class Program:
    """A program.

    Attributes:
      build: returns a compiled model, the same every time.
      data: arrays of 32 rows: x, or x and y, or with weights.
    """

    build: Callable[[], keras.Model]
    data: tuple[Any, ...] = (X, Y)

    def make_dataset(self, batch: int = 8) -> tf.data.Dataset:
        """Returns its global batches."""
        data = self.data if len(self.data) > 1 else self.data[0]
        return tf.data.Dataset.from_tensor_slices(data).batch(batch)


def dense(optimizer=None, loss="mse", cls=keras.Model, last=None, between=None, **compiled):
    """Returns a network of two layers."""
    inputs = keras.Input((6,))
    hidden = keras.layers.Dense(4, "tanh", kernel_initializer=seeded(1), name="a")(inputs)
    hidden = between(hidden) if between else hidden
    outputs = keras.layers.Dense(2, last, kernel_initializer=seeded(2), name="b")(hidden)
    model = cls(inputs, outputs)
    model.compile(optimizer or SGD(), loss, **compiled)
    return model


class OwnSteps(keras.Model):
    def train_step(self, data):
        x, _ = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x, training=True) + 1.0))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"distance": loss}

    def test_step(self, data):
        return {"distance": tf.reduce_mean(tf.abs(self(data[0])))}


class PlainLoss(keras.Model):
    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        return keras.ops.mean((y_pred - y) ** 2)


class MoreLoss(keras.Model):
    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        loss = super().compute_loss(x, y, y_pred, sample_weight, training=training)
        return loss + 0.5 * keras.ops.mean(y_pred**2)


class MoreMetrics(keras.Model):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.extra = keras.metrics.Mean(name="extra")

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        logs = super().compute_metrics(x, y, y_pred, sample_weight)
        self.extra.update_state(tf.abs(y_pred - y))
        return logs | {"extra": self.extra.result()}


class NoTraining(keras.Model):
    def __init__(self):
        super().__init__()
        self.out = keras.layers.Dense(2, kernel_initializer=seeded(1))

    def call(self, x):
        return self.out(x)


class Largest(keras.metrics.Metric):
    def __init__(self):
        super().__init__(name="largest")
        self.value = self.add_variable((), "zeros", name="value")

    def update_state(self, y_true, y_pred, sample_weight=None):
        error = keras.ops.max(keras.ops.abs(y_true - y_pred))
        self.value.assign(keras.ops.maximum(self.value, error))

    def result(self):
        return self.value * 1.0  # Keras's history would hold the variable itself


class MeanLoss(keras.losses.Loss):
    def __call__(self, y_true, y_pred, sample_weight=None):
        return keras.ops.mean((y_pred - y_true) ** 2)


class Adds(keras.layers.Layer):
    def __init__(self, add, **kwargs):
        super().__init__(**kwargs)
        self.add = add

    def call(self, x):
        self.add_loss(self.add(x))
        return x


class Noise(keras.layers.Layer):
    def call(self, x, training=None):
        return x + 0.5 * keras.random.normal(keras.ops.shape(x)) if training else x


class Gan(keras.Model):
    def __init__(self):
        super().__init__()
        self.judge = keras.Sequential(
            [keras.Input((6,)), keras.layers.Dense(1, kernel_initializer=seeded(2))]
        )
        self.maker = keras.Sequential(
            [keras.Input((4,)), keras.layers.Dense(6, kernel_initializer=seeded(3))]
        )
        self.seeds = keras.random.SeedGenerator(3)
        self.judged = keras.metrics.Mean(name="judged")

    @property
    def metrics(self):
        return [self.judged]

    def compile(self, of_judge, of_maker):
        super().compile()
        self.of_judge, self.of_maker = of_judge, of_maker
        self.loss_of = keras.losses.BinaryCrossentropy(from_logits=True)

    def train_step(self, real):
        rows = tf.shape(real)[0]
        made = self.maker(keras.random.normal((rows, 4), seed=self.seeds))
        labels = tf.concat([tf.ones((rows, 1)), tf.zeros((rows, 1))], 0)
        with tf.GradientTape() as tape:
            judged = self.loss_of(labels, self.judge(tf.concat([made, real], 0)))
        self._apply(self.of_judge, self.judge, tape, judged)
        with tf.GradientTape() as tape:
            made = self.maker(keras.random.normal((rows, 4), seed=self.seeds))
            fooled = self.loss_of(tf.zeros((rows, 1)), self.judge(made))
        self._apply(self.of_maker, self.maker, tape, fooled)
        self.judged.update_state(judged)
        return {"judged": self.judged.result()}

    def _apply(self, optimizer, model, tape, loss):
        weights = model.trainable_weights
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))


def _build_gan():
    model = Gan()
    model.compile(keras.optimizers.Adam(0.01), SGD())
    return model


def _build_masked():
    tokens = keras.Input((8,), dtype="int32")
    x = keras.layers.Embedding(20, 8, mask_zero=True, embeddings_initializer=seeded(1))(tokens)
    x = keras.layers.LSTM(
        6,
        return_sequences=True,
        kernel_initializer=seeded(2),
        recurrent_initializer=seeded(3),
    )(x)
    model = keras.Model(tokens, keras.layers.Dense(5, kernel_initializer=seeded(4))(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(SGD(), loss, metrics=["accuracy"])
    return model


def _build_subclassed():
    model = NoTraining()
    model.compile(SGD(), "mse")
    return model


def _multiple():
    mapping = keras.optimizers.OptimizerMap(SGD(), {"a/.*": keras.optimizers.Adam(0.01)})
    return dense(keras.optimizers.MultiOptimizer(mapping))


def _average(**options):
    return dense(keras.optimizers.SGD(0.2, use_ema=True, ema_momentum=0.5, **options))


def _normalized():
    return dense(between=keras.layers.BatchNormalization())


PROGRAMS = {
    "masks": Program(_build_masked, (TOKENS, (TOKENS * 7 % 5).astype("int32"))),
    "own steps": Program(lambda: dense(cls=OwnSteps)),
    "a plain compute_loss": Program(lambda: dense(cls=PlainLoss)),
    "one more loss": Program(lambda: dense(cls=MoreLoss)),
    "one more metric": Program(lambda: dense(cls=MoreMetrics)),
    "no training argument": Program(_build_subclassed),
    "no training argument around an augmentation": Program(lambda: _build_augmenting()),
    "positions": Program(lambda: _build_positions(), (TOKENS, Y)),
    "two optimizers": Program(_build_gan, (X,)),
    "a maximum": Program(lambda: dense(metrics=[Largest()])),
    "a vector": Program(
        lambda: dense(
            last="softmax", loss="categorical_crossentropy", metrics=[keras.metrics.F1Score()]
        ),
        (X, KINDS),
    ),
    "a confident sigmoid": Program(
        lambda: dense(last="sigmoid", loss="binary_crossentropy"), (X * 50, KINDS)
    ),
    "a loss of one number": Program(lambda: dense(loss=MeanLoss())),
    "a sum": Program(lambda: dense(loss=keras.losses.MeanSquaredError(reduction="sum"))),
    "a weighted mean": Program(
        lambda: dense(loss=keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")),
        (X, Y, WEIGHTS),
    ),
    "an added mean": Program(lambda: dense(between=Adds(lambda x: 0.1 * keras.ops.mean(x**2)))),
    "an added value an example": Program(
        lambda: dense(between=Adds(lambda x: 0.1 * keras.ops.sum(x**2, -1)))
    ),
    "an added loss object": Program(
        lambda: dense(between=Adds(lambda x: keras.losses.MeanSquaredError()(x * 0, x)))
    ),
    "several optimizers in one": Program(_multiple),
    "an average of the weights": Program(_average),
    "an average that overwrites": Program(lambda: _average(ema_overwrite_frequency=3)),
    "a loss scale": Program(lambda: dense(keras.optimizers.SGD(0.1, loss_scale_factor=128.0))),
    "batch normalization": Program(_normalized),
    "a constraint": Program(
        lambda: dense(
            between=keras.layers.Dense(
                4, kernel_initializer=seeded(3), kernel_constraint=keras.constraints.MaxNorm(0.3)
            )
        )
    ),
    "Keras's own random numbers": Program(lambda: dense(between=Noise())),
}


class Centered(keras.layers.Layer):
    def call(self, x):
        return x - keras.ops.mean(x, axis=0, keepdims=True)


class Counts(keras.layers.Layer):
    def build(self, shape):
        self.seen = self.add_weight(shape=(), initializer="zeros", trainable=False, name="seen")

    def call(self, x, training=None):
        if training:
            self.seen.assign_add(keras.ops.cast(keras.ops.shape(x)[0], "float32"))
        return x


class Remembers(keras.layers.Layer):
    def build(self, shape):
        self.last = self.add_weight(shape=(1, 4), initializer="zeros", trainable=False)

    def call(self, x, training=None):
        if training:
            self.last.assign(x[:1])
        return x


class Contrast(keras.losses.Loss):
    def call(self, y_true, y_pred):
        scores = keras.ops.matmul(y_pred, keras.ops.transpose(y_pred))
        own = keras.ops.arange(keras.ops.shape(scores)[0])
        return keras.losses.sparse_categorical_crossentropy(own, scores, from_logits=True)


class Pairs(keras.Model):
    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        return keras.ops.mean(keras.ops.abs(y_pred[:, None] - y_pred[None, :] - y[:, None]))


class SumOfRows(keras.Model):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((self(x, training=True) - y) ** 2)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


class Positions(keras.Model):
    """Adds a learned row of a table to each place, which no example chooses."""

    def __init__(self):
        super().__init__()
        self.tokens = keras.layers.Embedding(20, 4, embeddings_initializer=seeded(1))
        self.positions = keras.layers.Embedding(8, 4, embeddings_initializer=seeded(2))
        self.flatten = keras.layers.Flatten()
        self.last = keras.layers.Dense(2, kernel_initializer=seeded(3))

    def call(self, x):
        places = keras.ops.arange(8)
        return self.last(self.flatten(self.tokens(x) + self.positions(places)))


def _build_positions():
    model = Positions()
    model.compile(keras.optimizers.Adam(0.01), "mse")
    return model


class Augments(keras.Model):
    """Draws unless it is told not to, and is built when it is first called."""

    def __init__(self):
        super().__init__()
        self.noise = keras.Sequential([keras.layers.RandomFlip("horizontal", seed=3)])

    def build(self, shape):
        self.last = keras.layers.Dense(2, kernel_initializer=seeded(2))

    def call(self, x):
        images = keras.ops.reshape(x, (-1, 2, 3, 1))
        return self.last(keras.ops.reshape(self.noise(images), (-1, 6)))


def _build_augmenting():
    model = Augments()
    model.compile(SGD(), "mse")
    return model


def _mean_of_weighted(y_true, y_pred):
    return keras.ops.mean((y_true - y_pred) ** 2)


INDIVISIBLE = {
    "Dice": Program(lambda: dense(last="sigmoid", loss=keras.losses.Dice()), (X, KINDS)),
    "Tversky": Program(lambda: dense(last="sigmoid", loss=keras.losses.Tversky()), (X, KINDS)),
    "a scalar with weights": Program(lambda: dense(loss=_mean_of_weighted), (X, Y, WEIGHTS)),
    "an added sum": Program(lambda: dense(between=Adds(lambda x: 0.1 * keras.ops.sum(x**2)))),
    "a centered batch": Program(lambda: dense(between=Centered())),
    "a count": Program(lambda: dense(between=Counts())),
    "a memory": Program(lambda: dense(between=Remembers())),
    "a contrast": Program(lambda: dense(loss=Contrast())),
    "pairs": Program(lambda: dense(cls=Pairs)),
    "a sum of rows": Program(lambda: dense(cls=SumOfRows)),
}
