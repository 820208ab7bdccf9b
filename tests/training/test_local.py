"""Averaging by itself, on one worker; `test_workers` has it on several."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.training.programs import dense
from tfdist import strategies
from tfdist.strategies.local_sgd_strategy import LocalSgdStrategy
from tfdist.training.kinds.local_sgd import WeightAverager
from tfdist.training.workers.communication import Workers


def _make(**options):
    """Returns a model that has been built, and its averager."""
    strategy = LocalSgdStrategy(tf.distribute.get_strategy(), strategies.LocalSgd(**options))
    with strategy.scope():
        model = dense(keras.optimizers.SGD(0.1, momentum=0.9))
        model.optimizer.build(model.trainable_variables)
    averager = WeightAverager(model, strategy, Workers(strategy))
    averager.begin(restored=False)
    return model, averager


def test_the_mean_of_one_worker_is_its_own():
    model, averager = _make()
    before = model.get_weights()
    averager.count(8)
    averager.average()
    for found, wanted in zip(model.get_weights(), before, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-6)
    assert averager.state == []
    held = [value for value in vars(averager).values() if isinstance(value, keras.Variable)]
    assert held
    assert not any(np.prod(variable.shape) for variable in held)


@pytest.mark.parametrize(("rate", "momentum"), [(0.5, 0.0), (1.0, 0.9)])
def test_the_outer_step_starts_from_the_last_average(rate, momentum):
    model, averager = _make(outer_learning_rate=rate, outer_momentum=momentum)
    weight = model.trainable_variables[0]
    anchor, speed = weight.numpy(), 0.0
    for _ in range(3):
        weight.assign_add(np.ones(weight.shape))
        averager.count(8)
        averager.average()
        speed = momentum * speed - 1  # the anchor minus the mean
        anchor = anchor - rate * speed
        np.testing.assert_allclose(weight.numpy(), anchor, rtol=1e-5)


def test_an_optimizer_that_each_worker_keeps_is_in_the_checkpoint():
    model, averager = _make(average_optimizer=False)
    slots = [v for v in model.optimizer.variables if v.shape == model.trainable_variables[0].shape]
    slots[0].assign(np.full(slots[0].shape, 3.0))
    averager.collect()
    (saved,) = averager.state
    slots[0].assign(np.zeros(slots[0].shape))
    averager.begin(restored=True)
    assert np.all(slots[0].numpy() == 3)
    assert saved.shape[0] == 1
