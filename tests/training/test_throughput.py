"""Where the time of training steps goes, in real steps."""

import time

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.runs.callbacks import Throughput
from tfdist.strategies.builtin.mirrored import make_mirrored
from tfdist.training.fit.trainer import Trainer

PAUSE_S, STEPS = 0.05, 20


def build_model():
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def make_slow_data():
    def read(index):
        time.sleep(PAUSE_S)
        return np.full((4, 2), index, np.float32)

    def make_batch(index):
        x = tf.numpy_function(read, [index], tf.float32)
        return tf.ensure_shape(x, [4, 2]), tf.zeros([4, 1])

    return tf.data.Dataset.range(STEPS).map(make_batch)


@pytest.mark.parametrize("devices", [["CPU:0"], ["CPU:0", "CPU:1"]], ids=["one", "two"])
def test_slow_data_are_seen(devices):
    trainer = Trainer(build_model, strategy=make_mirrored(devices=devices))
    throughput = Throughput(trainer, 4)
    trainer.fit(make_slow_data(), max_steps=STEPS, callbacks=[throughput], verbose=0)
    assert trainer.progress.steps_s > trainer.engine.seconds_of_input > 0
    assert 0 < throughput.input_fraction < 1 - throughput.host_fraction < 1


def test_slow_callbacks_are_the_host_s():
    trainer = Trainer(build_model, strategy=make_mirrored(devices=["CPU:0"]))
    throughput = Throughput(trainer, 4)
    slow = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: time.sleep(PAUSE_S)
    )
    x, y = np.zeros((32, 2), np.float32), np.zeros((32, 1), np.float32)
    trainer.fit(x, y, global_batch_size=4, callbacks=[slow, throughput], verbose=0)
    # However slow the machine is, the callback takes at least as long as it sleeps.
    seconds_a_step = 4 / throughput.examples_per_second
    assert seconds_a_step >= throughput.host_fraction * seconds_a_step >= PAUSE_S
    assert throughput.first_step_s > 0
