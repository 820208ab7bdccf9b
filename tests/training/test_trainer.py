"""Contract 1 and 5: every strategy trains every model to the same weights."""

import keras
import numpy as np
import pytest

import tfdist
from tests import zoo

STEPS = 20
BATCH = 16
SGD = lambda: keras.optimizers.SGD(0.05, momentum=0.9, global_clipnorm=0.5)  # noqa: E731
ADAM = lambda: keras.optimizers.Adam(1e-3)  # noqa: E731


@pytest.fixture
def float64():
    """Keras computes in float64 for one test."""
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    yield
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")


def _train(model_name, strategy_name, make_optimizer, **options):
    example = zoo.EXAMPLES[model_name]
    trainer = tfdist.Trainer(
        lambda: example.build(make_optimizer()), strategy=zoo.STRATEGIES[strategy_name](), seed=5
    )
    x, y = example.data
    history = trainer.fit(
        x,
        y,
        sample_weight=example.sample_weight,
        global_batch_size=BATCH,
        max_steps=STEPS,
        verbose=0,
        **options,
    )
    logs = trainer.evaluate(
        x, y, sample_weight=example.sample_weight, global_batch_size=BATCH, verbose=0
    )
    return [weight.numpy() for weight in trainer.model.weights], history.history, logs


@pytest.fixture(scope="module")
def references():
    """What one device computes, once a model and optimiser."""
    return {}


def _compare(references, model_name, strategy_name, make_optimizer, tolerance):
    key = (model_name, make_optimizer, tolerance)
    if key not in references:
        references[key] = _train(model_name, "one_device", make_optimizer)
    weights, history, logs = _train(model_name, strategy_name, make_optimizer)
    expected_weights, expected_history, expected_logs = references[key]
    assert zoo.largest_difference(weights, expected_weights) < tolerance
    assert logs.keys() == expected_logs.keys()
    for name, value in expected_logs.items():
        np.testing.assert_allclose(logs[name], value, rtol=20 * tolerance, err_msg=name)
    np.testing.assert_allclose(history["loss"], expected_history["loss"], rtol=20 * tolerance)


@pytest.mark.parametrize("strategy_name", list(zoo.STRATEGIES)[1:])
@pytest.mark.parametrize("model_name", zoo.EXAMPLES)
def test_sgd_ends_where_one_device_ends(references, model_name, strategy_name):
    _compare(references, model_name, strategy_name, SGD, 1e-5)


@pytest.mark.parametrize("strategy_name", list(zoo.STRATEGIES)[1:])
def test_adam_in_float64_ends_where_one_device_ends(references, float64, strategy_name):
    _compare(references, "unet", strategy_name, ADAM, 1e-10)
