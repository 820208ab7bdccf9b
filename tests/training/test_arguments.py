"""Arguments from Python are checked as flags are: one line that names the argument."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tfdist.errors import TfdistError

X = np.ones((16, 4), np.float32)
Y = X.sum(1, keepdims=True)


def _build():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


@pytest.fixture(scope="module")
def trainer():
    return tfdist.Trainer(_build)


BAD_FIT = [
    ({"steps_per_epoch": 1.5}, "`steps_per_epoch=1.5` is not a whole number"),
    ({"steps_per_epoch": "2"}, "`steps_per_epoch=2` is not a whole number"),
    ({"validation_data": (X, Y), "validation_steps": 0.5}, "`validation_steps=0.5` is not a whole"),
    ({"checkpoint_every": -5}, "`checkpoint_every=-5` is too small: give 0 or more"),
    ({"checkpoint_every": 1.5}, "`checkpoint_every=1.5` is not a whole number"),
    ({"checkpoint_every": "90s"}, "`checkpoint_every=90s` is not a whole number"),
    ({"checkpoint_every": True}, "`checkpoint_every=True` is not a whole number"),
    ({"checkpoint_every_s": -1}, "`checkpoint_every_s=-1.0` is too small"),
    ({"checkpoint_every_s": "1"}, "`checkpoint_every_s=1` is not a number"),
    ({"max_steps": -3}, "`max_steps=-3` is too small: give 1 or more"),
    ({"max_steps": 0}, "`max_steps=0` is too small"),
    ({"batch_size": -4}, "`batch_size=-4` is too small"),
    ({"batch_size": 0}, "`batch_size=0` is too small"),
    ({"batch_size": 2.5}, "`batch_size=2.5` is not a whole number"),
    ({"global_batch_size": 0}, "`global_batch_size=0` is too small"),
    ({"batch_size": 4, "global_batch_size": 8}, "two names for the examples per step"),
    ({"validation_batch_size": -1}, "`validation_batch_size=-1` is too small"),
    ({"epochs": -1}, "`epochs=-1` is too small"),
    ({"epochs": "3"}, "`epochs=3` is not a whole number"),
    ({"epochs": None}, "`epochs=None` is not a whole number"),
    ({"initial_epoch": -1}, "`initial_epoch=-1` is too small"),
    ({"validation_split": 1.5}, "`validation_split=1.5` is too large"),
    ({"validation_freq": 0}, "`validation_freq=0` says no epochs"),
    ({"validation_freq": "2"}, "`validation_freq=2` says no epochs"),
    ({"verbose": "yes"}, "`verbose=yes` is unknown"),
    ({"verbose": -1}, "`verbose=-1` is unknown"),
    ({"class_weight": [1, 2]}, "`class_weight` is a list. Give a dictionary"),
    ({"class_weight": "balanced"}, "`class_weight` is a str. Give a dictionary"),
    ({"callbacks": "x"}, "`callbacks` contains 'x', which is not a callback"),
    ({"callbacks": [1]}, "`callbacks` contains 1, which is not"),
    ({"callbacks": [None]}, "`callbacks` contains None, which is not"),
    ({"callbacks": keras.callbacks.History}, "`callbacks` contains the class History, which"),
    ({"sample_weight": np.ones(3)}, "same number of samples"),
    ({"sample_weight": "x"}, "Unrecognized data type"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_FIT)
def test_fit_refuses_in_one_line(trainer, arguments, message):
    with pytest.raises(TfdistError, match=message) as error:
        trainer.fit(X, Y, **{"verbose": 0, **arguments})
    assert "\n" not in str(error.value)
    assert int(trainer.model.optimizer.iterations) == 0


def test_a_validation_without_labels_is_refused_once_it_begins_as_in_keras():
    with pytest.raises(TfdistError, match="Cannot compute the loss without labels. Give y;"):
        tfdist.Trainer(_build).fit(X, Y, validation_data=(X,), verbose=0)


@pytest.mark.parametrize("method", ["evaluate", "predict"])
@pytest.mark.parametrize(
    "arguments",
    [
        {"batch_size": -4},
        {"batch_size": 4, "global_batch_size": 8},
        {"verbose": "no"},
        {"steps": 1.5},
        {"steps": "2"},
        {"callbacks": "x"},
        {"callbacks": [1]},
    ],
)
def test_evaluate_and_predict_refuse_too(trainer, method, arguments):
    with pytest.raises(TfdistError, match="too small|two names|unknown|not a whole|not a callback"):
        getattr(trainer, method)(X, **{"verbose": 0, **arguments})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"keep_checkpoints": 0}, "`keep_checkpoints=0` is too small"),
        ({"keep_checkpoints": -1}, "`keep_checkpoints=-1` is too small"),
        ({"keep_checkpoints": 1.5}, "`keep_checkpoints=1.5` is not a whole number"),
        ({"seed": -1}, "`seed=-1` is too small"),
        ({"seed": 2**31}, "`seed=2147483648` is too large"),
        ({"seed": "1"}, "`seed=1` is not a whole number"),
        ({"checkpoint_dir": 3}, "`checkpoint_dir=3` is not a text"),
        ({"step_options": {"micro_batches": 2}}, "is a dict. Give a StepOptions"),
        ({"placement": "layers"}, "is a str. Give a Placement"),
    ],
)
def test_a_trainer_refuses_in_one_line(arguments, message):
    with pytest.raises(TfdistError, match=message):
        tfdist.Trainer(_build, **arguments)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: tfdist.StepOptions(micro_batches=1.5), "`micro_batches=1.5` is not a whole"),
        (lambda: tfdist.StepOptions(micro_batches="2"), "`micro_batches=2` is not a whole"),
        (lambda: tfdist.StepOptions(micro_batches=True), "`micro_batches=True` is not a whole"),
        (lambda: tfdist.StepOptions(jit_compile="no"), "`jit_compile=no` is not true or false"),
        (lambda: tfdist.StepOptions(jit_compile=1), "`jit_compile=1` is not true or false"),
        (lambda: tfdist.StepOptions(check=True), "`check=True` is not a text"),
        (lambda: tfdist.placement.Layers(devices=-1), "`devices=-1` is too small"),
        (lambda: tfdist.placement.Layers(devices=2.5), "`devices=2.5` is not a whole"),
        (lambda: tfdist.strategies.Mirrored(devices="GPU:0"), "`devices=GPU:0` is not a list"),
        (lambda: tfdist.strategies.LocalSgd(sync_every=0), "`sync_every=0` is too small"),
        (lambda: tfdist.strategies.LocalSgd(sync_every=2.5), "`sync_every=2.5` is not a whole"),
    ],
)
def test_options_from_python_have_types(make, message):
    with pytest.raises(TfdistError, match=message):
        make()


@pytest.mark.parametrize("method", ["train_on_batch", "test_on_batch", "predict_on_batch"])
@pytest.mark.parametrize("batch", [None, 3, [[1.0]], "x", tf.data.Dataset.from_tensors(X)], ids=str)
def test_a_single_batch_is_an_array(trainer, method, batch):
    """Keras refuses them, too, in many lines."""
    model = _build()
    with pytest.raises((ValueError, TypeError, AttributeError)):
        getattr(model, method)(batch)
    with pytest.raises(TfdistError, match="Cannot use a .* as a batch. Give arrays"):
        getattr(trainer, method)(batch)


def test_what_keras_takes_for_nothing_is_taken_for_nothing():
    options = {"verbose": None, "validation_split": None, "shuffle": []}
    found = tfdist.Trainer(_build).fit(X, Y, **options).history
    assert list(found) == list(_build().fit(X, Y, **options).history)


def test_numbers_of_numpy_and_paths_are_accepted(tmp_path):
    options = tfdist.StepOptions(micro_batches=np.int64(2), jit_compile=np.bool_(False))
    assert type(options.micro_batches) is int
    assert options.jit_compile is False
    assert tfdist.strategies.Mirrored(devices=["GPU:0"]).devices == ("GPU:0",)
    trainer = tfdist.Trainer(_build, checkpoint_dir=tmp_path, keep_checkpoints=np.int32(2))
    trainer.fit(
        X, Y, batch_size=np.int64(4), global_batch_size=4, epochs=np.int64(2), verbose=False,
        checkpoint_every=np.int64(2), checkpoint_every_s=np.float32(60),
    )  # fmt: skip
    assert trainer.step == 8
    assert len(list(tmp_path.glob("step-*"))) == 2


def test_an_epoch_beyond_the_last_trains_nothing_as_in_keras():
    trainer = tfdist.Trainer(_build)
    for options in ({"epochs": 2, "initial_epoch": 3}, {"epochs": 0}):
        assert trainer.fit(X, Y, verbose=0, **options).epoch == []
        assert _build().fit(X, Y, verbose=0, **options).epoch == []
    assert int(trainer.model.optimizer.iterations) == 0


def test_predictions_show_their_progress_as_in_keras(capsys):
    model = _build()
    model.predict(X)
    expected = capsys.readouterr().out
    tfdist.Trainer(model).predict(X)
    found = capsys.readouterr().out
    assert "1/1" in expected
    assert "1/1" in found
