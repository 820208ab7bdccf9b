"""The compiled steps by themselves, on the batches of an iterator."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests import zoo
from tests.training.programs import X, Y, dense
from tfdist.training.inputs.make_adapter import make_data_adapter
from tfdist.training.replicas import metrics as replica_metrics
from tfdist.training.step_options import StepOptions

ROWS = 7  # of each of two replicas: 4 and 3


def _make(strategy_name, *, rows=ROWS, options=None, **model_options):
    """Returns the model, its steps, and an iterator over a training batch."""
    strategy = zoo.STRATEGIES[strategy_name]()
    engine = tfdist.Trainer(
        lambda: dense(**model_options), strategy=strategy, step_options=options or StepOptions()
    ).engine
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(rows)
    adapter = make_data_adapter(
        data, global_batch_size=rows, num_replicas=strategy.num_replicas_in_sync
    )
    steps = engine.build(adapter).steps
    return engine.model, steps, adapter.iterate_train(strategy, start_step=0)


@pytest.mark.smoke
@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize("strategy_name", zoo.STRATEGIES)
def test_a_training_step_is_keras_s(strategy_name):
    model, steps, iterator = _make(strategy_name)
    expected = zoo.trace_once(dense())
    logs = expected.train_on_batch(X[:ROWS], Y[:ROWS], return_dict=True)
    found = steps.train(iterator)
    for name, value in logs.items():
        np.testing.assert_allclose(found.logs[name], value, rtol=1e-5)
    assert zoo.largest_difference(model.get_weights(), expected.get_weights()) < 1e-6
    assert float(found.rows) == (ROWS if steps.is_divided else 0)
    assert zoo.KIND == "GPU" or float(found.waited_s) >= 0  # there, the clock is not read


def test_a_loop_of_steps_gives_the_logs_of_each():
    model, steps, iterator = _make("mirrored-2", options=StepOptions(steps_per_loop=3))
    expected = zoo.trace_once(dense())
    losses = [
        expected.train_on_batch(X[first : first + ROWS], Y[first : first + ROWS], return_dict=True)
        for first in (0, ROWS)
    ]
    expected_weights = expected.get_weights()
    found = steps.make_train_loop(3)(iterator, tf.constant(2))
    assert found.rows.numpy().tolist() == [ROWS, ROWS]
    np.testing.assert_allclose(found.logs["loss"][0], losses[0]["loss"], rtol=1e-5)
    assert zoo.largest_difference(model.get_weights(), expected_weights) < 1e-6


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("strategy_name", ["mirrored-2", "central_storage-2"])
def test_a_shown_step_has_keras_s_gradient_and_no_effect(strategy_name):
    model, steps, _ = _make(strategy_name)
    before = model.get_weights()
    bounds = tf.constant([[0, 4], [4, ROWS]], tf.int64)
    _, gradients = steps.show("train")((X[:ROWS], Y[:ROWS]), bounds)
    expected = zoo.trace_once(dense())
    with tf.GradientTape() as tape:
        loss = expected.compute_loss(y=Y[:ROWS], y_pred=expected(X[:ROWS], training=True))
    wanted = tape.gradient(loss, [v.value for v in expected.trainable_variables])
    of_each_replica = [gradient.numpy() for gradient in gradients]
    assert zoo.largest_difference(of_each_replica, wanted * 2) < 1e-6
    assert zoo.largest_difference(model.get_weights(), before) == 0
    assert model.optimizer.iterations.numpy() == 0


def test_predictions_of_a_batch_that_every_replica_has_are_given_once():
    model, steps, iterator = _make("mirrored-3", rows=2)
    predict, pack = steps.make_predict()
    found = predict(iterator)
    outputs = pack(found)
    assert [is_copy for _, is_copy in outputs] == [False, True, True]
    np.testing.assert_allclose(outputs[0][0], model(X[:2]), rtol=1e-5)


@pytest.mark.thorough(keep=4)
@pytest.mark.parametrize(
    ("strategy_name", "largest"),
    zoo.take_turns(zoo.STRATEGIES, [0, replica_metrics._LARGEST_STATES]),
)
def test_the_states_of_metrics_are_read_written_and_reset(strategy_name, largest, monkeypatch):
    monkeypatch.setattr(replica_metrics, "_LARGEST_STATES", largest)
    _, steps, iterator = _make(strategy_name, metrics=["mae", "mse"])
    steps.train(iterator)
    states = [state.numpy() for state in steps.read_states()]
    assert any(np.any(state) for state in states)
    steps.reset_metrics()
    assert not any(np.any(state.numpy()) for state in steps.read_states())
    steps.write_states(states)
    assert zoo.largest_difference([s.numpy() for s in steps.read_states()], states) == 0
    # Of another number of replicas.
    more = [np.concatenate([state] * 5) for state in states]
    steps.write_states(more)
    for found, given in zip(steps.read_states(), more, strict=True):
        np.testing.assert_allclose(found.numpy().sum(0), given.sum(0), rtol=1e-6)


def test_a_trace_leaves_no_variable_for_the_rest_of_the_process():
    def build():
        model = keras.Sequential([keras.layers.Dense(2)])  # which the first step builds
        model.compile("adam", "mse")
        return model

    collections = [
        tf.compat.v1.get_default_graph().get_collection_ref(name)
        for name in (tf.compat.v1.GraphKeys.GLOBAL_VARIABLES, "trainable_variables")
    ]
    before = [list(collection) for collection in collections]
    trainer = tfdist.Trainer(build, strategy=tf.distribute.MirroredStrategy(["CPU:0"]))
    trainer.fit(np.ones((4, 3)), np.ones((4, 2)), verbose=0)
    assert [list(collection) for collection in collections] == before
