"""A dataset gives each epoch the examples, and the order, that it gives Keras."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests import zoo

EPOCHS = 4


class Record(keras.callbacks.Callback):
    """Notes the batches of each epoch: the loss is what the only example holds."""

    def __init__(self):
        super().__init__()
        self.epochs = []

    def on_epoch_begin(self, epoch, logs=None):
        self.epochs.append([])
        self._sum = 0.0

    def on_train_batch_end(self, batch, logs=None):
        total = logs["loss"] * (batch + 1)
        self.epochs[-1].append(round(total - self._sum, 2))
        self._sum = total


def _number(index):
    x = tf.reshape(tf.cast(index, tf.float32), [1])
    return x, x


def _draw(index):
    x = tf.random.uniform([1]) + tf.cast(index, tf.float32)
    return x, x


def _shuffle(function=_number):
    return tf.data.Dataset.range(6).shuffle(6, seed=1).map(function).batch(1)


DATASETS = {
    "shuffled": _shuffle,
    "shuffled and kept": lambda: _shuffle().cache(),
    "of unknown length": lambda: _shuffle().filter(lambda *_: True),
    "of unknown length and kept": lambda: _shuffle().filter(lambda *_: True).cache(),
    "drawn": lambda: _shuffle(_draw),
}


def build_sum():
    inputs = keras.Input((1,))
    dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
    model = keras.Model(inputs, dense(inputs))
    model.compile(keras.optimizers.SGD(0.0), lambda y_true, y_pred: y_pred)
    return model


def fit_twice(model, name, **options):
    """Trains, evaluates and trains on, on one dataset; returns the batches of each epoch."""
    tf.random.set_seed(5)
    dataset, record = DATASETS[name](), Record()
    for _ in range(2):
        model.fit(
            dataset,
            validation_data=dataset,
            epochs=2,
            callbacks=[record],
            verbose=0,
            **options,
        )
        model.evaluate(dataset, verbose=0)
    return record.epochs


@pytest.mark.thorough(keep=3)
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.filterwarnings("ignore:.*the data `x` was provided as a tf.data.Dataset")
@pytest.mark.parametrize(
    ("name", "strategy_name"), zoo.take_turns(DATASETS, ["mirrored-2", "one_device"])
)
def test_every_epoch_has_the_order_that_keras_sees(name, strategy_name, deterministic):
    expected = fit_twice(zoo.trace_once(build_sum()), name)
    assert len({tuple(epoch) for epoch in expected}) > 1 or "kept" in name
    strategy = zoo.STRATEGIES[strategy_name]()
    assert fit_twice(zoo.make_trainer(build_sum, strategy=strategy, check="on"), name) == expected


@pytest.mark.filterwarnings("ignore:.*the data `x` was provided as a tf.data.Dataset")
def test_epochs_may_be_parts_of_a_pass():
    expected = fit_twice(build_sum(), "shuffled", steps_per_epoch=3)
    assert fit_twice(tfdist.Trainer(build_sum), "shuffled", steps_per_epoch=3) == expected


def test_a_run_continues_in_the_order_of_one_that_did_not_stop(tmp_path):
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if len(stopped.epochs) == 3 and batch == 1:
                trainer.request_stop()

    whole, stopped, continued = Record(), Record(), Record()
    options = {"epochs": EPOCHS, "verbose": 0}
    tfdist.Trainer(build_sum).fit(_shuffle(), callbacks=[whole], **options)
    trainer = tfdist.Trainer(build_sum, checkpoint_dir=str(tmp_path))
    trainer.fit(_shuffle(), callbacks=[stopped, Stop()], **options)
    tfdist.Trainer(build_sum, checkpoint_dir=str(tmp_path)).fit(
        _shuffle(), callbacks=[continued], **options
    )
    assert stopped.epochs[:2] == whole.epochs[:2]
    assert continued.epochs[-1] == whole.epochs[-1]
    assert stopped.epochs[2] == whole.epochs[2][:2]


def build_drawing():
    """Up to Keras 3.15, an epoch ends with a step more, which counts, decays weights and draws."""
    inputs = keras.Input((1,))
    hidden = keras.layers.Dense(4, kernel_initializer="ones")(inputs)
    hidden = keras.layers.Dropout(0.5, seed=3)(hidden)
    outputs = keras.layers.Dense(1, kernel_initializer="ones")(hidden)
    model = keras.Model(inputs, outputs)
    model.compile(keras.optimizers.AdamW(0.1, weight_decay=0.1), "mse")
    return model


def fit_unknown(model, *, epochs=3, **options):
    """Trains on data of unknown length; returns losses, the optimizer's count and weights."""
    data = _shuffle().unbatch().batch(2).filter(lambda *_: True)
    history = model.fit(data, epochs=epochs, verbose=0, **options).history
    model = getattr(model, "model", model)
    weights = [weight.numpy().tolist() for weight in model.weights]
    return history.get("loss"), int(model.optimizer.iterations.numpy()), weights


@functools.cache
def fit_keras_unknown():
    return fit_unknown(zoo.trace_once(build_drawing()))


def check_unknown(found, expected):
    assert found[1] == expected[1]
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-6)
    for ours, theirs in zip(found[2], expected[2], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.filterwarnings("ignore:.*the data `x` was provided as a tf.data.Dataset")
@pytest.mark.parametrize("strategy_name", ["one_device", "mirrored-2"])
def test_data_of_unknown_length_end_as_in_keras(strategy_name):
    trainer = tfdist.Trainer(build_drawing, strategy=zoo.STRATEGIES[strategy_name]())
    check_unknown(fit_unknown(trainer), fit_keras_unknown())


@pytest.mark.thorough(keep=2)
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.filterwarnings("ignore:.*the data `x` was provided as a tf.data.Dataset")
@pytest.mark.parametrize(
    ("strategy_name", "stop_after"),
    [("mirrored-2", 3), *(("one_device", step) for step in (5, 2, 3, 7)), ("mirrored-2", 5)],
)
def test_a_run_on_data_of_unknown_length_continues(strategy_name, stop_after, tmp_path):
    def make():
        strategy = zoo.STRATEGIES[strategy_name]()
        return tfdist.Trainer(build_drawing, strategy=strategy, checkpoint_dir=str(tmp_path))

    stopped, continued = make(), make()
    stop = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: (
            stopped.request_stop() if stopped.step == stop_after else None
        )
    )
    fit_unknown(stopped, callbacks=[stop])
    assert stopped.step == stop_after
    check_unknown(fit_unknown(continued), fit_keras_unknown())
    assert continued.progress.resumed_from_step == stop_after


class _Lose(keras.callbacks.Callback):
    def __init__(self, after):
        super().__init__()
        self.left = after

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize(
    ("strategy_name", "lost_after"), [("one_device", 9), ("mirrored-2", 11), ("one_device", 6)]
)
def test_training_and_validation_data_may_be_parts_of_one_shuffled_dataset(
    strategy_name, lost_after, tmp_path
):
    """Each pass over one of them changes the order of both."""

    def run(directory=None, callbacks=()):
        keras.utils.set_random_seed(1)
        x = np.random.default_rng(0).normal(size=(40, 4)).astype("f4")
        whole = tf.data.Dataset.from_tensor_slices((x, x.sum(1, keepdims=True)))
        whole = whole.shuffle(40, seed=3)

        def build():
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
            # It is not known to be divisible, so that the guard looks at a batch.
            model.compile(keras.optimizers.SGD(0.05), lambda y, p: tf.reduce_mean((y - p) ** 2, -1))
            return model

        trainer = tfdist.Trainer(
            build, strategy=zoo.STRATEGIES[strategy_name](), checkpoint_dir=directory
        )
        history = trainer.fit(
            whole.skip(10).batch(8),
            validation_data=whole.take(10).batch(8),
            epochs=4,
            verbose=0,
            checkpoint_every=2,
            callbacks=callbacks,
        )
        return history.history, trainer.model.get_weights()[0].tobytes()

    expected = run()
    with pytest.raises(KeyboardInterrupt):
        run(str(tmp_path), [_Lose(lost_after)])
    assert run(str(tmp_path)) == expected
