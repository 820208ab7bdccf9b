"""Strategies in one process do not disturb each other's collectives."""

import pytest
import tensorflow as tf

import tfdist
from tests import zoo
from tests.training.programs import SGD, X, Y, dense


@pytest.mark.parametrize("count", [2, 3])
def test_strategies_that_others_built_train_one_after_the_other(count):
    """With TensorFlow's own choice of the algorithm, which aborts for the second strategy."""
    names = [f"{zoo.KIND}:{place}" for place in range(count)]
    strategy = tf.distribute.MirroredStrategy(names)
    trainer = tfdist.Trainer(lambda: dense(SGD()), strategy=strategy)
    trainer.fit(X, Y, batch_size=6, epochs=1, verbose=0, shuffle=False)
    expected = dense(SGD())
    expected.fit(X, Y, batch_size=6, epochs=1, verbose=0, shuffle=False)
    assert zoo.largest_difference(trainer.model.get_weights(), expected.get_weights()) < 1e-6
