"""The guard refuses what its first batch, or a program that has just begun, does not show."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests import zoo
from tests.training.programs import dense
from tfdist.errors import TfdistError, TrainingError

X = np.random.default_rng(0).normal(size=(192, 6)).astype("float32")
Y = np.random.default_rng(1).normal(size=(192, 2)).astype("float32")
FIT = {"batch_size": 8, "shuffle": False, "verbose": 0}


def _fit(build, y=Y, **options):
    trainer = zoo.make_trainer(build, strategy=zoo.STRATEGIES["mirrored-2"]())
    trainer.fit(X, y, **FIT | options)
    return trainer


def _mean_of_masked(y, outputs):
    """Computes the mean over the examples of a batch whose last label is 1."""
    errors = keras.ops.mean(keras.ops.square(y[:, :2] - outputs), axis=1)
    chosen = keras.ops.cast(keras.ops.cast(y[:, 2], "int32"), "float32")
    return keras.ops.sum(errors * chosen) / (keras.ops.sum(chosen) + 1e-6)


def _mask(*masked):
    """Returns labels of which only some examples count."""
    mask = np.zeros([len(Y), 1], "float32")
    for rows in masked:
        mask[rows] = 1
    return np.concatenate([Y, mask], 1)


@pytest.mark.parametrize("masked", [slice(0, 192, 3), 63])
def test_a_count_of_the_batch_is_refused_before_the_first_step(masked):
    """A class or mask in float32 is no number that rounding changes, and rare ones are compared."""
    with pytest.raises(TfdistError, match="the loss '_mean_of_masked' is not a mean") as error:
        _fit(lambda: dense(loss=_mean_of_masked), _mask(masked), batch_size=64)
    assert "before" not in str(error.value)


def test_a_later_batch_shows_what_the_first_ones_do_not():
    trained = []
    count = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: trained.append(1))
    labels = _mask(slice(0, 80), slice(80, 192, 2))
    with pytest.raises(
        TrainingError, match=r"is not a mean .*The batches before did not show it\."
    ):
        _fit(lambda: dense(loss=_mean_of_masked), labels, callbacks=[count])
    assert len(trained) == 15


class Later(keras.Model):
    """Adds a term to the loss, by a variable that is zero when training begins."""

    kind, of_batch = "factor", True

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.factor = self.add_weight(name="factor", initializer="zeros", trainable=False)
        self.num_steps = tf.Variable(0, trainable=False)
        self.is_warm = tf.Variable(False, trainable=False)
        self.table = tf.constant([0.0, 0.5, 1.0, 1.0])

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        rows = keras.ops.mean(keras.ops.square(y - y_pred), axis=1)
        mean = keras.ops.mean(y_pred, axis=0)
        term = keras.ops.sum(mean**2) if self.of_batch else keras.ops.mean(keras.ops.abs(y_pred))
        return keras.ops.mean(rows) + self.read_factor() * term

    def read_factor(self):
        if self.kind == "factor":
            return tf.convert_to_tensor(self.factor)
        if self.kind == "iterations":
            steps = tf.cast(tf.convert_to_tensor(self.optimizer.iterations), tf.float32)
            return tf.clip_by_value(steps / 100 - 1, 0, 1)
        if self.kind == "flag":
            return tf.where(self.is_warm, 1.0, 0.0)
        return tf.gather(self.table, self.num_steps // 8)


def _build_later(**attributes):
    model = dense(cls=type("Later", (Later,), attributes))
    model.compile("sgd")
    return model


@pytest.mark.parametrize(
    ("kind", "name"),
    [("factor", "'.*factor'"), ("iterations", "the number of steps"), ("flag", "a number")],
)
def test_a_term_that_begins_later_is_refused_before_the_first_step(kind, name):
    match = f"over 2 replicas: once ({name}) is not 0, the loss 'loss' depends on which"
    with pytest.raises(TfdistError, match=match):
        _fit(lambda: _build_later(kind=kind))


@pytest.mark.parametrize("kind", ["factor", "iterations", "flag", "table"])
def test_a_term_of_examples_may_begin_later(kind):
    _fit(lambda: _build_later(kind=kind, of_batch=False))
