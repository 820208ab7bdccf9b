"""What every strategy of one process must do: give Keras's result. A new one is tested as well."""

import functools

import keras
import numpy as np
import pytest

import tfdist
from tests import zoo
from tests.training.programs import X, Y
from tfdist.strategies import registry

pytestmark = pytest.mark.optimized
LOCAL = [name for name, found in registry.STRATEGIES.items() if found.traits.is_local]


def build():
    keras.utils.set_random_seed(1)
    inputs = keras.Input(X.shape[1:])
    x = keras.layers.Dropout(0.3, seed=2)(keras.layers.Dense(8, "tanh")(inputs))
    outputs = keras.layers.Dense(Y.shape[1])(keras.layers.BatchNormalization()(x))
    model = keras.Model(inputs, outputs)
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    return model


def fit(model):
    options = {"batch_size": 7, "shuffle": False, "epochs": 3, "verbose": 0}
    return model.fit(X, Y, validation_data=(X[:5], Y[:5]), **options).history


@functools.cache
def fit_keras():
    model = zoo.trace_once(build())
    return fit(model), model.get_weights()


@pytest.mark.parametrize("name", LOCAL)
def test_it_gives_keras_s_result(name, float64):
    options = registry.STRATEGIES[name]
    history, weights = fit_keras()
    strategy = registry.make_strategy(
        name, **({} if options.traits.is_single else {"devices": ["CPU:0", "CPU:1"]})
    )
    trainer = tfdist.Trainer(build, strategy=strategy)
    found = fit(trainer)
    tolerance = 0 if options.traits.is_single else 1e-12
    assert found.keys() == history.keys()
    for key, values in history.items():
        np.testing.assert_allclose(found[key], values, rtol=tolerance)
    for ours, theirs in zip(trainer.model.get_weights(), weights, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=tolerance)
