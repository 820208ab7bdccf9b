"""The optimizer's update: the step's number is read once, and on GPUs, Adam is one kernel."""

import collections
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests import zoo
from tests.training.programs import TOKENS, X, Y, dense, seeded
from tfdist.training.step import fused_update

Adam = keras.optimizers.Adam
STRATEGIES = ["one_device", "mirrored-2", "central_storage-2"]


class OwnAdam(Adam):
    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient, variable, learning_rate * 0.5)


def build_embedding():
    inputs = keras.Input((8,), dtype="int32")
    x = keras.layers.Embedding(20, 3, embeddings_initializer=seeded(1))(inputs)
    x = keras.layers.GlobalAveragePooling1D()(x)
    model = keras.Model(inputs, keras.layers.Dense(2, kernel_initializer=seeded(2))(x))
    model.compile(keras.optimizers.Adam(0.1), "mse", jit_compile=False)
    return model


# With the number of weights that the kernel updates.
OPTIMIZERS = {
    "Adam": (lambda: Adam(keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)), 4),
    "AdamW": (
        lambda: keras.optimizers.AdamW(0.1, weight_decay=0.1, clipnorm=0.1, use_ema=True),
        4,
    ),
    "scaled loss": (lambda: keras.optimizers.LossScaleOptimizer(Adam(0.1)), 4),
    "AMSGrad": (lambda: Adam(0.1, amsgrad=True), 0),
    "own": (lambda: OwnAdam(0.1), 0),
    "Nadam": (lambda: keras.optimizers.Nadam(0.1), 0),
    "Lamb": (lambda: keras.optimizers.Lamb(0.1), 0),
    "SGD": (lambda: keras.optimizers.SGD(0.1, momentum=0.9), 0),
    "accumulation": (lambda: Adam(0.1, gradient_accumulation_steps=2), 0),
}
PROGRAMS = {
    name: (lambda make=make: dense(make(), jit_compile=False), X, weights)
    for name, (make, weights) in OPTIMIZERS.items()
} | {"sparse": (build_embedding, TOKENS, 2)}
DIVISIBLE = [name for name in PROGRAMS if name != "accumulation"]  # by Keras, over replicas


# What differs most from one another comes first.
SPREAD = ["AdamW", "sparse", "scaled loss", "accumulation", "own", "SGD"]
SPREAD += [name for name in PROGRAMS if name not in SPREAD]


def run(name, strategy="one_device", **options):
    """Trains, and returns losses, weights, and the optimizer's variables."""
    build, x, _ = PROGRAMS[name]
    options = tfdist.StepOptions(check="off", **options)
    trainer = tfdist.Trainer(build, strategy=zoo.STRATEGIES[strategy](), step_options=options)
    history = trainer.fit(x, Y, batch_size=8, epochs=3, shuffle=False, verbose=0)
    return [history.history["loss"], *_list_state(trainer.model)]


def run_keras(name):
    build, x, _ = PROGRAMS[name]
    model = zoo.trace_once(build())
    history = model.fit(x, Y, batch_size=8, epochs=3, shuffle=False, verbose=0)
    return [history.history["loss"], *_list_state(model)]


def _list_state(model):
    return [*model.get_weights(), *(np.asarray(v) for v in model.optimizer.variables)]


@pytest.fixture
def kernels(monkeypatch):
    """Counts the calls of TensorFlow's kernel of Adam, on the first device."""
    calls = collections.Counter()
    original = tf.raw_ops.ResourceApplyAdam

    def record(**arguments):
        calls[arguments["var"].device] += 1
        return original(**arguments)

    monkeypatch.setattr(tf.raw_ops, "ResourceApplyAdam", record)
    return calls


@functools.cache
def run_keras_once(name):
    return run_keras(name)


@pytest.mark.thorough(keep=4)
@pytest.mark.parametrize("name", SPREAD)
def test_one_device_is_keras_to_the_bit(name, kernels):
    for mine, other in zip(run(name), run_keras_once(name), strict=True):
        np.testing.assert_array_equal(mine, other)
    assert not kernels


@pytest.mark.thorough(keep=1)
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", ["AdamW", "Adam"])
def test_float64_is_keras_too(name, monkeypatch):
    """To the bit, and by the kernel of GPUs to rounding."""
    expected = run_keras(name)
    for mine, other in zip(run(name), expected, strict=True):
        np.testing.assert_array_equal(mine, other)
    monkeypatch.setattr(fused_update, "_needs_kernel", lambda _: True)
    for mine, other in zip(run(name), expected, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-9, atol=1e-11)


@pytest.mark.thorough(keep=4)
@pytest.mark.parametrize(
    ("name", "strategy"), zoo.take_turns([n for n in SPREAD if n in DIVISIBLE], STRATEGIES)
)
def test_the_kernel_of_gpus_is_equal(name, strategy, kernels, monkeypatch):
    """On CPUs, too."""
    expected = run_keras_once(name)
    assert not kernels
    monkeypatch.setattr(fused_update, "_needs_kernel", lambda _: True)
    found = run(name, strategy)
    weights = PROGRAMS[name][2]
    assert bool(kernels) == bool(weights)
    assert all(calls % weights == 0 for calls in kernels.values())
    for mine, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-4, atol=2e-5)


def test_the_update_of_a_compiled_gradient_is_the_kernel(kernels, monkeypatch):
    """XLA compiles the gradient only."""
    expected = run_keras_once("Adam")
    monkeypatch.setattr(fused_update, "_needs_kernel", lambda _: True)
    found = run("Adam", jit_compile=True)
    assert kernels
    for mine, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-4, atol=2e-5)
