"""The steps of a trainer under a synchronous strategy, without the loop of `fit`."""

import gc
import weakref

import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests import zoo
from tests.training.programs import X, Y, dense
from tfdist.training.inputs.make_adapter import make_data_adapter

ROWS = 7


def _make(strategy_name):
    """Returns a model, its steps, and an adapter of batches of 7, 7, 7, 7 and 4 examples."""
    strategy = zoo.STRATEGIES[strategy_name]()
    engine = tfdist.Trainer(dense, strategy=strategy).engine
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(ROWS)
    adapter = make_data_adapter(
        data, global_batch_size=ROWS, num_replicas=strategy.num_replicas_in_sync
    )
    return engine.model, engine.build(adapter), adapter


def _iterate(steps, adapter):
    return steps.iterate_train(adapter, start_step=0, steps_per_epoch=5, total_steps=5)


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize("strategy_name", zoo.STRATEGIES)
def test_the_batch_that_was_looked_at_is_trained_on_too(strategy_name):
    model, steps, adapter = _make(strategy_name)
    batch, iterator = steps.look_ahead(_iterate(steps, adapter), adapter, of_training=True)
    for found, wanted in zip(batch, (X[:ROWS], Y[:ROWS]), strict=True):
        np.testing.assert_array_equal(found, wanted)
    found = [steps.train(iterator)[0].logs["loss"] for _ in range(5)]
    expected = zoo.trace_once(dense())
    losses = expected.fit(X, Y, batch_size=ROWS, shuffle=False, verbose=0).history["loss"]
    np.testing.assert_allclose(found[-1], losses[0], rtol=1e-5)
    assert zoo.largest_difference(model.get_weights(), expected.get_weights()) < 1e-6
    assert steps.count_traces()["train"] == 1


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize("strategy_name", zoo.STRATEGIES)
def test_looking_past_the_end_finds_nothing(strategy_name):
    _, steps, adapter = _make(strategy_name)
    iterator = steps.iterate_eval(adapter)
    for _ in range(5):
        steps.start_evaluation(iterator)()
    batch, iterator = steps.look_ahead(iterator, adapter, of_training=False)
    assert batch is None
    with pytest.raises((tf.errors.OutOfRangeError, StopIteration)):
        steps.start_evaluation(iterator)()


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize("strategy_name", zoo.STRATEGIES)
def test_evaluates_as_keras_does(strategy_name):
    model, steps, adapter = _make(strategy_name)
    iterator = steps.iterate_eval(adapter)
    for _ in range(5):
        logs = steps.start_evaluation(iterator)()
    expected = dense().evaluate(X, Y, batch_size=ROWS, verbose=0, return_dict=True)
    for name, value in steps.conclude("test", logs).items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-5)
    assert model.optimizer.iterations.numpy() == 0


def test_a_step_without_data_counts_and_changes_no_weight():
    model, steps, _ = _make("mirrored-2")
    before = model.get_weights()
    steps.count_empty_step()
    assert model.optimizer.iterations.numpy() == 1
    assert zoo.largest_difference(model.get_weights(), before) == 0


@pytest.mark.parametrize("strategy_name", ["one_device", "mirrored-2"])
def test_each_iterator_is_read_by_the_same_trace_and_not_kept(strategy_name):
    model, steps, adapter = _make(strategy_name)
    expected = dense()
    for _ in range(2):  # the second iterator is another one
        iterator = _iterate(steps, adapter)
        for _ in range(5):
            steps.train(iterator)
    kept = weakref.ref(iterator)
    expected.fit(X, Y, batch_size=ROWS, epochs=2, shuffle=False, verbose=0)
    assert zoo.largest_difference(model.get_weights(), expected.get_weights()) < 1e-6
    assert steps.count_traces()["train"] == 1
    del iterator
    gc.collect()
    assert kept() is None
    assert not steps._bound[steps.steps.train]._tensors
