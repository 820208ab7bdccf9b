"""Epochs, steps and calls of callbacks are Keras's, whatever the data and the steps asked for."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests import zoo
from tfdist.errors import TfdistError, TrainingError
from tfdist.training.step.model_variables import hash_weights

pytestmark = pytest.mark.filterwarnings("ignore:Your input ran out of data")

RANDOM = np.random.default_rng(0)
X, Y = RANDOM.random((22, 3)).astype("float32"), RANDOM.random((22, 1)).astype("float32")
BATCHES = [(X[first : first + 4], Y[first : first + 4]) for first in range(0, 20, 4)]


class Pages(keras.utils.PyDataset):
    """Batches whose number changes from pass to pass."""

    def __init__(self):
        super().__init__()
        self._passes = 0

    @property
    def num_batches(self):
        return [5, 5, 3, 6][min(self._passes, 3)]

    def __getitem__(self, index):
        return BATCHES[index % 5]

    def on_epoch_end(self):
        self._passes += 1


def make_varying():
    """Returns a dataset whose passes have 5, 3, 6 and 4 batches."""
    passes = iter([5, 3, 6, 4] * 3)
    return tf.data.Dataset.from_generator(
        lambda: (BATCHES[number % 5] for number in range(next(passes))),
        output_signature=(tf.TensorSpec((None, 3)), tf.TensorSpec((None, 1))),
    )


def batches():
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(4)


DATA = {
    "arrays": lambda: (X, Y),
    "known": lambda: (batches(),),
    "unknown": lambda: (batches().unbatch().shuffle(22, seed=3).batch(4),),
    "endless": lambda: (batches().repeat(),),
    "ending": lambda: ((BATCHES[number % 5] for number in range(7)),),
    "pages": lambda: (Pages(),),
    "varying": lambda: (make_varying(),),
}
VALIDATION = {
    "none": dict,
    "arrays": lambda: {"validation_data": (X[:9], Y[:9])},
    "unknown": lambda: {"validation_data": batches().filter(lambda *_: True)},
    "fewer": lambda: {"validation_data": batches(), "validation_steps": 2},
    "more": lambda: {"validation_data": batches(), "validation_steps": 9},
}
# Data, steps per epoch, steps per execution, validation, first epoch. Each kind of data first once.
CASES = [
    ("arrays", 4, 1, "arrays", 0),
    ("known", 4, 3, "unknown", 0),
    ("unknown", None, 3, "arrays", 1),
    ("endless", 4, 3, "more", 0),
    ("ending", 8, 1, "arrays", 0),
    ("pages", None, 1, "fewer", 0),
    ("varying", None, 1, "none", 0),
    ("arrays", 8, 3, "fewer", 1),
    ("known", -1, 1, "more", 0),
    ("arrays", -1, 3, "none", 0),
    ("unknown", 4, 1, "none", 0),
    ("unknown", 6, 1, "fewer", 0),
    ("unknown", 8, 3, "unknown", 0),
    ("ending", 4, 3, "none", 1),
    ("ending", None, 1, "none", 0),
    ("pages", 4, 3, "arrays", 0),
    ("varying", None, 3, "arrays", 0),
    ("varying", 4, 1, "more", 1),
]


class Calls(keras.callbacks.Callback):
    """Notes the calls of its methods, with the numbers of the batches."""

    def __init__(self):
        super().__init__()
        self.calls = []
        for kind in ("train", "test", "predict"):
            for event in (f"on_{kind}_batch_begin", f"on_{kind}_batch_end"):
                setattr(
                    self, event, lambda batch, logs=None, e=event: self.calls.append((e, batch))
                )

    def _note(self, event, batch):
        self.calls.append((event, batch))

    def on_train_begin(self, logs=None):
        self.calls.append(self.params["steps"])

    def on_epoch_end(self, epoch, logs=None):
        self.calls.append(("epoch", epoch))


def build(steps_per_execution=1):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, kernel_initializer="ones")])
    model.compile(keras.optimizers.Adam(0.01), "mse", steps_per_execution=steps_per_execution)
    return model


def make(strategy_name, *arguments, **options):
    strategy = zoo.STRATEGIES[strategy_name]()
    return tfdist.Trainer(lambda: build(*arguments), strategy=strategy, **options)


def fit(model, data, steps, validation="none", first=0, epochs=3):
    """Returns the epochs, the calls, the optimizer's count, and the history."""
    calls, options = Calls(), VALIDATION[validation]()
    if data == "arrays":
        options["batch_size"] = 4
    history = model.fit(
        *DATA[data](),
        steps_per_epoch=steps,
        epochs=epochs,
        initial_epoch=first,
        shuffle=False,
        verbose=0,
        callbacks=[calls],
        **options,
    )
    optimizer = getattr(model, "model", model).optimizer
    return (history.epoch, calls.calls, int(optimizer.iterations.numpy())), history.history


@functools.cache
def fit_keras(data, steps, at_a_time, *others):
    return fit(zoo.trace_once(build(at_a_time)), data, steps, *others)


@pytest.mark.thorough(keep=7)
@pytest.mark.parametrize(
    ("case", "strategy_name"),
    zoo.take_turns(CASES, ["mirrored-2", "one_device"]),
    ids=lambda case: case if isinstance(case, str) else "-".join(map(str, case)),
)
def test_epochs_are_those_of_keras(case, strategy_name):
    data, steps, at_a_time, *others = case
    expected, losses = fit_keras(*case)
    found, history = fit(make(strategy_name, at_a_time), data, steps, *others)
    assert found == expected
    assert history.keys() == losses.keys()
    for name, values in losses.items():
        if strategy_name == "one_device":
            assert history[name] == values
        np.testing.assert_allclose(history[name], values, rtol=1e-5)


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize(
    ("data", "at_a_time"), zoo.take_turns(["arrays", "unknown", "known", "pages"], [1, 3])
)
def test_evaluation_and_prediction_take_the_steps_of_keras(data, at_a_time):
    found = []
    for model in (build(at_a_time), make("one_device", at_a_time)):
        for steps in (None, 4, 9, -1):
            if (data, steps) == ("arrays", -1):
                continue  # Keras computes a negative batch size
            calls = Calls()
            loss = model.evaluate(*DATA[data](), steps=steps, callbacks=[calls], verbose=0)
            x = X if data == "arrays" else DATA[data]()[0]
            outputs = model.predict(x, steps=steps, callbacks=[calls], verbose=0)
            found.append((loss, outputs.tolist(), calls.calls))
    half = len(found) // 2
    assert found[half:] == found[:half]


def use_within_limits(model):
    epochs = fit(model, "known", None)
    losses = model.evaluate(X, Y, batch_size=4, verbose=0)
    return epochs, losses, model.predict(X, batch_size=4, verbose=0).shape


def test_limits_of_the_configuration_hold():
    found = []
    keras.config.set_max_epochs(2)
    keras.config.set_max_steps_per_epoch(3)
    try:
        for model in (build(), make("one_device")):
            with pytest.warns(UserWarning, match="Limiting") as caught:
                used = use_within_limits(model)
            # Keras 3.13's variables give another one where NumPy 2 makes arrays of them.
            said = [str(warning.message) for warning in caught]
            found.append((used, [line for line in said if line.startswith("Limiting")]))
    finally:
        keras.config.set_max_epochs(None)
        keras.config.set_max_steps_per_epoch(None)
    assert found[0] == found[1]
    assert used[2] == (12, 1)


@functools.cache
def fit_whole(data, steps):
    trainer = make("one_device")
    return fit(trainer, data, steps, epochs=4), hash_weights(trainer.model)


# Each kind of data with one stop, and all the others.
@pytest.mark.thorough(keep=3)
@pytest.mark.parametrize(
    ("data", "steps", "stop_after"),
    [
        *(("varying", None, 5), ("known", 4, 7), ("unknown", 4, 3), ("varying", None, 10)),
        *(("varying", None, 3), ("varying", None, 7)),
        *(("known", 4, 3), ("known", 4, 5), ("known", 4, 10)),
        *(("unknown", 4, 5), ("unknown", 4, 7), ("unknown", 4, 10)),
    ],
)
def test_a_run_of_uneven_epochs_continues(tmp_path, data, steps, stop_after):
    expected, weights = fit_whole(data, steps)
    stopped, continued = (make("one_device", checkpoint_dir=str(tmp_path)) for _ in range(2))
    options = {"steps_per_epoch": steps, "epochs": 4, "verbose": 0}
    stop = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: (
            stopped.request_stop() if stopped.step == stop_after else None
        )
    )
    stopped.fit(*DATA[data](), callbacks=[stop], **options)
    history = continued.fit(*DATA[data](), **options)
    assert continued.progress.resumed_from_step == stop_after
    assert hash_weights(continued.model) == weights
    assert (history.epoch, history.history) == (expected[0][0], expected[1])


def test_terminate_on_nan_ends_training_and_checkpoints_stay_finite(tmp_path):
    y = Y.copy()
    y[13] = np.nan
    options = {"batch_size": 4, "epochs": 3, "shuffle": False, "verbose": 0}
    found = []
    for model in (build(), make("one_device", checkpoint_dir=str(tmp_path))):
        end = keras.callbacks.TerminateOnNaN()
        history = (
            model.fit(X, y, callbacks=[end], checkpoint_every=2, **options)
            if found
            else (model.fit(X, y, callbacks=[end], **options))
        )
        found.append((history.epoch, str(history.history)))
    assert found[0] == found[1]
    continued = make("one_device", checkpoint_dir=str(tmp_path))
    continued.fit(X, y, callbacks=[keras.callbacks.TerminateOnNaN()], **options)
    assert continued.progress.resumed_from_step == 2
    with pytest.raises(TrainingError, match="loss of step 4 is nan"):
        make("one_device").fit(X, y, **options)


class TakeBack(keras.callbacks.Callback):
    """Takes back a step whose loss is not finite, and goes on, or ends training."""

    def __init__(self, *, goes_on):
        super().__init__()
        self._goes_on = goes_on

    def on_train_batch_begin(self, batch, logs=None):
        self._weights = self.model.get_weights()

    def on_train_batch_end(self, batch, logs=None):
        if not np.isfinite(logs["loss"]):
            self.model.set_weights(self._weights)
            self.model.stop_training = not self._goes_on


def end_if_nan(model):
    def end(batch, logs):
        model.stop_training |= bool(np.isnan(logs["loss"]))

    return keras.callbacks.LambdaCallback(on_train_batch_end=end)


HANDLERS = {
    "takes back": lambda model: TakeBack(goes_on=True),
    "takes back and ends": lambda model: TakeBack(goes_on=False),
    "ends": end_if_nan,
}


@pytest.mark.parametrize("strategy_name", ["one_device", "mirrored-2"])
@pytest.mark.parametrize("handler", HANDLERS)
def test_a_callback_handles_a_loss_that_is_not_finite(strategy_name, handler):
    y = Y.copy()
    y[13] = np.nan
    found = []
    for trainer in (build(), make(strategy_name)):
        model = getattr(trainer, "model", trainer)
        trainer.compile("sgd", "mse")  # without moments, which stay NaN
        options = {"batch_size": 4, "epochs": 2, "shuffle": False, "verbose": 0}
        history = trainer.fit(X, y, callbacks=[HANDLERS[handler](model)], **options)
        found.append((history.epoch, [history.history["loss"], *model.get_weights()]))
    assert found[0][0] == found[1][0]
    for expected, values in zip(found[0][1], found[1][1], strict=True):
        np.testing.assert_allclose(values, expected, rtol=1e-5)


@pytest.mark.parametrize("at_a_time", [1, 3])
def test_a_callback_sees_a_loss_that_is_not_finite_before_the_error(at_a_time):
    class RefusedError(Exception):
        pass

    def refuse(batch, logs):
        if np.isnan(logs["loss"]):
            raise RefusedError

    y = Y.copy()
    y[13] = np.nan
    trainer = make("one_device", at_a_time)
    callback = keras.callbacks.LambdaCallback(on_train_batch_end=refuse)
    with pytest.raises(RefusedError):
        trainer.fit(X, y, batch_size=4, shuffle=False, verbose=0, callbacks=[callback])


def test_refuses_a_dataset_that_is_already_distributed():
    trainer = make("mirrored-2")
    distribute = trainer.strategy.experimental_distribute_dataset
    for use in (
        lambda: trainer.fit(distribute(batches()), verbose=0),
        lambda: trainer.evaluate(distribute(batches()), verbose=0),
        lambda: trainer.predict(distribute(batches().map(lambda x, y: x))),
        lambda: trainer.fit(
            trainer.strategy.distribute_datasets_from_function(lambda context: batches()),
            steps_per_epoch=2,
        ),
    ):
        with pytest.raises(TfdistError, match="a dataset that is already distributed"):
            use()
