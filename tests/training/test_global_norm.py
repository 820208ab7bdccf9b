"""Keras's batch normalization on replicas: the moments of the global batch, on the fused kernel."""

import keras
import numpy as np
import pytest

import tfdist
from tests import zoo
from tests.training.programs import Smooth
from tfdist.internals import custom_gradient

L = keras.layers
X = np.random.default_rng(0).normal(2.0, 3.0, size=(22, 5, 4, 3)).astype("float32")
Y = np.random.default_rng(1).normal(size=(22, 2)).astype("float32")


def build(between, *, cls=keras.Model, policy="float32"):
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy(policy)
    inputs = keras.Input(X.shape[1:])
    x = L.Conv2D(4, 3, use_bias=False)(inputs)
    outputs = L.Dense(2)(L.Flatten()(between(x)))
    model = cls(inputs, outputs)
    model.compile(keras.optimizers.SGD(0.003), "mse")
    keras.config.set_dtype_policy("float32")
    return model


def run(strategy, make, batch=11, **options):
    trainer = tfdist.Trainer(
        make, strategy=strategy, step_options=tfdist.StepOptions(check="off", **options)
    )
    history = trainer.fit(X, Y, batch_size=batch, epochs=3, shuffle=False, verbose=0)
    return history.history["loss"], trainer.model.get_weights()


BETWEEN = {
    "pictures": lambda x: L.BatchNormalization()(x),
    "no scale": lambda x: L.BatchNormalization(scale=False, center=False, momentum=0.7)(x),
    "vectors": lambda x: L.BatchNormalization()(L.Dense(5)(L.Flatten()(x))),
    "first axis": lambda x: L.BatchNormalization(axis=1)(x),
    "renorm": lambda x: L.BatchNormalization(renorm=True)(x),
    "frozen": lambda x: L.BatchNormalization(trainable=False)(x),
}


@pytest.mark.thorough(keep=3)
@pytest.mark.parametrize(("name", "replicas"), zoo.take_turns(BETWEEN, [3, 2]))
def test_replicas_equal_one_device(name, replicas):
    losses, weights = run(zoo.STRATEGIES["one_device"](), lambda: build(BETWEEN[name]))
    found_losses, found_weights = run(
        zoo.STRATEGIES[f"mirrored-{replicas}"](), lambda: build(BETWEEN[name])
    )
    np.testing.assert_allclose(found_losses, losses, rtol=2e-5)
    for found, expected in zip(found_weights, weights, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=2e-5)


def test_gradients_of_gradients_equal_one_device():
    losses, weights = run(
        zoo.STRATEGIES["one_device"](), lambda: build(BETWEEN["pictures"], cls=Smooth), batch=22
    )
    found = run(
        zoo.STRATEGIES["mirrored-2"](), lambda: build(BETWEEN["pictures"], cls=Smooth), batch=22
    )
    np.testing.assert_allclose(found[0], losses, rtol=2e-5)
    for mine, expected in zip(found[1], weights, strict=True):
        np.testing.assert_allclose(mine, expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize(
    ("strategy", "policy", "is_fused"),
    [
        ("mirrored-2", "float32", True),
        ("mirrored-2", "mixed_bfloat16", True),
        ("mirrored-2", "float64", False),
        ("one_device", "float32", False),
    ],
)
def test_the_kernel_is_fused_on_replicas_and_keras_s_on_one_device(strategy, policy, is_fused):
    trainer = tfdist.Trainer(
        lambda: build(BETWEEN["pictures"], policy=policy),
        strategy=zoo.STRATEGIES[strategy](),
        step_options=tfdist.StepOptions(check="off"),
    )
    trainer.fit(X, Y, batch_size=11, epochs=1, verbose=0)
    step = trainer.engine._steps.steps.train
    graph = step._list_all_concrete_functions()[0].graph
    kernel = "_measure_wide" if zoo.KIND == "GPU" else "FusedBatchNormV3"
    assert (kernel in str(graph.as_graph_def())) == is_fused


def test_graphs_are_not_searched_for_variables(monkeypatch):
    def search(*_, **__):
        raise AssertionError("searched")

    monkeypatch.setattr(custom_gradient, "_get_dependent_variables", search)
    run(zoo.STRATEGIES["mirrored-2"](), lambda: build(BETWEEN["pictures"]))


@pytest.mark.usefixtures("float64")
@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize(
    ("is_masked", "strategy"), zoo.take_turns([True, False], ["mirrored-3", "mirrored-2"])
)
def test_fewer_examples_than_replicas_equal_one_device(is_masked, strategy):
    x = np.random.default_rng(0).normal(size=(9, 4, 3))
    x[::2, 2:] = 0

    def make():
        keras.utils.set_random_seed(0)
        inputs = keras.Input((4, 3))
        between = L.Masking()(inputs) if is_masked else inputs
        model = keras.Model(inputs, L.Dense(1)(L.BatchNormalization()(between)))
        model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
        return model

    found = []
    for name in ("one_device", strategy):
        trainer = tfdist.Trainer(make, strategy=zoo.STRATEGIES[name]())
        trainer.fit(x, x[:, :, :1] ** 2, batch_size=8, epochs=2, shuffle=False, verbose=0)
        found.append(trainer.model.get_weights())
    for mine, other in zip(*found, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-12, atol=1e-13)
