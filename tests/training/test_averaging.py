"""The average of the weights: evaluated with statistics of its own, saved, equal everywhere."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests import zoo
from tfdist.placement import Layers, Shards, Strips
from tfdist.training.fit.averaging import average_statistics, make_averaging
from tfdist.training.optimizers import make_optimizer
from tfdist.training.options import TrainingOptions

OPTIONS = TrainingOptions(ema_momentum=0.8, optimizer="sgd", learning_rate=0.1, schedule="constant")


def build():
    model = zoo.EXAMPLES["unet"].build(make_optimizer(OPTIONS, total_steps=1))
    average_statistics(model, OPTIONS)
    return model


def fit(model, **options):
    x, y = zoo.EXAMPLES["unet"].data
    return model.fit(
        x,
        y,
        batch_size=12,
        epochs=3,
        shuffle=False,
        validation_data=(x[:9], y[:9]),
        callbacks=make_averaging(OPTIONS),
        verbose=0,
        **options,
    ).history


def test_statistics_are_averaged_as_the_weights():
    layers = [layer for layer in build().layers if hasattr(layer, "moving_mean")]
    assert {layer.momentum for layer in layers} == {0.8}
    model = zoo.EXAMPLES["unet"].build("sgd")
    average_statistics(model, TrainingOptions())
    assert {layer.momentum for layer in model.layers if hasattr(layer, "moving_mean")} == {0.9}
    assert make_averaging(TrainingOptions()) == []
    model = keras.Sequential([keras.Input((4, 4, 1)), keras.layers.BatchNormalization()])
    average_statistics(model, OPTIONS)
    assert model.layers[0].momentum == 0.8


@pytest.fixture(scope="module")
def expected():
    model = build()
    return fit(model), model.get_weights()


CASES = {name: (make, None) for name, make in zoo.STRATEGIES.items()} | {
    "layers": (zoo.STRATEGIES["one_device"], Layers(devices=2)),
    "shards": (zoo.STRATEGIES["one_device"], Shards(devices=2)),
    "mirrored shards": (lambda: tf.distribute.MirroredStrategy(["CPU:0"]), Shards(devices=3)),
    "strips": (zoo.STRATEGIES["one_device"], Strips(devices=2)),
}


@pytest.mark.parametrize("name", CASES)
def test_ends_where_keras_ends(name, expected):
    make_strategy, placement = CASES[name]
    trainer = zoo.make_trainer(build, strategy=make_strategy(), placement=placement)
    history = fit(trainer)
    for key, values in expected[0].items():
        np.testing.assert_allclose(history[key], values, rtol=1e-4, atol=1e-5, err_msg=key)
    assert zoo.largest_difference(trainer.model.get_weights(), expected[1]) < 1e-5


def test_the_average_is_evaluated_and_kept():
    averages = []

    class Average(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            weights = [v.numpy() for v in self.model.trainable_variables]
            old = averages or weights  # Keras starts with the weights after the first step
            averages[:] = [0.8 * a + 0.2 * w for a, w in zip(old, weights, strict=True)]

    trainer = zoo.make_trainer(build)
    x, y = zoo.EXAMPLES["unet"].data
    callbacks = [*make_averaging(OPTIONS), Average()]
    options = {"batch_size": 12, "epochs": 2, "validation_data": (x[:9], y[:9]), "verbose": 0}
    fitted = trainer.fit(x, y, callbacks=callbacks, **options)
    weights = [v.numpy() for v in trainer.model.trainable_variables]
    assert zoo.largest_difference(weights, averages) < 1e-6
    found = trainer.evaluate(x[:9], y[:9], return_dict=True, verbose=0)
    assert found["loss"] == pytest.approx(fitted.history["val_loss"][-1], rel=1e-5)
