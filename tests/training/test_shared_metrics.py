"""Metrics that have counted before: those of several models, of another `compile`, or by hand.

Keras first resets compiled metrics after it has built them, so the first epoch or evaluation after
`compile` adds to what they have counted.
"""

import keras
import numpy as np
import pytest

import tfdist

pytestmark = pytest.mark.usefixtures("float64")

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(14, 3)), RNG.integers(0, 2, (14, 1))
OPTIONS = {"batch_size": 4, "verbose": 0}


class _Stop(keras.callbacks.Callback):
    def __init__(self, trainer, *, after):
        super().__init__()
        self._trainer, self._left = trainer, after

    def on_train_batch_end(self, batch, logs=None):
        self._left -= 1
        if not self._left:
            self._trainer.request_stop()


def _make_metrics():
    return [
        keras.metrics.TruePositives(name="positives"),
        keras.metrics.AUC(name="area"),
        keras.metrics.MeanSquaredError(name="error"),
    ]


def _make(metrics):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, "sigmoid")])
    model.layers[0].kernel.assign([[1.0], [-2.0], [0.5]])
    model.compile("sgd", "binary_crossentropy", metrics=metrics)
    return model


def _use(make, metrics):
    """Returns the logs of models that share metrics, and of one that is compiled again."""
    first, second = make(metrics), make(metrics)
    found = [first.evaluate(X, Y, **OPTIONS), first.evaluate(X, Y, **OPTIONS)]
    history = second.fit(X, Y, epochs=2, shuffle=False, validation_data=(X, Y), **OPTIONS).history
    found += [history[name] for name in sorted(history)]
    second.compile("sgd", "mse", metrics=metrics)
    found += [second.train_on_batch(X, Y), second.test_on_batch(X, Y)]
    by_hand = make(metrics)
    by_hand.evaluate(X, Y, **OPTIONS)
    by_hand.compile("sgd", "mse", metrics=metrics)
    metrics[0].update_state(Y, np.ones_like(Y))
    return [*found, by_hand.evaluate(X, Y, **OPTIONS), by_hand.evaluate(X, Y, **OPTIONS)]


@pytest.mark.parametrize("strategy", ["one_device", "mirrored", "central_storage"])
def test_metrics_that_have_counted_go_on_as_in_keras(strategy):
    built = tfdist.strategies.make_strategy(strategy)

    def make(metrics):
        return tfdist.Trainer(lambda: _make(metrics), strategy=built)

    with built.scope():
        metrics = _make_metrics()
    expected = _use(_make, _make_metrics())
    for ours, theirs in zip(_use(make, metrics), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-12)


@pytest.mark.parametrize("after", [2, 4, 6])
def test_a_run_continues_in_an_epoch_whose_metrics_had_counted(tmp_path, after):
    def train(directory, *, stop_after=0):
        built = tfdist.strategies.make_strategy("mirrored")
        with built.scope():
            metrics = _make_metrics()
        tfdist.Trainer(lambda: _make(metrics), strategy=built).evaluate(X, Y, **OPTIONS)
        trainer = tfdist.Trainer(lambda: _make(metrics), strategy=built, checkpoint_dir=directory)
        stops = [_Stop(trainer, after=stop_after)] if stop_after else []
        data = {"shuffle": False, "validation_data": (X, Y)}
        return trainer.fit(X, Y, epochs=3, callbacks=stops, **data, **OPTIONS).history

    expected = train(None)
    assert expected["positives"][0] > expected["positives"][1]
    train(tmp_path, stop_after=after)
    found = train(tmp_path)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-12, err_msg=name)
