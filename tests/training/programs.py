"""Programs that a stranger would write: each compiles a model and says what to train it on."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from models.layers import FusedBatchNormalization
from tests.zoo import seeded
from tfdist.tasks.segmentation.losses import make_loss
from tfdist.tasks.segmentation.metrics import SegmentationMetrics

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


class DrawsAlways(keras.layers.Layer):
    """Monte-Carlo dropout; it counts its calls if it is asked to."""

    def __init__(self, *, counts=False):
        super().__init__()
        self.dropout, self.counts = keras.layers.Dropout(0.5, seed=3), counts

    def build(self, shape):
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False, name="calls")

    def call(self, x):
        if self.counts:
            self.calls.assign_add(1.0)
        return self.dropout(x, training=True)


class Smooth(keras.Model):
    """Adds the squared gradient of its outputs by its inputs to the loss."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = super().compute_loss(x, y, y_pred, sample_weight)
        with tf.GradientTape() as tape:
            tape.watch(x)
            total = tf.reduce_mean(self(x, training=True))
        return loss + tf.reduce_mean(tf.square(tape.gradient(total, x)))


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

    def predict_step(self, data):
        return 7.0 - self(data)


class LossSteps(OwnSteps):
    """Keras reports its tracker of the loss for these, which they never update: 0."""

    def train_step(self, data):
        return {"loss": super().train_step(data)["distance"]}

    def test_step(self, data):
        return {"loss": super().test_step(data)["distance"]}


class PlainLoss(keras.Model):
    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        return keras.ops.mean((y_pred - y) ** 2)


class MoreLoss(keras.Model):
    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        loss = super().compute_loss(x, y, y_pred, sample_weight, training=training)
        return loss + 0.5 * keras.ops.mean(y_pred**2)


class MeasuringLoss(keras.Model):
    """Updates a metric of its own in `compute_loss`."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.distance = keras.metrics.Mean(name="distance")

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        self.distance.update_state(keras.ops.abs(y_pred - y))
        return super().compute_loss(x, y, y_pred, sample_weight, training=training)


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


class StepsWithVariables(OwnSteps):
    """Changes variables of TensorFlow and the learning rate in its step."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.num_steps = tf.Variable(0, trainable=False)
        self.distance = tf.Variable(0.0, trainable=False)

    def train_step(self, data):
        logs = super().train_step(data)
        self.num_steps.assign_add(1)
        self.distance.assign_add(0.1 * logs["distance"])
        rate = self.optimizer.learning_rate
        rate.assign(rate * 0.9)
        return logs | {"rate": tf.convert_to_tensor(rate), "sum": tf.identity(self.distance)}


class MovingMean(keras.layers.Layer):
    """Keeps a moving mean of what it sees, as a linear function of the examples."""

    def build(self, shape):
        self.mean = self.add_weight(shape=(shape[-1],), initializer="zeros", trainable=False)

    def call(self, x, training=None):
        if training:
            self.mean.assign(0.9 * self.mean + 0.1 * keras.ops.mean(x, axis=0))
        return x


class Largest(keras.metrics.Metric):
    def __init__(self):
        super().__init__(name="largest")
        self.value = self.add_variable((), "zeros", name="value")

    def update_state(self, y_true, y_pred, sample_weight=None):
        error = keras.ops.max(keras.ops.abs(y_true - y_pred))
        self.value.assign(keras.ops.maximum(self.value, error))

    def result(self):
        return self.value * 1.0  # Keras's history would hold the variable itself


class Smallest(keras.metrics.Metric):
    def __init__(self):
        super().__init__(name="smallest")
        self.value = self.add_variable((), keras.initializers.Constant(1e9), name="value")

    def update_state(self, y_true, y_pred, sample_weight=None):
        error = keras.ops.min(keras.ops.abs(y_true - y_pred))
        self.value.assign(keras.ops.minimum(self.value, error))

    def result(self):
        return self.value * 1.0

    def reset_state(self):
        self.value.assign(1e9)


class Bare(Largest):
    """Its result is its variable."""

    def result(self):
        return self.value


class MeanLoss(keras.losses.Loss):
    def __call__(self, y_true, y_pred, sample_weight=None):
        return keras.ops.mean((y_pred - y_true) ** 2)


class AssigningLoss(keras.losses.Loss):
    """Waits for the other replicas in its middle."""

    def __init__(self):
        super().__init__()
        self.scale = keras.Variable(1.0, trainable=False)

    def call(self, y_true, y_pred):
        self.scale.assign(1.0)
        return keras.ops.mean((y_true - y_pred) ** 2, -1)


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


class Draws(keras.layers.Layer):
    """Draws with TensorFlow."""

    def call(self, x):
        return x + tf.random.normal(tf.shape(x))


class Held:
    """Holds a generator, and is no layer."""

    def __init__(self):
        self.generator = keras.random.SeedGenerator(3)


class HeldNoise(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.held = Held()

    def call(self, x, training=None):
        if not training:
            return x
        return x + 0.5 * keras.random.normal(keras.ops.shape(x), seed=self.held.generator)


class KeepsTensors(keras.layers.Layer):
    """Keeps what its inner layers return, some of which normalize over the batch."""

    def __init__(self):
        super().__init__()
        self.inner = [keras.layers.Dense(4, kernel_initializer=seeded(n)) for n in range(2)]
        self.norms = [keras.layers.BatchNormalization(momentum=0.7) for _ in range(2)]
        self.first = None

    def call(self, x):
        self.skipped = []
        self.first = x
        for dense, norm in zip(self.inner, self.norms, strict=True):
            x = norm(dense(x))
            self.skipped.append(x)
            self.last = x + self.first
        return keras.layers.add(self.skipped) + self.last


class Measures(keras.layers.Layer):
    """Keeps a metric of its own."""

    def build(self, shape):
        self.size = keras.metrics.Mean(name="size")

    def call(self, x):
        self.size.update_state(keras.ops.abs(x))
        return x


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


class Vae(keras.Model):
    """Encodes and decodes by way of a draw."""

    def __init__(self):
        super().__init__()
        self.encoder = keras.layers.Dense(4, kernel_initializer=seeded(1))
        self.decoder = keras.layers.Dense(6, kernel_initializer=seeded(2))
        self.seeds = keras.random.SeedGenerator(3)
        self.total = keras.metrics.Mean(name="total")
        self.divergence = keras.metrics.Mean(name="divergence")

    @property
    def metrics(self):
        return [self.total, self.divergence]

    def call(self, x):
        return self._pass(x)[0]

    def train_step(self, data):
        with tf.GradientTape() as tape:
            made, mean, log_var = self._pass(data)
            errors = keras.ops.sum(keras.losses.mean_squared_error(data, made)[:, None], 1)
            divergence = -0.5 * (1 + log_var - mean**2 - keras.ops.exp(log_var))
            divergence = keras.ops.mean(keras.ops.sum(divergence, axis=1))
            loss = keras.ops.mean(errors) + 0.1 * divergence
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
        self.total.update_state(loss)
        self.divergence.update_state(divergence)
        return {metric.name: metric.result() for metric in self.metrics}

    def _pass(self, x):
        mean, log_var = keras.ops.split(self.encoder(x), 2, axis=-1)
        noise = keras.random.normal(keras.ops.shape(mean), seed=self.seeds)
        return self.decoder(mean + keras.ops.exp(0.5 * log_var) * noise), mean, log_var


def _build_vae():
    model = Vae()
    model.compile(keras.optimizers.Adam(0.01))
    return model


class Distiller(keras.Model):
    """Trains a student by a frozen teacher; its own `compile` takes two losses."""

    def __init__(self):
        super().__init__()
        self.teacher = keras.Sequential(
            [keras.Input((6,)), keras.layers.Dense(2, kernel_initializer=seeded(1))]
        )
        self.teacher.trainable = False
        self.student = keras.Sequential(
            [keras.Input((6,)), keras.layers.Dense(2, kernel_initializer=seeded(2))]
        )

    def compile(self, optimizer, metrics, of_labels, of_teacher):
        super().compile(optimizer=optimizer, metrics=metrics)
        self.of_labels, self.of_teacher = of_labels, of_teacher

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        taught = keras.ops.softmax(self.teacher(x, training=False) / 3.0)
        of_teacher = self.of_teacher(taught, keras.ops.softmax(y_pred / 3.0)) * 9.0
        return 0.1 * self.of_labels(y, y_pred) + 0.9 * of_teacher

    def call(self, x):
        return self.student(x)


def _build_distiller():
    model = Distiller()
    loss = keras.losses.CategoricalCrossentropy(from_logits=True)
    model.compile(SGD(), ["accuracy"], loss, keras.losses.KLDivergence())
    return model


class Adversarial(keras.Model):
    """Trains on examples moved along the gradient of their own loss, which it penalizes."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as of_weights:
            with tf.GradientTape() as of_inputs:
                of_inputs.watch(x)
                plain = self.compute_loss(x, y, self(x, training=True))
            slopes = of_inputs.gradient(plain, x) * tf.cast(tf.shape(x)[0], x.dtype)
            moved = x + 0.1 * tf.sign(slopes)
            loss = plain + self.compute_loss(moved, y, self(moved, training=True))
            loss += 0.01 * tf.reduce_mean(tf.reduce_sum(slopes**2, 1))
        gradients = of_weights.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        self._loss_tracker.update_state(loss, sample_weight=tf.shape(x)[0])
        return self.compute_metrics(x, y, self(x, training=False))


class Accumulating(keras.Model):
    """Updates the weights by the gradients of two batches, summed in variables of TensorFlow."""

    def __init__(self):
        super().__init__()
        self.out = keras.layers.Dense(2, kernel_initializer=seeded(1))
        self.num_steps = tf.Variable(0, trainable=False)

    def build(self, shape):
        self.out.build(shape)
        zeros = [tf.zeros(weight.shape) for weight in self.out.trainable_variables]
        self.sums = [tf.Variable(value, trainable=False) for value in zeros]

    def call(self, x):
        return self.out(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        weights = self.trainable_variables
        for total, gradient in zip(self.sums, tape.gradient(loss, weights), strict=True):
            total.assign_add(gradient)
        self.num_steps.assign_add(1)
        is_due = tf.cast(self.num_steps % 2 == 0, "float32")
        gradients = [total * is_due / 2 for total in self.sums]
        self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
        for total in self.sums:
            total.assign(total * (1 - is_due))
        return {"loss": loss}


def _build_accumulating():
    model = Accumulating()
    model.compile(SGD(), "mse")
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
    if not hasattr(keras.optimizers, "MultiOptimizer"):
        pytest.skip(f"Keras {keras.__version__} has no MultiOptimizer")
    mapping = keras.optimizers.OptimizerMap(SGD(), {"a/.*": keras.optimizers.Adam(0.01)})
    return dense(keras.optimizers.MultiOptimizer(mapping))


def _average(**options):
    return dense(keras.optimizers.SGD(0.2, use_ema=True, ema_momentum=0.5, **options))


def _normalized():
    return dense(between=keras.layers.BatchNormalization())


def _build_spectral():
    layer = keras.layers.SpectralNormalization(
        keras.layers.Dense(4, "tanh", kernel_initializer=seeded(3)), name="spectral"
    )
    model = dense(between=layer)
    layer.vector_u.assign(np.full((1, 4), 0.1, "f4"))
    return model


def _normalize_and_regularize(x, normalization):
    """Lets a replica wait for the others between two penalties."""
    penalty = {"activity_regularizer": keras.regularizers.L2(0.3)}
    x = keras.layers.Dense(4, kernel_initializer=seeded(3), **penalty)(x)
    x = normalization(x)
    return keras.layers.Dense(4, kernel_initializer=seeded(4), **penalty)(x)


def _draw_around_normalization(x):
    """Lets a replica wait for the others between two draws."""
    x = keras.layers.Dropout(0.3, seed=1)(keras.layers.Reshape((2, 2))(x))
    x = FusedBatchNormalization(synchronized=True)(keras.layers.GaussianNoise(0.2, seed=2)(x))
    attention = keras.layers.MultiHeadAttention(
        2, 2, dropout=0.2, seed=3, kernel_initializer=seeded(5)
    )
    x = keras.layers.LSTM(
        4,
        return_sequences=True,
        dropout=0.2,
        recurrent_dropout=0.2,
        seed=4,
        kernel_initializer=seeded(6),
        recurrent_initializer=seeded(7),
    )(attention(x, x))
    return keras.layers.Flatten()(x)


def _build_embedding(optimizer):
    tokens = keras.Input((8,), dtype="int32")
    table = keras.layers.Embedding(20, 4, embeddings_initializer=seeded(3))
    last = keras.layers.Dense(2, kernel_initializer=seeded(1))
    model = keras.Model(tokens, last(keras.layers.Flatten()(table(tokens))))
    model.compile(optimizer, "mse")
    return model


def build_cropping():
    """What it computes in training has another size than what it computes without data."""
    model = keras.Sequential(
        [
            keras.Input((6, 6, 1)),
            keras.layers.RandomCrop(4, 4, seed=1),
            keras.layers.Flatten(),
            keras.layers.Dense(2, kernel_initializer=seeded(2)),
        ]
    )
    model.compile(SGD(), "mse")
    return model


def _build_heads(loss):
    inputs = keras.Input((6,))
    first, second = (
        keras.layers.Dense(2, kernel_initializer=seeded(number), name=name)
        for number, name in enumerate("pq")
    )
    second.trainable = False
    model = keras.Model(inputs, {"p": first(inputs), "q": second(inputs)})
    model.compile(SGD(), loss, metrics={"p": ["mae"]})
    return model


def _connect_heads():
    inputs = keras.Input((6,))
    hidden = keras.layers.Dense(4, "tanh", kernel_initializer=seeded(1), name="a")(inputs)
    heads = {
        name: keras.layers.Dense(2, kernel_initializer=seeded(number), name=name)(hidden)
        for number, name in enumerate("pq")
    }
    return keras.Model(inputs, heads)


def _build_unused_head():
    model = _connect_heads()
    model.compile(keras.optimizers.AdamW(0.01, weight_decay=0.1), {"p": "mse"})
    return model


class Wraps(keras.Model):
    """Calls a functional model, as many that are no such model do."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def call(self, x, training=None):
        return self.inner(x, training=training)


def _build_wrapping(optimizer):
    model = Wraps(_connect_heads())
    model.compile(optimizer, {"p": "mse", "q": "mae"})
    return model


def _build_text():
    inputs = keras.Input((), dtype="string")
    tokens = keras.layers.TextVectorization(
        max_tokens=10, output_sequence_length=4, vocabulary=["a", "b", "c", "d"]
    )(inputs)
    x = keras.layers.Embedding(10, 4, embeddings_initializer=seeded(2))(tokens)
    x = keras.layers.GlobalAveragePooling1D()(x)
    model = keras.Model(inputs, keras.layers.Dense(2, kernel_initializer=seeded(1))(x))
    model.compile(SGD(), "mse")
    return model


def build_segmenting(name="cross_entropy_dice"):
    inputs = keras.Input((6, 6, 1))
    outputs = keras.layers.Conv2D(3, 3, padding="same", kernel_initializer=seeded(1))(inputs)
    model = keras.Model(inputs, outputs)
    loss = make_loss(name, ignore_label=255, class_weights=[1, 2, 3])
    metrics = [SegmentationMetrics(3, ignore_label=255)]
    model.compile(keras.optimizers.Adam(0.01), loss, metrics=metrics)
    return model


def _average_of_weighted(weights):
    """Its first batches count nothing."""
    loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    return Program(lambda: dense(loss=loss), (X, Y, weights))


PIXELS = RNG.uniform(size=(32, 6, 6, 1)).astype("f4")
LABELS = RNG.integers(0, 3, (32, 6, 6)).astype("int32")
LABELS[:16] = 255
TEXTS = np.array(["a b", "b c d", "a", "d d d"] * 8, dtype=object)
LATE_WEIGHTS = np.repeat(np.array([0, 1], "f4"), 16)

PROGRAMS = {
    "masks": Program(_build_masked, (TOKENS, (TOKENS * 7 % 5).astype("int32"))),
    "own steps": Program(lambda: dense(cls=OwnSteps)),
    "own steps of a loss": Program(lambda: dense(cls=LossSteps)),
    "a mean over replicas": Program(lambda: dense(cls=MeanOverReplicas)),
    "the tutorial's average": Program(lambda: dense(cls=TutorialSteps)),
    "the tutorial's average of a known size": Program(
        lambda: dense(cls=functools.partial(TutorialSteps, batch_size=8))
    ),
    "an added sum": Program(lambda: dense(between=Adds(lambda x: 0.1 * keras.ops.sum(x**2)))),
    "one loss an example": Program(lambda: dense(loss=keras.losses.Huber(reduction="none"))),
    "a sum of rows": Program(lambda: dense(cls=SumOfRows)),
    "a sum by a known size": Program(
        lambda: dense(cls=SumByConstant, metrics=[SumOfErrors()]), (X[:29], Y[:29])
    ),
    "a plain compute_loss": Program(lambda: dense(cls=PlainLoss)),
    "a step that changes variables": Program(lambda: dense(cls=StepsWithVariables)),
    "a moving mean": Program(lambda: dense(between=MovingMean())),
    "one more loss": Program(lambda: dense(cls=MoreLoss)),
    "a metric in compute_loss": Program(lambda: dense(cls=MeasuringLoss)),
    "one more metric": Program(lambda: dense(cls=MoreMetrics)),
    "no training argument": Program(_build_subclassed),
    "no training argument around an augmentation": Program(lambda: _build_augmenting()),
    "positions": Program(lambda: _build_positions(), (TOKENS, Y)),
    "two optimizers": Program(_build_gan, (X,)),
    "an autoencoder that draws": Program(_build_vae, (X,)),
    "gradients of two batches": Program(_build_accumulating),
    "a teacher": Program(_build_distiller, (X, KINDS)),
    "a step within a step": Program(lambda: dense(cls=Adversarial, metrics=["mae"])),
    "a maximum": Program(lambda: dense(metrics=[Largest()])),
    "a minimum": Program(lambda: dense(metrics=[Smallest()])),
    "tensors in attributes": Program(lambda: dense(between=lambda x: KeepsTensors()(x))),
    "a metric in a layer": Program(lambda: dense(between=Measures())),
    "a vector": Program(
        lambda: dense(
            last="softmax",
            loss="categorical_crossentropy",
            metrics=[
                keras.metrics.F1Score(),
                keras.metrics.Precision(thresholds=[0.3, 0.7], name="precision"),
            ],
        ),
        (X, KINDS),
    ),
    "a confident sigmoid": Program(
        lambda: dense(last="sigmoid", loss="binary_crossentropy"), (X * 50, KINDS)
    ),
    "a loss of one number": Program(lambda: dense(loss=MeanLoss())),
    "a function of one number": Program(lambda: dense(loss=_mean_of_weighted)),
    "a loss that assigns": Program(lambda: dense(loss=AssigningLoss())),
    "one loss of two outputs": Program(lambda: _build_heads({"p": "mse"}), (X, {"p": Y, "q": Y})),
    "one loss for both outputs": Program(lambda: _build_heads("mse"), (X, {"p": Y, "q": Y})),
    "a head without a gradient": Program(_build_unused_head, (X, {"p": Y})),
    "an optimizer that starts from a number": Program(
        lambda: _build_wrapping(keras.optimizers.Nadam(0.01)), (X, {"p": Y, "q": Y})
    ),
    "an optimizer that keeps rows and columns": Program(
        lambda: _build_wrapping(keras.optimizers.Adafactor(0.01)), (X, {"p": Y, "q": Y})
    ),
    "no loss of the second output": Program(
        lambda: _build_heads({"p": "mse", "q": None}), (X, {"p": Y, "q": Y})
    ),
    "a sum": Program(lambda: dense(loss=keras.losses.MeanSquaredError(reduction="sum"))),
    "a weighted mean": Program(
        lambda: dense(loss=keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")),
        (X, Y, WEIGHTS),
    ),
    "batches that count nothing": _average_of_weighted(LATE_WEIGHTS),
    "images that count nothing": Program(build_segmenting, (PIXELS, LABELS)),
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
    "synchronized batch normalization": Program(
        lambda: dense(between=keras.layers.BatchNormalization(synchronized=True))
    ),
    "penalties beside a normalization": Program(
        lambda: dense(
            between=lambda x: _normalize_and_regularize(
                x, FusedBatchNormalization(synchronized=True)
            )
        )
    ),
    "penalties beside Keras's normalization": Program(
        lambda: dense(
            between=lambda x: _normalize_and_regularize(x, keras.layers.BatchNormalization())
        )
    ),
    "draws beside a normalization": Program(lambda: dense(between=_draw_around_normalization)),
    "a spectral norm": Program(_build_spectral),
    "a table under Adam": Program(
        lambda: _build_embedding(keras.optimizers.Adam(0.01)), (TOKENS, Y)
    ),
    "a clipped table": Program(
        lambda: _build_embedding(keras.optimizers.SGD(0.1, clipnorm=0.1)), (TOKENS, Y)
    ),
    "a table and a loss scale": Program(
        lambda: _build_embedding(keras.optimizers.LossScaleOptimizer(SGD(), initial_scale=8)),
        (TOKENS, Y),
    ),
    "texts": Program(_build_text, (TEXTS, Y)),
    "a constraint": Program(
        lambda: dense(
            between=keras.layers.Dense(
                4, kernel_initializer=seeded(3), kernel_constraint=keras.constraints.MaxNorm(0.3)
            )
        )
    ),
    "Keras's own random numbers": Program(lambda: dense(between=Noise())),
    "a generator outside of layers": Program(lambda: dense(between=HeldNoise())),
}


class Centered(keras.layers.Layer):
    def call(self, x):
        return x - keras.ops.mean(x, axis=0, keepdims=True)


class Counts(keras.layers.Layer):
    def __init__(self, kind="float32"):
        super().__init__()
        self.kind = kind

    def build(self, shape):
        self.seen = self.add_weight(
            shape=(), initializer="zeros", trainable=False, name="seen", dtype=self.kind
        )

    def call(self, x, training=None):
        if training:
            self.seen.assign_add(keras.ops.cast(keras.ops.shape(x)[0], self.kind))
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


class SumByConstant(keras.Model):
    """Divides a sum by the size of a global batch, and penalizes a weight by a sum, too."""

    batch_size = 8

    def test_step(self, data):
        x, y = data
        y_pred = self(x)
        loss = self.compute_loss(x, y, y_pred)
        return {**self.compute_metrics(x, y, y_pred), "loss": loss}

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(x, y, y_pred, training=True)
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {**self.compute_metrics(x, y, y_pred), "loss": loss}

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        losses = keras.losses.MeanSquaredError(reduction="none")(y, y_pred)
        kernel = self.trainable_weights[0]
        return tf.reduce_sum(losses) * (1.0 / self.batch_size) + 0.1 * tf.reduce_sum(kernel**2)


class SumsByTwoSizes(SumByConstant):
    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        losses = keras.losses.MeanSquaredError(reduction="none")(y, y_pred)
        own = tf.cast(tf.shape(losses)[0], losses.dtype)
        return tf.reduce_sum(losses) / self.batch_size + tf.reduce_sum(losses**2) / own


class SumOverTime(SumByConstant):
    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        losses = tf.transpose((y - y_pred)[..., 0] ** 2)  # [time, batch]
        return tf.reduce_sum(tf.reduce_sum(losses, 0)) / self.batch_size


def build_summing_over_time():
    inputs = keras.Input((None, 1))
    model = SumOverTime(inputs, keras.layers.Dense(1, kernel_initializer=seeded(1))(inputs))
    model.compile(SGD())
    return model


class SumOfErrors(keras.metrics.Metric):
    """Adds up on each replica by itself."""

    is_sum_over_rows = True

    def __init__(self):
        super().__init__(name="errors")
        self.total = self.add_variable((), "zeros", name="total")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(tf.reduce_sum((y_true - y_pred) ** 2))

    def result(self):
        return self.total + 0.0


class TutorialSteps(keras.Model):
    """Averages as TensorFlow's tutorial for training loops does, where replicas add up losses."""

    def __init__(self, *args, batch_size=None, **kwargs):
        super().__init__(*args, **kwargs)
        self.batch_size = batch_size

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            losses = keras.losses.MeanSquaredError(reduction="none")(y, self(x, training=True))
            loss = tf.nn.compute_average_loss(losses, global_batch_size=self.batch_size)
            loss += tf.nn.scale_regularization_loss(0.1 * tf.reduce_sum(self.trainable_weights[0]))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


class MeanOverReplicas(keras.Model):
    """Divides its losses by the number of replicas, for a strategy that adds them up."""

    def train_step(self, data):
        x, y = data
        strategy, context = tf.distribute.get_strategy(), tf.distribute.get_replica_context()
        with tf.GradientTape() as tape:
            losses = keras.losses.mean_squared_error(y, self(x, training=True))
            size = tf.shape(losses)[0] * context.num_replicas_in_sync
            loss = tf.reduce_sum(losses) / tf.cast(size, losses.dtype)
            loss += tf.nn.l2_loss(self.trainable_weights[0]) / strategy.num_replicas_in_sync
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


def _nest_mean(x):
    inputs = keras.Input((4,))
    return keras.Model(inputs, inputs - keras.ops.mean(inputs, axis=0))(x)


def _mean_of_present(y, outputs):
    present = keras.ops.cast(y > 0, "float32")
    return keras.ops.sum((y - outputs) ** 2 * present) / (keras.ops.sum(present) + 1)


def _normalize_and_drop(x):
    x = keras.layers.Dropout(0.3, seed=1)(keras.layers.BatchNormalization()(x))
    return keras.layers.Dense(4)(x)


def _build_two_outputs():
    inputs = keras.Input((6,))
    model = keras.Model(inputs, {name: keras.layers.Dense(2)(inputs) for name in ("one", "other")})
    model.compile(SGD(), {"one": "mse", "other": _mean_of_present})
    return model


INDIVISIBLE = {
    "a mean of some": Program(lambda: dense(loss=_mean_of_present, between=_normalize_and_drop)),
    "a mean of some of one output": Program(_build_two_outputs, (X, {"one": Y, "other": Y})),
    "a centered batch after others": Program(
        lambda: dense(between=lambda x: Centered()(_normalize_and_drop(x)))
    ),
    "Dice": Program(lambda: dense(last="sigmoid", loss=keras.losses.Dice()), (X, KINDS)),
    "Tversky": Program(lambda: dense(last="sigmoid", loss=keras.losses.Tversky()), (X, KINDS)),
    "dice by name": Program(lambda: dense(last="sigmoid", loss="dice"), (X, KINDS)),
    "a softmax of the batch": Program(lambda: dense(between=keras.layers.Softmax(axis=0))),
    "a nested mean": Program(lambda: dense(between=_nest_mean)),
    "a scalar with weights": Program(lambda: dense(loss=_mean_of_weighted), (X, Y, WEIGHTS)),
    "a centered batch": Program(lambda: dense(between=Centered())),
    "a count": Program(lambda: dense(between=Counts())),
    "a count of integers": Program(lambda: dense(between=Counts("int32"))),
    "a memory": Program(lambda: dense(between=Remembers())),
    "a contrast": Program(lambda: dense(loss=Contrast())),
    "an added maximum": Program(lambda: dense(between=Adds(lambda x: keras.ops.max(x)))),
    "pairs": Program(lambda: dense(cls=Pairs)),
    "sums by two sizes": Program(lambda: dense(cls=SumsByTwoSizes)),
}


def build_lazily():
    """Returns a model that is built when it is first called."""
    layers = [keras.layers.Dense(size, kernel_initializer=seeded(size)) for size in (4, 2)]
    model = keras.Sequential(layers)
    model.compile(SGD(), "mse")
    return model


def build_stateful():
    """Keeps a state for each of 8 rows from batch to batch."""
    layer = keras.layers.SimpleRNN(
        4, stateful=True, kernel_initializer=seeded(2), recurrent_initializer=seeded(3)
    )
    inputs = keras.Input(batch_shape=(8, 3, 2))
    model = keras.Model(inputs, keras.layers.Dense(2, kernel_initializer=seeded(1))(layer(inputs)))
    model.compile(SGD(), "mse")
    return model


_O = keras.optimizers
OPTIMIZERS: dict[str, Callable[[], keras.optimizers.Optimizer]] = {
    "SGD by value": lambda: _O.SGD(
        0.05, momentum=0.9, nesterov=True, weight_decay=0.01, clipvalue=0.05
    ),
    "SGD by norm": lambda: _O.SGD(0.05, clipnorm=0.05),
    "LossScaleOptimizer": lambda: _O.LossScaleOptimizer(
        _O.SGD(0.05), initial_scale=64, dynamic_growth_steps=2
    ),
    "RMSprop": lambda: _O.RMSprop(0.01, centered=True, momentum=0.5),
    "Adagrad": lambda: _O.Adagrad(0.05),
    "Adadelta": lambda: _O.Adadelta(1.0),
    "Adamax": lambda: _O.Adamax(0.01),
    "Nadam": lambda: _O.Nadam(0.01),
    "Ftrl": lambda: _O.Ftrl(0.05),
    "Lion": lambda: _O.Lion(0.01),
    "Lamb": lambda: _O.Lamb(0.01),
    "AdamW": lambda: _O.AdamW(0.01, weight_decay=0.1),
    "Adafactor": lambda: _O.Adafactor(0.01),
    "Muon": lambda: _O.Muon(0.01),
    "ScheduleFreeAdamW": lambda: _O.ScheduleFreeAdamW(0.01),
    "Adam by steps": lambda: _O.Adam(
        _O.schedules.PiecewiseConstantDecay([2], [0.05, 0.01]), amsgrad=True
    ),
}

_M, _L = keras.metrics, keras.losses
Make = Callable[[], list[Any]]
METRICS: dict[str, tuple[str, np.ndarray, Make, Make]] = {
    "binary": (
        "sigmoid",
        (Y[:30] > 0).astype("f4"),
        lambda: [
            _M.AUC(),
            _M.AUC(multi_label=True, num_labels=2, name="auc_of_labels"),
            _M.BinaryAccuracy(),
            _M.Precision(),
            _M.Recall(),
            _M.PrecisionAtRecall(0.5),
            _M.SensitivityAtSpecificity(0.5),
            _M.F1Score(average="macro", threshold=0.5),
            _M.BinaryIoU(),
            _M.Hinge(),
            _M.FalsePositives(),
            _M.BinaryCrossentropy(),
        ],
        lambda: [
            _L.BinaryCrossentropy(label_smoothing=0.1),
            _L.BinaryFocalCrossentropy(apply_class_balancing=True),
            _L.Hinge(),
            _L.SquaredHinge(),
            _L.CategoricalHinge(),
        ],
    ),
    "numbers": (
        "softplus",
        np.abs(Y[:30]),
        lambda: [
            _M.MeanSquaredError(),
            _M.RootMeanSquaredError(),
            _M.R2Score(),
            _M.CosineSimilarity(),
            _M.MeanAbsolutePercentageError(),
            _M.LogCoshError(),
            _M.KLDivergence(),
            _M.Poisson(),
            _M.PearsonCorrelation(),
            _M.ConcordanceCorrelation(),
        ],
        lambda: [
            _L.Huber(),
            _L.LogCosh(),
            _L.CosineSimilarity(),
            _L.Poisson(),
            _L.KLDivergence(),
            _L.MeanSquaredLogarithmicError(),
            _L.MeanAbsolutePercentageError(),
        ],
    ),
    "classes": (
        "softmax",
        KINDS[:30].argmax(-1).astype("int32"),
        lambda: [
            _M.SparseCategoricalAccuracy(),
            _M.SparseTopKCategoricalAccuracy(1),
            _M.SparseCategoricalCrossentropy(),
        ],
        lambda: [
            _L.SparseCategoricalCrossentropy(),
            _L.SparseCategoricalCrossentropy(ignore_class=1),
        ],
    ),
}


@functools.cache
def _make_metrics(kind):
    return METRICS[kind][2]()


def _copy_metrics(kind):
    """Returns a kind's metrics, of the same names every time."""
    return [type(metric).from_config(metric.get_config()) for metric in _make_metrics(kind)]


def build_measured(kind, *, is_weighted):
    """Returns a model with an output for each loss of a kind, and its metrics on the first."""
    activation, _, _, make_losses = METRICS[kind]
    losses = make_losses()
    names = [f"output_{number}" for number in range(len(losses))]
    options = {"metrics": {names[0]: _copy_metrics(kind)}}
    if is_weighted:
        options["weighted_metrics"] = {names[0]: _copy_metrics(kind)[:3]}
    inputs = keras.Input((6,))
    outputs = {
        name: keras.layers.Dense(2, activation, kernel_initializer=seeded(1), name=name)(inputs)
        for name in names
    }
    model = keras.Model(inputs, outputs)
    model.compile(SGD(), dict(zip(names, losses, strict=True)), **options)
    return model


class Masks(keras.layers.Layer):
    """Gives its input a mask: of all rows' places, or of some."""

    def __init__(self, masked, **kwargs):
        super().__init__(**kwargs)
        self.masked = masked

    def compute_mask(self, x, previous=None):
        counts = keras.ops.any(keras.ops.isfinite(x), -1)  # all of them
        if self.masked == "all":
            return keras.ops.logical_not(counts)
        return keras.ops.logical_and(counts, x[..., 0] > 0)

    def call(self, x):
        return x + 0.0


REDUCTIONS = ("sum_over_batch_size", "sum", "mean", "mean_with_sample_weight")
ROWS, PLACES = 7, 3


def make_reductions(masked, *shape, kind=None):
    """Returns a program with an output for each reduction and shape of the weights.

    Args:
      masked: which places have a mask; none if empty.
      *shape: of an example; the first dimension is that of the places.
      kind: of the weights: for each "place", "value" or "one" example; all by default.
    """
    shapes = {"place": (ROWS, *shape[:-1]), "value": (ROWS, *shape[:-1], 1)}
    if len(shape) == 2:
        shapes["one"] = (ROWS, 1)
    shapes = {kind: shapes[kind]} if kind else shapes
    rng = np.random.default_rng(1)
    x, y = (rng.normal(size=(ROWS, *shape)).astype("f4") for _ in range(2))
    pairs = {f"{r}_{s}": (r, shape) for r in REDUCTIONS for s, shape in shapes.items()}
    weights = {name: rng.uniform(size=shape).astype("f4") for name, (_, shape) in pairs.items()}

    def build():
        inputs = keras.Input(shape)
        hidden = keras.layers.Dense(shape[-1], kernel_initializer=seeded(1))(inputs)
        layers = {
            name: Masks(masked, name=name) if masked else keras.layers.Identity(name=name)
            for name in pairs
        }
        model = keras.Model(inputs, {name: layer(hidden) for name, layer in layers.items()})
        losses = {
            name: keras.losses.MeanSquaredError(reduction=reduction)
            for name, (reduction, _) in pairs.items()
        }
        model.compile(SGD(), losses)
        return model

    return Program(build, (x, dict.fromkeys(pairs, y), weights))
