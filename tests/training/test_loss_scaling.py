"""mixed_float16: all replicas skip the same steps, and the rest is as in float32."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests import zoo
from tfdist.internals import adds_up_activities
from tfdist.training.step.model_variables import hash_weights

# No gradient is clipped, but for one that is still scaled.
SGD = lambda: keras.optimizers.SGD(0.05, momentum=0.9, global_clipnorm=10.0)  # noqa: E731
SCALE = 2.0**15  # Keras's first
X, Y = zoo.EXAMPLES["dense"].data


@pytest.fixture
def float16():
    """Keras computes in float16 for one test."""
    keras.config.set_dtype_policy("mixed_float16")
    yield
    keras.config.set_dtype_policy("float32")


def _make_trainer(strategy_name, model_name="dense", make_optimizer=SGD, **options):
    example = zoo.EXAMPLES[model_name]
    strategy = zoo.STRATEGIES[strategy_name]()
    return zoo.make_trainer(lambda: example.build(make_optimizer()), strategy=strategy, **options)


def _read(trainer):
    return [weight.numpy() for weight in trainer.model.weights]


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("strategy_name", ["mirrored-2", "one_device", "central_storage-2"])
def test_skips_a_step_that_overflows_on_one_replica(float16, strategy_name):
    x, y = X[:16].copy(), Y[:16].copy()
    # Of the last replica; one of them is taken for another class.
    x[14], x[15], y[14:16] = 1000.0, -1000.0, 0
    strategy = zoo.STRATEGIES[strategy_name]()
    trainer = zoo.make_trainer(lambda: zoo.build_linear(SGD()), strategy=strategy)
    trainer.engine.prepare(x, y, global_batch_size=16)
    before = _read(trainer)
    trainer.fit(x, y, global_batch_size=16, shuffle=False, max_steps=2, verbose=0)
    assert trainer.step == 2
    optimizer = trainer.model.optimizer
    assert int(optimizer.iterations.numpy()) == 0
    for variable in trainer.model.variables + optimizer.variables:
        first, *others = strategy.experimental_local_results(variable.value)
        for other in others:
            np.testing.assert_array_equal(first, other)
    assert all(np.array_equal(a, b) for a, b in zip(_read(trainer), before, strict=True))
    assert float(optimizer.dynamic_scale.numpy()) == SCALE / 4
    trainer.fit(X[16:32], Y[16:32], global_batch_size=16, max_steps=1, verbose=0)
    assert int(optimizer.iterations.numpy()) == int(optimizer.step_counter.numpy()) == 1
    assert not np.array_equal(_read(trainer)[0], before[0])


@functools.cache
def _train_in_float32(name):
    """Returns what float32 computes on one device."""
    policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy("float32")
    trainer = _make_trainer("one_device", name)
    trainer.fit(*zoo.EXAMPLES[name].data, global_batch_size=16, max_steps=6, verbose=0)
    keras.config.set_dtype_policy(policy)
    return _read(trainer)


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize(
    ("strategy_name", "micro_batches"),
    zoo.take_turns(["mirrored-2", "one_device", "central_storage-2"], [1, 2]),
)
def test_clips_and_applies_what_float32_would(float16, strategy_name, micro_batches):
    if adds_up_activities():
        pytest.skip("penalties of activities are so large that the first step is skipped")
    trainer = _make_trainer(strategy_name, micro_batches=micro_batches)
    assert isinstance(trainer.model.optimizer, keras.optimizers.LossScaleOptimizer)
    trainer.fit(X, Y, global_batch_size=16, max_steps=6, verbose=0)
    assert int(trainer.model.optimizer.iterations.numpy()) == 6
    assert zoo.largest_difference(_read(trainer), _train_in_float32("dense")) < 5e-3


@pytest.mark.thorough
def test_trains_a_network_of_fused_normalization(float16):
    trainer = _make_trainer("mirrored-2", "unet")
    trainer.fit(*zoo.EXAMPLES["unet"].data, global_batch_size=16, max_steps=6, verbose=0)
    skipped = 6 - int(trainer.model.optimizer.iterations.numpy())
    assert skipped == 0
    assert zoo.largest_difference(_read(trainer), _train_in_float32("unet")) < 1e-2


def _make_growing():
    return keras.optimizers.LossScaleOptimizer(SGD(), initial_scale=8.0, dynamic_growth_steps=2)


def test_the_scale_grows_as_in_keras_and_outlives_a_stop(float16, deterministic, tmp_path):
    example = zoo.EXAMPLES["two_inputs"]
    dataset = tf.data.Dataset.from_tensor_slices(example.data).batch(8)
    model = example.build(_make_growing())
    model.fit(dataset, verbose=0, shuffle=False)

    def fit(max_steps=None, checkpoint_dir=None):
        trainer = _make_trainer(
            "mirrored-2", "two_inputs", _make_growing, checkpoint_dir=checkpoint_dir
        )
        trainer.fit(dataset, max_steps=max_steps, verbose=0)
        return trainer

    whole = fit()
    assert zoo.largest_difference(_read(whole), [w.numpy() for w in model.weights]) < 5e-3
    fit(3, str(tmp_path))
    continued = fit(5, str(tmp_path))
    assert continued.progress.resumed_from_step == 3
    assert hash_weights(continued.model) == hash_weights(whole.model)
    for trainer in (whole, continued):
        optimizer = trainer.model.optimizer
        assert float(optimizer.dynamic_scale.numpy()) == 32 == model.optimizer.dynamic_scale
        assert int(optimizer.step_counter.numpy()) == 1 == model.optimizer.step_counter
