"""Batches like those before need no data adapter, and have the results of Keras."""

import contextlib
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tfdist.training.fit import single_batches


def _build() -> keras.Model:
    inputs = keras.Input((6,))
    x = keras.layers.Dense(8, activation="relu", kernel_initializer=_ramp)(inputs)
    x = keras.layers.Dropout(0.5, seed=1)(x)
    model = keras.Model(inputs, keras.layers.Dense(3, kernel_initializer=_ramp)(x))
    _compile(model, 0.1)
    return model


def _compile(model: keras.Model, rate: float) -> None:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(rate), loss, metrics=["accuracy"])


def _ramp(shape, dtype=None):
    return tf.reshape(tf.linspace(-0.5, 0.7, np.prod(shape)), shape)


def _use(model, to_change, scope=contextlib.nullcontext) -> list[np.ndarray]:
    """Returns the results of batches between which the model changes."""
    rng = np.random.default_rng(0)
    found = []

    def take(rows: int, kind: str = "float32") -> None:
        x, y = rng.normal(size=(rows, 6)).astype(kind), rng.integers(0, 3, rows)
        given = tf.constant(x) if rows == 5 else x
        found.append(np.array(model.train_on_batch(given, y)))
        found.append(np.array(model.test_on_batch(given, y, np.linspace(0, 1, rows))))
        found.append(np.array(model.predict_on_batch({"any": given}["any"])))

    for rows in (8, 8, 5, 8):
        take(rows)
    take(8, "float64")
    take(8, "float64")
    x, y = rng.normal(size=(8, 6)).astype("float32"), rng.integers(0, 3, 8)
    found.append(np.array(model.train_on_batch(x, y, class_weight={0: 1.0, 1: 2.0, 2: 0.5})))
    to_change.optimizer.learning_rate = 0.01
    take(8)
    to_change.layers[1].trainable = False
    with scope():
        _compile(to_change, 0.2)
    take(8)
    to_change.set_weights([w / 2 for w in to_change.get_weights()])
    take(8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about layers that stay as they are
        to_change.quantize("int8")
    found.append(np.array(model.predict_on_batch(x)))
    return found


@pytest.mark.parametrize("strategy", ["one_device", "mirrored"])
def test_batches_between_which_a_model_changes_have_the_results_of_keras(strategy):
    trainer = tfdist.Trainer(_build, strategy=strategy)
    alone = _build()
    expected, found = _use(alone, alone), _use(trainer, trainer.model, trainer.strategy.scope)
    for a, b in zip(expected, found, strict=True):
        if strategy == "one_device":
            np.testing.assert_array_equal(a, b)
        else:
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_a_batch_like_one_before_needs_no_data_adapter(monkeypatch):
    trainer = tfdist.Trainer(_build, strategy="one_device")
    made = []
    make = single_batches.make_data_adapter
    monkeypatch.setattr(
        single_batches, "make_data_adapter", lambda *a, **k: made.append(1) or make(*a, **k)
    )
    x, y = np.ones((4, 6), "float32"), np.zeros(4)
    for _ in range(3):
        trainer.train_on_batch(x, y)
        trainer.predict_on_batch(x)
        trainer.test_on_batch(x, y)
    assert len(made) == 3
    trainer.train_on_batch(x[:2], y[:2])
    trainer.train_on_batch(x, y, class_weight={0: 1.0})
    assert len(made) == 5
