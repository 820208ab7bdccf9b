"""Strategies in one process do not disturb each other's collectives."""

import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests import zoo
from tests.training.programs import SGD, X, Y, dense
from tfdist.strategies.collectives import packing_known_shapes, separate_collectives


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


@pytest.mark.parametrize("is_known", [True, False])
def test_shapes_that_are_known_are_not_computed(is_known):
    strategy = tf.distribute.MirroredStrategy([f"{zoo.KIND}:{place}" for place in range(2)])
    separate_collectives(strategy)
    values = [tf.reshape(tf.range(float(size)), [-1, 3]) for size in (6, 3, 12)]
    shape = None if is_known else [None, 3]

    @tf.function(input_signature=[tf.TensorSpec(shape or v.shape, v.dtype) for v in values])
    def add(*values):
        def reduce():
            given = [tf.identity(value) for value in (*values, values[0][0])]
            return tf.distribute.get_replica_context().all_reduce("SUM", given)

        with packing_known_shapes():
            return strategy.run(reduce)

    kinds = {operation.type for operation in add.get_concrete_function().graph.get_operations()}
    assert "CollectiveReduceV2" in kinds
    assert ("Prod" in kinds) == (not is_known)
    for found, value in zip(add(*values), [*values, values[0][0]], strict=True):
        for copy in strategy.experimental_local_results(found):
            np.testing.assert_array_equal(copy, 2 * value)
