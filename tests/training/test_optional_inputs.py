"""An optional input may be missing, in every kind of data, on replicas and in micro-batches."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests import zoo

X = np.random.default_rng(0).random((10, 3)).astype("float32")
Y = X.sum(1, keepdims=True)
MISSING = {"first": None, "second": X}


class Either(keras.layers.Layer):
    """Adds the inputs that are there."""

    def call(self, second, first=None):
        return second if first is None else first + second

    def compute_output_shape(self, second_shape, first_shape=None):
        return second_shape


def build():
    inputs = {
        "first": keras.Input((3,), name="first", optional=True),
        "second": keras.Input((3,), name="second"),
    }
    hidden = Either()(inputs["second"], inputs["first"])
    model = keras.Model(inputs, keras.layers.Dense(1, kernel_initializer="ones")(hidden))
    model.compile("sgd", "mse")
    return model


def generate():
    for first in (0, 4):
        yield {"first": None, "second": X[first : first + 4]}, Y[first : first + 4]


def batches():
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(4)
    return dataset.map(lambda x, y: ({"first": None, "second": x}, y))


USES = {
    "arrays": lambda model: model.fit(
        MISSING, Y, batch_size=4, shuffle=False, epochs=2, verbose=0
    ).history["loss"],
    "dataset": lambda model: model.fit(batches(), epochs=2, verbose=0).history["loss"],
    "generator": lambda model: model.fit(generate(), shuffle=False, verbose=0).history["loss"],
    "evaluate": lambda model: model.evaluate(MISSING, Y, batch_size=4, verbose=0),
    "predict": lambda model: model.predict(MISSING, batch_size=4, verbose=0),
    "single": lambda model: [
        model.train_on_batch(MISSING, Y),
        model.test_on_batch(MISSING, Y),
    ],
}


WAYS = ["mirrored-2", "one_device", "micro-batches"]


@functools.cache
def use_keras(name):
    return USES[name](build())


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.filterwarnings("ignore:.*the data `x` was provided as a tf.data.Dataset")
@pytest.mark.thorough(keep=4)
@pytest.mark.parametrize(("name", "way"), zoo.take_turns(USES, WAYS))
def test_a_missing_input_is_none(name, way):
    options = {"micro_batches": 2} if way == "micro-batches" else {}
    strategy = zoo.STRATEGIES["one_device" if options else way]()
    trainer = zoo.make_trainer(build, strategy=strategy, **options)
    np.testing.assert_allclose(USES[name](trainer), use_keras(name), rtol=1e-5)
