"""`fused_layers`: Keras's layers on TensorFlow's fused kernels, equal up to rounding."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests import zoo
from tests.training.programs import Smooth
from tfdist.internals import lstm_module

L = keras.layers
RNG = np.random.default_rng(0)
SEQUENCES = RNG.normal(size=(22, 6, 5)).astype("float32")
PICTURES = RNG.normal(2.0, 3.0, size=(22, 6, 5, 3)).astype("float32")
Y = RNG.normal(size=(22, 2)).astype("float32")


def pass_states(x):
    sequence, *states = L.LSTM(4, return_sequences=True, return_state=True)(x)
    return L.LSTM(4)(L.Dropout(0.2)(sequence), initial_state=states)


FUSED = {
    "last output": lambda x: L.LSTM(4)(x),
    "sequences": lambda x: L.Flatten()(L.LSTM(4, return_sequences=True)(x)),
    "states": pass_states,
    "backwards": lambda x: L.Flatten()(L.LSTM(4, return_sequences=True, go_backwards=True)(x)),
    "both directions": lambda x: L.Bidirectional(L.LSTM(4))(x),
    "no bias": lambda x: L.LSTM(4, use_bias=False, unit_forget_bias=False)(x),
    "dropout": lambda x: L.LSTM(4, dropout=0.3, seed=3)(x),
    "own layer": lambda x: L.RNN(L.LSTMCell(3), return_sequences=True)(x)[:, 0] + L.LSTM(3)(x),
}
AS_IN_KERAS = {
    "mask": lambda x: L.LSTM(4)(L.Masking()(x)),
    "activation": lambda x: L.LSTM(4, activation="relu")(x),
    "gates": lambda x: L.LSTM(4, recurrent_activation="hard_sigmoid")(x),
    "recurrent dropout": lambda x: L.LSTM(4, recurrent_dropout=0.3, seed=3)(x),
    "unrolled": lambda x: L.LSTM(4, unroll=True)(x),
    "GRU": lambda x: L.GRU(4)(x),
    "not asked for": lambda x: L.LSTM(4, use_cudnn=False)(x),
}


def run(
    between,
    x=SEQUENCES,
    *,
    strategy="one_device",
    policy="float32",
    cls=keras.Model,
    batch=7,
    **options,
):
    """Trains, and returns losses, weights, and predictions."""

    def build():
        keras.utils.set_random_seed(0)
        keras.config.set_dtype_policy(policy)
        inputs = keras.Input(x.shape[1:])
        model = cls(inputs, L.Dense(2)(between(inputs)))
        model.compile(keras.optimizers.SGD(0.03), "mse", jit_compile=False)
        keras.config.set_dtype_policy("float32")
        return model

    trainer = tfdist.Trainer(
        build,
        strategy=zoo.STRATEGIES[strategy](),
        step_options=tfdist.StepOptions(check="off", **options),
    )
    # By default, the last batch has one example, so that a replica has none.
    history = trainer.fit(x, Y, batch_size=batch, epochs=3, shuffle=False, verbose=0)
    return [history.history["loss"], *trainer.model.get_weights(), trainer.predict(x, verbose=0)]


@functools.cache
def run_keras_s_kernels(name, batch=7):
    return run(FUSED[name], batch=batch)


def assert_close(found, expected):
    for mine, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-4, atol=2e-5)


@pytest.fixture
def blocks(monkeypatch):
    """The calls of TensorFlow's LSTM."""
    calls = []
    original = tf.raw_ops.BlockLSTM

    def record(**options):
        calls.append(options)
        return original(**options)

    monkeypatch.setattr(tf.raw_ops, "BlockLSTM", record)
    return calls


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize(("name", "strategy"), zoo.take_turns(FUSED, ["mirrored-2", "one_device"]))
def test_lstm_is_equal(name, strategy, blocks):
    expected = run_keras_s_kernels(name)
    assert not blocks
    assert_close(run(FUSED[name], strategy=strategy, fused_layers=True), expected)
    assert blocks


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize("name", AS_IN_KERAS)
def test_lstm_without_a_kernel_is_keras_s_to_the_bit(name, blocks):
    expected = run(AS_IN_KERAS[name])
    for mine, other in zip(run(AS_IN_KERAS[name], fused_layers=True), expected, strict=True):
        np.testing.assert_array_equal(mine, other)
    assert not blocks


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("policy", ["float64", "mixed_bfloat16"])
def test_lstm_in_another_precision_is_keras_s_to_the_bit(policy, blocks):
    expected = run(FUSED["sequences"], policy=policy)
    found = run(FUSED["sequences"], policy=policy, fused_layers=True)
    for mine, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(mine, other)
    assert not blocks


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize(
    "options", [{"micro_batches": 2}, {"steps_per_loop": 2}, {"rematerialize": True}], ids=str
)
def test_lstm_is_equal_with_other_options(options, blocks):
    expected = run_keras_s_kernels("both directions", batch=11)
    assert not blocks
    found = run(FUSED["both directions"], batch=11, fused_layers=True, **options)
    assert_close(found, expected)
    assert blocks


def test_xla_has_no_kernel(blocks):
    found = run(FUSED["last output"], fused_layers=True, jit_compile=True)
    assert_close(found, run_keras_s_kernels("last output"))
    assert not blocks


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize(
    ("batch_norm", "strategy"),
    [
        *(("global", "one_device"), ("per_replica", "mirrored-2")),
        *(("global", "mirrored-2"), ("per_replica", "one_device")),
    ],
)
def test_batch_normalization_is_equal(batch_norm, strategy, monkeypatch):
    between = lambda x: L.Flatten()(L.BatchNormalization(momentum=0.7)(L.Conv2D(4, 3)(x)))  # noqa: E731
    expected = run(between, PICTURES, strategy=strategy, batch_norm=batch_norm)
    calls = []
    original = tf.raw_ops.FusedBatchNormV3
    monkeypatch.setattr(
        tf.raw_ops, "FusedBatchNormV3", lambda **o: calls.append(o) or original(**o)
    )
    options = {"strategy": strategy, "batch_norm": batch_norm, "fused_layers": True}
    assert_close(run(between, PICTURES, **options), expected)
    assert calls


def test_the_gradient_of_a_gradient_is_refused_by_tensorflow():
    with pytest.raises(LookupError, match="BlockLSTMGrad"):
        run(FUSED["last output"], cls=Smooth, fused_layers=True)


def test_keras_s_layers_are_as_before():
    before = L.BatchNormalization.call, lstm_module.lstm
    run(FUSED["last output"], fused_layers=True)
    assert (L.BatchNormalization.call, lstm_module.lstm) == before
