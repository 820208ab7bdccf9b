"""The optimizer's update as XLA compiles it on GPUs: equal up to rounding, on every strategy."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests import zoo
from tests.training.programs import TOKENS, X, Y, dense, seeded
from tfdist.training import compiled_update

O = keras.optimizers


class OwnSGD(O.SGD):
    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient, variable, learning_rate)


def build_embedding():
    inputs = keras.Input((8,), dtype="int32")
    x = keras.layers.Embedding(20, 3, embeddings_initializer=seeded(1))(inputs)
    x = keras.layers.GlobalAveragePooling1D()(x)
    model = keras.Model(inputs, keras.layers.Dense(2, kernel_initializer=seeded(2))(x))
    model.compile(O.Adam(0.1), "mse", jit_compile=False)
    return model


# Without jit_compile=False, XLA compiles the whole step, if there is a GPU.
PROGRAMS = {
    name: (lambda make=make: dense(make(), jit_compile=False), X)
    for name, make in {
        "Adam": lambda: O.Adam(O.schedules.ExponentialDecay(0.1, 2, 0.5), amsgrad=True),
        "AdamW": lambda: O.AdamW(0.1, weight_decay=0.1, clipnorm=0.1, use_ema=True),
        "SGD": lambda: O.SGD(0.1, momentum=0.9, nesterov=True),
        "RMSprop": lambda: O.RMSprop(0.01, centered=True, momentum=0.5),
        "scaled loss": lambda: O.LossScaleOptimizer(O.Adam(0.1)),
    }.items()
} | {"sparse": (build_embedding, TOKENS)}


def run(name, strategy="one_device"):
    """Trains, and returns losses, weights, and the optimizer's variables."""
    build, x = PROGRAMS[name]
    trainer = tfdist.Trainer(build, strategy=zoo.STRATEGIES[strategy]())
    history = trainer.fit(x, Y, batch_size=8, epochs=2, verbose=0)
    variables = trainer.model.optimizer.variables
    return [history.history["loss"], *trainer.model.get_weights(), *map(np.asarray, variables)]


@pytest.fixture
def compiled(monkeypatch):
    """Compiles updates on any device; the numbers of weights that are updated together."""
    calls = []
    original = compiled_update._update_together

    def record(optimizer, strategy, pairs, learning_rate):
        calls.append(len(pairs))
        original(optimizer, strategy, pairs, learning_rate)

    monkeypatch.setattr(compiled_update, "_is_on_gpu", lambda _: True)
    monkeypatch.setattr(compiled_update, "_update_together", record)
    return calls


@pytest.mark.parametrize("strategy", ["one_device", "mirrored-2", "central_storage-2"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_compiled_update_is_equal(name, strategy, compiled, monkeypatch):
    found = run(name, strategy)
    assert set(compiled) == {2 if name == "sparse" else 4}
    monkeypatch.setattr(compiled_update, "_is_on_gpu", lambda _: False)
    for mine, other in zip(found, run(name), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("strategy", ["one_device", "mirrored-2"])
def test_the_update_of_another_optimizer_is_left(strategy, compiled, monkeypatch):
    monkeypatch.setitem(PROGRAMS, "own", (lambda: dense(OwnSGD(0.1), jit_compile=False), X))
    run("own", strategy)
    assert not compiled


def test_deterministic_kernels_are_keras_s(compiled, monkeypatch):
    monkeypatch.setattr(compiled_update, "is_op_determinism_enabled", lambda: True)
    run("Adam")
    assert not compiled


def test_a_step_of_xla_has_the_update_in_it(compiled, monkeypatch):
    build = lambda: dense(O.Adam(0.1), jit_compile=True)  # noqa: E731
    monkeypatch.setitem(PROGRAMS, "XLA", (build, X))
    run("XLA")
    assert not compiled


def test_the_kernels_of_an_update_are_few(compiled):
    """What it is for: Adam alone has dozens of operations for each weight."""
    trainer = tfdist.Trainer(PROGRAMS["Adam"][0], strategy="one_device")
    trainer.fit(X, Y, batch_size=8, verbose=0)
    assert compiled
    assert tf.config.list_logical_devices()
