"""Trains programs with logical replicas in one process of an arrangement, and writes hashes.

`logical_task.py DIRECTORY STRATEGY COUNT PRECISION STEPS PROGRAM...`; each process writes its own
file.
"""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tfdist import cluster
from tfdist.devices import configure_precision
from tfdist.launch import run_local_cluster
from tfdist.models import make_model
from tfdist.strategies import make_strategy

BATCH, STEPS_OF_EPOCH = 13, 3
TIMEOUT_S = 1000
layers = keras.layers


def make_mlp():
    return keras.Sequential(
        [
            keras.Input((20,)),
            layers.Dense(32, "relu"),
            layers.Dropout(0.3),
            layers.BatchNormalization(),
            layers.Dense(5),
        ]
    )


def make_transformer():
    tokens = keras.Input((12,), dtype="int32")
    x = layers.Embedding(50, 16)(tokens)
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 8, dropout=0.1)(x, x))
    return keras.Model(tokens, layers.Dense(5)(layers.GlobalAveragePooling1D()(x)))


def make_unet():
    unet = make_model(
        "unet", image_size=(16, 16), num_classes=5, base_filters=4, depth=2, dropout=0.2
    )
    image = keras.Input((16, 16, 3))
    flipped = layers.RandomFlip(seed=4)(image)
    return keras.Model(image, layers.GlobalAveragePooling2D()(unet(flipped)))


def make_resnet():
    return keras.applications.ResNet50(
        weights=None, input_shape=(32, 32, 3), classes=5, classifier_activation=None
    )


class Gan(keras.Model):
    """Two models and two optimizers, with a step of its own."""

    def __init__(self):
        super().__init__()
        self.generator = keras.Sequential(
            [
                keras.Input((8,)),
                layers.Dense(32, "relu"),
                layers.BatchNormalization(),
                layers.Dense(20),
            ]
        )
        self.critic = keras.Sequential(
            [keras.Input((20,)), layers.Dense(32, "relu"), layers.Dropout(0.2), layers.Dense(1)]
        )
        self.noise = keras.random.SeedGenerator(5)
        self.compare = keras.losses.BinaryCrossentropy(from_logits=True)
        self.other = keras.optimizers.Adam(1e-3)
        self.mean = keras.metrics.Mean(name="mean")

    def call(self, x):
        return self.critic(x)

    def train_step(self, data):
        x, _ = data
        ones = tf.ones((tf.shape(x)[0], 1))
        noise = keras.random.normal((tf.shape(x)[0], 8), seed=self.noise)
        with tf.GradientTape() as tape:
            made = self.critic(self.generator(noise, training=True), training=True)
            real = self.critic(x, training=True)
            loss = self.compare(ones, real) + self.compare(0 * ones, made)
        weights = self.critic.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        with tf.GradientTape() as tape:
            made = self.critic(self.generator(noise, training=True), training=True)
            fooled = self.compare(ones, made)
        weights = self.generator.trainable_variables
        self.other.apply_gradients(zip(tape.gradient(fooled, weights), weights, strict=True))
        self.mean.update_state(fooled)
        return {"loss": loss, "mean": self.mean.result()}


# Name -> what builds the model, and the shape of an input; integers stand for tokens.
PROGRAMS = {
    "mlp": (make_mlp, (20,)),
    "transformer": (make_transformer, 12),
    "unet": (make_unet, (16, 16, 3)),
    "gan": (Gan, (20,)),
    "resnet": (make_resnet, (32, 32, 3)),
}


def train(name, strategy, steps):
    """Returns what the run of a program ends with: hashes of all states, history, predictions."""
    make_model, shape = PROGRAMS[name]

    def build_model():
        keras.utils.set_random_seed(3)
        model = make_model()
        model.compile(
            keras.optimizers.Adam(1e-2, global_clipnorm=1.0),
            None if name == "gan" else keras.losses.SparseCategoricalCrossentropy(True),
            metrics=None if name == "gan" else ["accuracy"],
        )
        return model

    draws = np.random.default_rng(0)
    rows = BATCH * STEPS_OF_EPOCH - 5  # the last batch has fewer examples, and shares differ
    x = (
        draws.integers(0, 50, (rows, shape)).astype("i4")
        if isinstance(shape, int)
        else draws.normal(size=(rows, *shape)).astype("f4")
    )
    y = draws.integers(0, 5, rows)
    trainer = tfdist.Trainer(build_model, strategy=strategy)
    history = trainer.fit(x, y, batch_size=BATCH, epochs=steps // STEPS_OF_EPOCH, verbose=0).history
    found = {"history": history, "weights": hash_arrays(trainer.model.get_weights())}
    if name != "gan":
        found["optimizer"] = hash_arrays([v.numpy() for v in trainer.model.optimizer.variables])
        found["evaluation"] = trainer.evaluate(x, y, batch_size=BATCH, verbose=0)
        found["prediction"] = hash_arrays([trainer.predict(x, batch_size=BATCH, verbose=0)])
    return found


def hash_arrays(arrays):
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.asarray(array).tobytes())
    return digest.hexdigest()


def run_alone(directory, *arguments):
    """Returns what a process of its own finds for a strategy and the other arguments."""
    directory.mkdir()
    run = subprocess.run(
        [sys.executable, "-m", __spec__.name, str(directory), *arguments],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"},
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    return json.loads((directory / "0.json").read_text())


def run_workers(directory, workers, *arguments):
    """Returns what all workers find."""
    directory.mkdir()
    result = run_local_cluster(
        workers=workers,
        command=[sys.executable, "-m", __spec__.name, str(directory), "workers", *arguments],
        run_dir=directory,
        timeout_s=TIMEOUT_S,
        stream=False,
        environ=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"},
    )
    logs = "\n".join(task.log.read_text()[-3000:] for task in result.tasks)
    assert result.status == 0, logs
    found = [json.loads((directory / f"{i}.json").read_text()) for i in range(workers)]
    assert all(other == found[0] for other in found)
    return found[0]


def main():
    directory, strategy, count, precision, steps, *programs = sys.argv[1:]
    configure_precision(precision)
    config = cluster.find_tf_config()
    if config is not None:
        strategy = "multi_worker_mirrored"
    made = make_strategy(strategy, logical_replicas=int(count))
    found = {name: train(name, made, int(steps)) for name in programs}
    index = 0 if config is None else config.index
    Path(directory, f"{index}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
