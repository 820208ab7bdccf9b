"""A model's own `make_train_function`: on one device Keras's call of it, elsewhere refused."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests import zoo
from tfdist.errors import TfdistError

X = np.random.default_rng(0).normal(size=(26, 3)).astype("f4")
Y = X.sum(1, keepdims=True)


class Repeats(keras.Sequential):
    """Trains twice on each batch, doubles predictions, and counts its calls."""

    def make_train_function(self, force=False):
        if self.train_function is None or force:

            @tf.function
            def train_twice(iterator):
                data = next(iterator)
                self.train_step(data)
                return self.train_step(data)

            self.train_function = train_twice

    made = 0

    def make_predict_function(self, force=False):
        self.made += 1

        @tf.function
        def predict(batches):
            return 2 * self.predict_step(batches[0])

        self.predict_function = predict


def build():
    keras.utils.set_random_seed(0)
    model = Repeats(
        [keras.layers.Dense(4, "relu"), keras.layers.Dropout(0.3), keras.layers.Dense(1)]
    )
    model.compile("adam", "mse", metrics=["mae"])
    return model


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("strategy", [None, "one_device"])
@pytest.mark.parametrize("is_dataset", [False, True])
def test_one_device_is_keras_to_the_bit(strategy, is_dataset):
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)
    options = {"epochs": 2, "verbose": 0, "shuffle": False}
    given = {"x": data} if is_dataset else {"x": X, "y": Y, "batch_size": 8}
    model = build()
    expected = model.fit(**given, validation_data=data, **options).history
    trainer = tfdist.Trainer(build, strategy=strategy)
    assert trainer.fit(**given, validation_data=data, **options).history == expected
    ours = trainer.predict(X, batch_size=8)
    np.testing.assert_array_equal(ours, model.predict(X, batch_size=8, verbose=0))
    assert trainer.model.made == model.made == 1
    for name in ("train_on_batch", "train_on_batch", "test_on_batch"):
        for each in (trainer.model, model):  # Keras 3.13 goes on with what it has added up
            each.reset_metrics()
        ours, theirs = (getattr(each, name)(X, Y) for each in (trainer, model))
        np.testing.assert_array_equal(ours, theirs)
        assert [(type(a), np.shape(a)) for a in ours] == [(type(a), np.shape(a)) for a in theirs]
    np.testing.assert_array_equal(trainer.predict_on_batch(X), model.predict_on_batch(X))
    for ours, theirs in zip(trainer.model.weights, model.weights, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_an_interrupted_run_ends_with_the_same_bits(tmp_path):
    def train(directory, stop=None):
        trainer = tfdist.Trainer(build, checkpoint_dir=str(tmp_path / directory))
        stopping = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: trainer.step == stop and trainer.request_stop()
        )
        trainer.fit(X, Y, batch_size=8, epochs=3, verbose=0, callbacks=[stopping])
        return trainer

    whole = train("whole")
    train("parts", stop=6)
    parts = train("parts")
    assert parts.progress.resumed_from_step == 6
    assert parts.history.history == whole.history.history
    for ours, theirs in zip(parts.model.weights, whole.model.weights, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_replicas_refuse_it():
    with pytest.raises(TfdistError, match="overrides make_train_function, which does not support"):
        tfdist.Trainer(build, strategy=zoo.STRATEGIES["mirrored-2"]())


def test_options_of_the_step_refuse_it():
    options = tfdist.StepOptions(steps_per_loop=2)
    with pytest.raises(TfdistError, match="which micro_batches, .* and steps_per_loop cannot"):
        tfdist.Trainer(build, step_options=options)


def test_refuses_several_steps_per_call():
    model = build()
    model.compile("adam", "mse", steps_per_execution=3)
    with pytest.raises(TfdistError, match="would run 3 steps per call. Leave out steps_per_exec"):
        tfdist.Trainer(model)


class TwoOutputs(keras.Model):
    """Keras builds its optimizer while the step is traced."""

    def __init__(self):
        super().__init__()
        self.first, self.second = keras.layers.Dense(3), keras.layers.Dense(2)

    def call(self, x):
        return self.first(x), self.second(x)


def test_an_optimizer_with_a_constant_is_built_by_a_step_of_several_batches():
    x = np.random.default_rng(0).random((24, 4))

    def build():
        keras.utils.set_random_seed(1)
        model = TwoOutputs()
        model.compile(keras.optimizers.Nadam(), loss=["mse", "mse"], steps_per_execution=2)
        return model

    expected = build()
    losses = expected.fit(x, (x[:, :3], x[:, :2]), batch_size=8, shuffle=False, verbose=0).history
    trainer = tfdist.Trainer(build, strategy="one_device")
    found = trainer.fit(x, (x[:, :3], x[:, :2]), batch_size=8, shuffle=False, verbose=0).history
    assert found == losses
    for ours, theirs in zip(trainer.model.weights, expected.weights, strict=True):
        np.testing.assert_array_equal(ours, theirs)
