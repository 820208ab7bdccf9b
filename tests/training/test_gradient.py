"""The gradient of a replica's loss, for options that change how it is computed."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests import zoo
from tests.training.programs import X, Y, dense
from tfdist.training.inputs.make_adapter import make_data_adapter
from tfdist.training.replicas.reduction import count_gradient_bytes
from tfdist.training.step.gradient import compute_loss

WEIGHTS = np.linspace(0, 2, 8).astype("f4")


def _build():
    penalized = keras.layers.Dense(
        4, kernel_initializer=zoo.seeded(3), kernel_regularizer=keras.regularizers.L2(0.1)
    )
    return dense(between=penalized, metrics=["mae"])


def test_the_loss_is_that_of_keras_s_training_step():
    model, expected = _build(), _build()
    loss, outputs = compute_loss(model, (X[:8], Y[:8], WEIGHTS))
    logs = expected.train_on_batch(X[:8], Y[:8], sample_weight=WEIGHTS, return_dict=True)
    np.testing.assert_allclose(loss, logs["loss"], rtol=1e-6)
    np.testing.assert_allclose(model._loss_tracker.result(), logs["loss"], rtol=1e-6)
    np.testing.assert_allclose(outputs, _build()(X[:8]), rtol=1e-6)


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize(
    ("options", "strategy_name"),
    zoo.take_turns(
        [{"micro_batches": 3}, {"jit_compile": True}, {"micro_batches": 2, "jit_compile": True}],
        ["mirrored-2", "one_device"],
    ),
)
def test_an_update_is_keras_s_however_the_gradient_is_computed(strategy_name, options):
    strategy = zoo.STRATEGIES[strategy_name]()
    engine = tfdist.Trainer(
        _build, strategy=strategy, step_options=tfdist.StepOptions(**options)
    ).engine
    data = tf.data.Dataset.from_tensors((X[:8], Y[:8], WEIGHTS))
    adapter = make_data_adapter(
        data, global_batch_size=8, num_replicas=strategy.num_replicas_in_sync
    )
    found = engine.build(adapter).steps.train(adapter.iterate_train(strategy, start_step=0))
    expected = _build()
    logs = expected.train_on_batch(X[:8], Y[:8], sample_weight=WEIGHTS, return_dict=True)
    for name, value in logs.items():
        np.testing.assert_allclose(found.logs[name], value, rtol=1e-5)
    assert zoo.largest_difference(engine.model.get_weights(), expected.get_weights()) < 1e-6


def test_the_size_of_the_gradients():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2), keras.layers.Dense(1)])
    model.layers[1].trainable = False
    assert count_gradient_bytes(model, is_compressed=False) == 4 * (3 * 2 + 2)
    assert count_gradient_bytes(model, is_compressed=True) == 2 * (3 * 2 + 2)


@pytest.mark.thorough(keep=2)
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("options", "strategy"),
    zoo.take_turns(
        [{}, {"clipnorm": 0.01}, {"global_clipnorm": 0.01}],
        ["mirrored-3", "central_storage-2", "mirrored-2"],
    ),
)
def test_fewer_examples_than_replicas_have_one_gradient_of_a_table_each(strategy, options):
    """Optimizers square the gradient of each example."""
    tokens = np.arange(27).reshape(9, 3) % 7
    y = np.linspace(0, 1, 9)[:, None]

    def build():
        inputs = keras.Input((3,), dtype="int32")
        x = keras.layers.Embedding(7, 2, embeddings_initializer=zoo.seeded(1))(inputs)
        x = keras.layers.Flatten()(x)
        model = keras.Model(inputs, keras.layers.Dense(1, kernel_initializer=zoo.seeded(2))(x))
        model.compile(keras.optimizers.RMSprop(0.1, **options), "mse", jit_compile=False)
        return model

    fit = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}
    model = zoo.trace_once(build())
    model.fit(tokens, y, **fit)
    trainer = tfdist.Trainer(build, strategy=zoo.STRATEGIES[strategy]())
    trainer.fit(tokens, y, **fit)
    for mine, other in zip(trainer.model.weights, model.get_weights(), strict=True):
        np.testing.assert_allclose(mine.numpy(), other, rtol=1e-9, atol=1e-11)
