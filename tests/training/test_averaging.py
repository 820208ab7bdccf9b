"""The average of the weights: evaluated with statistics of its own, saved, equal everywhere."""

import functools

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


def build(name="convolutional"):
    model = zoo.EXAMPLES[name].build(make_optimizer(OPTIONS, total_steps=1))
    average_statistics(model, OPTIONS)
    return model


def fit(model, name="convolutional", **options):
    x, y = zoo.EXAMPLES[name].data
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


@functools.cache
def fit_keras(name):
    model = zoo.trace_once(build(name))
    return fit(model, name), model.get_weights()


CASES = {
    "mirrored-3": (zoo.STRATEGIES["mirrored-3"], None),
    "central_storage-2": (zoo.STRATEGIES["central_storage-2"], None),
    "layers": (zoo.STRATEGIES["one_device"], Layers(devices=2)),
    "mirrored shards": (lambda: tf.distribute.MirroredStrategy(["CPU:0"]), Shards(devices=3)),
    "one_device": (zoo.STRATEGIES["one_device"], None),
    "mirrored-2": (zoo.STRATEGIES["mirrored-2"], None),
    "shards": (zoo.STRATEGIES["one_device"], Shards(devices=2)),
    "strips": (zoo.STRATEGIES["one_device"], Strips(devices=2)),
}


@pytest.mark.thorough(keep=3)
@pytest.mark.parametrize(
    ("model_name", "name"),
    [
        *(("convolutional", name) for name in CASES if name != "strips"),
        *(("unet", name) for name in reversed(CASES)),
    ],
)
def test_ends_where_keras_ends(model_name, name):
    make_strategy, placement = CASES[name]
    build_model = functools.partial(build, model_name)
    trainer = zoo.make_trainer(build_model, strategy=make_strategy(), placement=placement)
    history = fit(trainer, model_name)
    expected, weights = fit_keras(model_name)
    for key, values in expected.items():
        np.testing.assert_allclose(history[key], values, rtol=1e-4, atol=1e-5, err_msg=key)
    assert zoo.largest_difference(trainer.model.get_weights(), weights) < 1e-5


def test_the_average_is_evaluated_and_kept():
    averages = []

    class Average(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            weights = [v.numpy() for v in self.model.trainable_variables]
            old = averages or weights  # Keras starts with the weights after the first step
            averages[:] = [0.8 * a + 0.2 * w for a, w in zip(old, weights, strict=True)]

    trainer = zoo.make_trainer(build)
    x, y = zoo.EXAMPLES["convolutional"].data
    callbacks = [*make_averaging(OPTIONS), Average()]
    options = {"batch_size": 12, "epochs": 2, "validation_data": (x[:9], y[:9]), "verbose": 0}
    fitted = trainer.fit(x, y, callbacks=callbacks, **options)
    weights = [v.numpy() for v in trainer.model.trainable_variables]
    assert zoo.largest_difference(weights, averages) < 1e-6
    found = trainer.evaluate(x[:9], y[:9], return_dict=True, verbose=0)
    assert found["loss"] == pytest.approx(fitted.history["val_loss"][-1], rel=1e-5)
