"""Data that do not fit the model cost one line, under every strategy."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests import zoo
from tests.training.programs import X
from tfdist.errors import TfdistError

Y = np.arange(32) % 3


def _build():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3, name="last")])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def _build_table():
    layers = [keras.layers.Embedding(10, 4), keras.layers.Flatten(), keras.layers.Dense(3)]
    model = keras.Sequential([keras.Input((6,), dtype="int32"), *layers])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


CASES = {
    "labels": (_build, (X, Y + 5), "Cannot use the label .: the model has 3 outputs"),
    "shape": (
        _build,
        (X[:, :4], Y),
        "the layer 'last' expected axis -1 of input shape to have value 6",
    ),
    "indices": (
        _build_table,
        (np.full((32, 6), 37), Y),
        "Cannot look up the index 37: the table has 10 rows",
    ),
    "single examples": (
        _build,
        (tf.data.Dataset.from_tensor_slices((X, Y)),),
        r"Call \.batch\(batch_size\) on it",
    ),
    "examples of two sizes": (
        _build,
        (tf.data.Dataset.from_tensor_slices((X, np.eye(3, dtype="f4")[Y])),),
        r"[Cc]all \.batch\((global_)?batch_size\) on (it|the dataset)",
    ),
    "examples without labels": (
        _build,
        (tf.data.Dataset.from_tensor_slices(X),),
        r"single examples, call \.batch\(batch_size\) on the dataset",
    ),
    "no labels": (_build, (X,), "Cannot compute the loss without labels"),
}


@pytest.mark.thorough(keep=len(CASES))
@pytest.mark.parametrize(
    ("name", "strategy_name"),
    zoo.take_turns(CASES, ["mirrored-2", "one_device", "central_storage-2"]),
)
def test_data_that_do_not_fit_cost_one_line(strategy_name, name):
    build, data, message = CASES[name]
    strategy = zoo.STRATEGIES[strategy_name]()
    calls = ["fit", "evaluate"] if name != "examples without labels" else []
    calls += ["predict"] if name in ("shape", "indices") or not calls else []
    for call in calls:
        trainer = tfdist.Trainer(build, strategy=strategy)
        with pytest.raises(TfdistError, match=message) as caught:
            getattr(trainer, call)(*data[: 1 if call == "predict" else None], verbose=0)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["labels", "indices"])
def test_the_guard_sees_them_first(name):
    build, data, message = CASES[name]
    trainer = zoo.make_trainer(build, strategy=zoo.STRATEGIES["mirrored-2"](), check="on")
    with pytest.raises(TfdistError, match=f"^{message}"):
        trainer.fit(*data, verbose=0)


def test_an_error_of_a_callback_stays_its_own():
    def fail(batch, logs):
        raise ValueError("mine")

    trainer = tfdist.Trainer(_build)
    failing = keras.callbacks.LambdaCallback(on_train_batch_end=fail)
    with pytest.raises(ValueError, match="^mine$"):
        trainer.fit(X, Y, callbacks=[failing], verbose=0)


def test_a_training_error_is_an_error_of_tfdist():
    assert issubclass(tfdist.TrainingError, tfdist.TfdistError)
    assert issubclass(tfdist.TrainingError, RuntimeError)
    assert (tfdist.TfdistError.exit_status, tfdist.TrainingError.exit_status) == (2, 1)
