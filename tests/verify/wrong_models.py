"""Models as users write them: one that is right, and those that depend on the replicas."""

import keras
import numpy as np
import tensorflow as tf

from tfdist import cluster

IGNORED = -1


def make_data():
    rng = np.random.default_rng(3)
    labels = rng.integers(0, 3, 40).astype("int32")
    labels[::3] = IGNORED
    return rng.normal(size=(40, 8)), labels


def valid_loss(y_true, y_pred):
    """One value an example: none for those without a label."""
    is_valid = keras.ops.cast(y_true != IGNORED, y_pred.dtype)
    labels = keras.ops.maximum(y_true, 0)
    return is_valid * keras.losses.sparse_categorical_crossentropy(labels, y_pred, from_logits=True)


def _build(*layers, loss=valid_loss, metrics=("accuracy",)):
    inputs = keras.Input((8,))
    x = keras.layers.Dense(6, "tanh", name="below")(inputs)
    for layer in layers:
        x = layer(x)
    model = keras.Model(inputs, keras.layers.Dense(3, name="above")(x))
    model.compile(keras.optimizers.Adam(0.01), loss, metrics=list(metrics))
    return model


def build_right():
    return _build(keras.layers.Dropout(0.4), keras.layers.BatchNormalization(synchronized=True))


def build_random():
    return _build(keras.layers.Dropout(0.4), keras.layers.GaussianNoise(0.1))


def mean_of_valid(y_true, y_pred):
    """The mean over the examples that have a label."""
    is_valid = keras.ops.cast(y_true != IGNORED, y_pred.dtype)
    return keras.ops.sum(valid_loss(y_true, y_pred)) / keras.ops.sum(is_valid)


def build_loss_per_replica():
    return _build(loss=mean_of_valid)


class MeanOfMeans(keras.metrics.Metric):
    def __init__(self):
        super().__init__(name="confidence")
        self.total = self.add_weight(name="total", initializer="zeros")
        self.batches = self.add_weight(name="batches", initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        confidence = keras.ops.max(keras.ops.softmax(y_pred), -1)
        self.total.assign_add(keras.ops.mean(confidence))
        self.batches.assign_add(1)

    def result(self):
        return self.total / self.batches


class ClipGradient(keras.layers.Layer):
    """Passes on its input, and clips the norm of what comes back."""

    def call(self, x):
        @tf.custom_gradient
        def clip(x):
            return tf.identity(x), lambda gradient: tf.clip_by_norm(gradient, 0.01)

        return clip(x)


def build_clipping():
    return _build(ClipGradient(name="clip"))


class OwnDropout(keras.layers.Layer):
    def call(self, x, training=False):
        return tf.nn.dropout(x, 0.4, seed=3) if training else x


def build_dropout_per_replica():
    return _build(OwnDropout(name="drop"))


class ReplicaDropout(keras.layers.Layer):
    """Seeded by the replica's number."""

    def call(self, x, training=False):
        if not training:
            return x
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        kept = tf.random.stateless_uniform(tf.shape(x), [7, replica], dtype=x.dtype) > 0.4
        return tf.where(kept, x / 0.6, 0)


def build_dropout_seeded_by_replica():
    return _build(ReplicaDropout(name="drop"))


def build_otherwise_in_clusters():
    """A model whose outputs depend on the number of workers."""
    workers = 1 if (config := cluster.find_tf_config()) is None else config.num_workers
    return _build(keras.layers.Rescaling(1.0 + 0.1 * (workers > 1)))
