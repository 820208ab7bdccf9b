"""What a step computes from the results of metrics is what one device computes."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests import zoo
from tests.training.programs import KINDS, X, dense


def _score(logs):
    precision, recall = logs["precision"], logs["recall"]
    return logs | {"f1": 2 * precision * recall / (precision + recall + 1e-9)}


class ByMetrics(keras.Model):
    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        return _score(super().compute_metrics(x, y, y_pred, sample_weight))


class ByResult(keras.Model):
    def get_metrics_result(self):
        return _score(super().get_metrics_result())


class ByStep(keras.Model):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=y_pred)
        gradients = tape.gradient(loss, self.trainable_variables)
        logs = _score(self.compute_metrics(x, y, y_pred))
        rate = tf.where(logs["f1"] > 0.5, 0.5, 1.0)
        gradients = [gradient * tf.cast(rate, gradient.dtype) for gradient in gradients]
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return logs


@pytest.mark.parametrize("strategy_name", ["mirrored-2", "mirrored-3", "central_storage-2"])
@pytest.mark.parametrize("cls", [ByMetrics, ByResult, ByStep])
def test_logs_computed_from_metrics_are_those_of_one_device(float64, cls, strategy_name):
    def build():
        metrics = [keras.metrics.Precision(name="precision"), keras.metrics.Recall(name="recall")]
        return dense(loss="binary_crossentropy", last="sigmoid", cls=cls, metrics=metrics)

    def train(fit):
        options = {"epochs": 2, "batch_size": 6, "shuffle": False, "verbose": 0}
        return fit(X, KINDS, validation_data=(X[:9], KINDS[:9]), **options).history

    expected = train(build().fit)
    trainer = zoo.make_trainer(build, strategy=zoo.STRATEGIES[strategy_name]())
    found = train(trainer.fit)
    assert set(found) == set(expected)
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-9, err_msg=name)
