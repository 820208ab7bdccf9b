"""What a user's own step logs for data of unknown length."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist

pytestmark = pytest.mark.usefixtures("float64")


class OwnSteps(keras.Model):
    """The steps of a guide of Keras: the loss is the mean of those of the batches."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=y_pred)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return self._update(loss, y, y_pred)

    def test_step(self, data):
        x, y = data
        y_pred = self(x, training=False)
        return self._update(self.compute_loss(y=y, y_pred=y_pred), y, y_pred)

    def _update(self, loss, y, y_pred):
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, y_pred)
        return {metric.name: metric.result() for metric in self.metrics}


class KeepLogs(keras.callbacks.Callback):
    """Keeps the logs of the last batch of each epoch and evaluation."""

    def on_epoch_begin(self, epoch, logs=None):
        self.train, self.test = {}, {}

    def on_train_batch_end(self, batch, logs=None):
        self.train = dict(logs)

    def on_test_batch_end(self, batch, logs=None):
        self.test = {f"val_{name}": value for name, value in logs.items()}

    def on_epoch_end(self, epoch, logs=None):
        expected = self.train | self.test
        assert logs.keys() == expected.keys()
        np.testing.assert_allclose(list(logs.values()), [expected[name] for name in logs])


def make_model(metrics=None):
    keras.utils.set_random_seed(1)
    inputs = keras.Input([3])
    model = OwnSteps(inputs, keras.layers.Dense(2)(inputs))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=metrics, jit_compile=False)
    return model


def make_dataset():
    random = np.random.default_rng(2)
    x, y = random.normal(size=[14, 3]), random.integers(0, 2, 14)
    # Batches of a static size, and a number of them that nobody knows.
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(4, drop_remainder=True)
    return dataset.filter(lambda *_: True)


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("strategy", ["one_device", "mirrored"])
def test_an_epoch_counts_no_batch_that_did_not_come(strategy):
    trainer = tfdist.Trainer(make_model, strategy=strategy)
    data = make_dataset()
    trainer.fit(data, validation_data=data, epochs=3, callbacks=[KeepLogs()], verbose=0)


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_metrics_within_metrics_are_logged_as_in_keras():
    data = make_dataset()
    expected = make_model(["accuracy"]).fit(data, epochs=2, shuffle=False, verbose=0)
    trainer = tfdist.Trainer(lambda: make_model(["accuracy"]), strategy="one_device")
    assert trainer.fit(data, epochs=2, shuffle=False, verbose=0).history == expected.history
