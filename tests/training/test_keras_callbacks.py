"""Callbacks are called when, and with what, Keras's own methods call them."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests import zoo
from tests.training.programs import X, Y, dense

EVENTS = [
    name
    for name in dir(keras.callbacks.Callback)
    if name.startswith("on_") and name not in ("on_batch_begin", "on_batch_end")
]


class Record(keras.callbacks.Callback):
    """Notes every call: its name, its number, and the keys of its logs."""

    def __init__(self):
        super().__init__()
        self.calls = []
        for event in EVENTS:
            setattr(self, event, self._make(event))

    def _make(self, event):
        def call(*arguments, logs=None):
            numbers = [number for number in arguments if isinstance(number, (int, np.integer))]
            logs = logs or next((a for a in arguments if isinstance(a, dict)), None)
            self.calls.append((event, *numbers, logs and sorted(logs)))

        return call


def _generate():
    for start in range(0, 32, 8):
        yield X[start : start + 8], Y[start : start + 8]


def _from_generator():
    spec = (tf.TensorSpec((None, 6)), tf.TensorSpec((None, 2)))
    return tf.data.Dataset.from_generator(_generate, output_signature=spec)


class Pages(keras.utils.PyDataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return X[index * 8 : index * 8 + 8], Y[index * 8 : index * 8 + 8]


DATA = {
    "arrays": lambda: {"x": X, "y": Y, "batch_size": 12},
    "dataset": lambda: {"x": tf.data.Dataset.from_tensor_slices((X, Y)).batch(12)},
    "dataset of unknown length": lambda: {"x": _from_generator()},
    "generator": lambda: {"x": _generate()},
    "pages": lambda: {"x": Pages()},
}


def _fit(model, data, **options):
    given = data()
    validation = (X, Y) if "y" in given else data()["x"]
    epochs = 1 if data is DATA["generator"] else 2  # a generator ends with its first epoch
    model.fit(**given, validation_data=validation, epochs=epochs, shuffle=False, **options)


def _predict(model, data, **options):
    given = data()
    given.pop("y", None)
    model.predict(**given, **options)


CALLS = {
    "fit": _fit,
    "evaluate": lambda model, data, **options: model.evaluate(**data(), **options),
    "evaluate some": lambda model, data, **options: model.evaluate(**data(), steps=2, **options),
    "evaluate more": lambda model, data, **options: model.evaluate(**data(), steps=9, **options),
    "predict": _predict,
    "predict some": lambda model, data, **options: _predict(model, data, steps=2, **options),
    "predict more": lambda model, data, **options: _predict(model, data, steps=9, **options),
}


def _record(model, name, data):
    record = Record()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Keras: the data ran out
        CALLS[name](model, data, callbacks=[record], verbose=0)
    return record.calls


def _build():
    return dense(metrics=["mae"])


# Every call and every kind of data comes once or more among the first.
CASES = [(data, strategy) for strategy in ("mirrored-2", "one_device") for data in DATA]


@pytest.mark.thorough(keep=7)
@pytest.mark.parametrize(
    ("name", "data_name", "strategy_name"),
    [(name, *case) for name, case in zoo.take_turns(CALLS, CASES)],
)
def test_the_calls_are_keras_s(name, data_name, strategy_name):
    expected = _record(zoo.trace_once(_build()), name, DATA[data_name])
    trainer = tfdist.Trainer(_build, strategy=zoo.STRATEGIES[strategy_name]())
    assert _record(trainer, name, DATA[data_name]) == expected
    assert len(expected) > 4


@pytest.mark.parametrize("data_name", ["dataset", "dataset of unknown length"])
def test_training_that_a_callback_ends_takes_no_further_step(data_name):
    """It ends with the last batch of the second epoch."""

    class Stop(keras.callbacks.Callback):
        count = 0

        def on_train_batch_end(self, batch, logs=None):
            self.count += 1
            self.model.stop_training = self.count == len(batches) * 2

    batches = list(DATA[data_name]()["x"])

    def fit(model):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Keras: the data ran out
            model.fit(DATA[data_name]()["x"], epochs=4, callbacks=[Stop()], verbose=0)
        return int(getattr(model, "model", model).optimizer.iterations.numpy())

    assert fit(tfdist.Trainer(_build)) == fit(_build())


@pytest.mark.parametrize("name", ["evaluate", "predict"])
def test_a_callback_may_end_an_evaluation_or_a_prediction(name):
    class Stop(keras.callbacks.Callback):
        def on_test_batch_end(self, batch, logs=None):
            self.model.stop_evaluating = batch == 1

        def on_predict_batch_end(self, batch, logs=None):
            self.model.stop_predicting = batch == 1

    def call(model):
        data = (X, Y) if name == "evaluate" else (X,)
        return getattr(model, name)(*data, batch_size=8, callbacks=[Stop()], verbose=0)

    np.testing.assert_allclose(call(tfdist.Trainer(_build)), call(_build()), rtol=1e-6)


def test_each_fit_has_its_own_history():
    def fit(model):
        first = model.fit(X, Y, epochs=2, verbose=0, shuffle=False)
        kept = dict(first.history)
        second = model.fit(X, Y, epochs=1, verbose=0, shuffle=False)
        assert first is not second
        assert first.history == kept
        assert (first.epoch, second.epoch) == ([0, 1], [0])
        assert getattr(model, "model", model).history is second
        return first.history, second.history

    trainer = tfdist.Trainer(_build)
    assert fit(trainer) == fit(_build())
    assert trainer.history is trainer.model.history


def test_the_user_s_history_is_used():
    def fit(model):
        history = keras.callbacks.History()
        for _ in range(2):
            found = model.fit(X, Y, verbose=0, shuffle=False, callbacks=[[history]])
            assert found is history
        return history.history, history.epoch

    found = fit(tfdist.Trainer(_build))
    assert found == fit(_build())
    assert len(found[0]["loss"]) == 2


def test_the_logs_of_a_test_batch_are_those_so_far():
    seen = []
    watch = keras.callbacks.LambdaCallback()
    watch.on_test_batch_end = lambda batch, logs=None: seen.append(logs)
    logs = tfdist.Trainer(_build, strategy=zoo.STRATEGIES["mirrored-2"]()).evaluate(
        X, Y, batch_size=8, callbacks=[watch], verbose=0, return_dict=True
    )
    assert len(seen) == 4
    assert seen[-1] == pytest.approx(logs)
    expected = _build().evaluate(X[:8], Y[:8], verbose=0, return_dict=True)
    assert seen[0] == pytest.approx(expected, rel=1e-5)


def test_callbacks_are_called_once_an_execution():
    def build():
        model = _build()
        model.compile(model.optimizer, "mse", steps_per_execution=3)
        return model

    options = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}
    found = []
    for model in (tfdist.Trainer(build), build()):
        record = Record()
        history = model.fit(X, Y, callbacks=[record], **options).history
        ends = [call[1] for call in record.calls if call[0] == "on_train_batch_end"]
        found.append((history, ends))
    assert found[0] == found[1]
    assert ends == [2, 5] * 2
