"""What two workers run to be refused, or not: `python -m tests.training.agreement_task DIR`.

Each writes the messages that it got to DIR/worker-<index>.json.
"""

import json
import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from tfdist import Loop, StepOptions, Trainer, strategies
from tfdist.errors import TfdistError

ROWS = 24
X = np.eye(ROWS, dtype="float32")
Y = np.zeros((ROWS, 1), "float32")
TYPES = ("f2", tf.bfloat16.as_numpy_dtype, "c8", "c16", "?", "i1", "u1", "u2", "u4", "u8", "f8")


class Batches(keras.utils.PyDataset):
    """Batches of 8 examples, in an order that may be drawn without a seed."""

    def __init__(self, *, is_drawn):
        super().__init__()
        draw = np.random.default_rng()
        self._order = draw.permutation(ROWS) if is_drawn else np.arange(ROWS)

    def __len__(self):
        return ROWS // 8

    def __getitem__(self, index):
        rows = self._order[8 * index : 8 * index + 8]
        return X[rows], Y[rows]


def draw_batches():
    order = np.random.default_rng().permutation(ROWS)
    for rows in np.split(order, ROWS // 8):
        yield X[rows], Y[rows]


def yield_batches(count):
    for start in range(0, 8 * count, 8):
        yield X[:8] + start, Y[:8]


def scan():
    """An order that TensorFlow draws when the dataset is read."""

    def shuffle(seed, index):
        draw = tf.random.Generator.from_non_deterministic_state
        if not hasattr(scan, "generator"):
            with tf.init_scope():
                scan.generator = draw()
        seed = tf.cond(
            tf.reduce_all(seed < 0),
            lambda: scan.generator.uniform([2], maxval=1 << 40, dtype=tf.int64),
            lambda: seed,
        )
        return seed, tf.random.experimental.index_shuffle(index, seed, ROWS - 1)

    start = tf.constant([-1, -1], tf.int64)
    data = tf.data.Dataset.range(ROWS).scan(start, shuffle).batch(8)
    return data.map(lambda rows: (tf.gather(X, rows), tf.gather(Y, rows)))


def augment(x, y):
    return x * tf.random.uniform([]), y


def make_trainer(strategy, **options):
    def build():
        model = keras.Sequential(
            [keras.Input((ROWS,)), keras.layers.Dense(1, kernel_initializer="zeros")]
        )
        model.compile(keras.optimizers.Adam(0.1), loss="mse")
        return model

    return Trainer(build, strategy=strategy, step_options=StepOptions(**options))


def list_cases(index):
    """Returns name -> (options, a function of a trainer, for each thing that workers may do)."""
    tf.random.set_seed(index)  # workers augment differently
    data = tf.data.Dataset.from_tensor_slices((X, Y))
    alone = index == 1
    fit = {"epochs": 2, "verbose": 0}

    def change(trainer, value=1.0):
        if alone:
            trainer.model.layers[0].bias.assign([value])

    def change_in_callback(trainer):
        def assign(epoch, logs):
            if epoch == 1:
                change(trainer, 0.5)

        callback = keras.callbacks.LambdaCallback(on_epoch_begin=assign)
        trainer.fit(X, Y, batch_size=8, callbacks=[callback], **fit)

    def change_statistics(trainer):
        def build():
            layers = [keras.layers.BatchNormalization(name="norm"), keras.layers.Dense(1)]
            model = keras.Sequential([keras.Input((ROWS,)), *layers])
            model.compile("sgd", "mse")
            return model

        def assign(epoch, logs):
            other.model.get_layer("norm").moving_mean.assign(np.full(ROWS, float(alone)))

        other = Trainer(build, strategy=trainer.strategy)
        other.fit(X, Y, callbacks=[keras.callbacks.LambdaCallback(on_epoch_begin=assign)], **fit)

    def change_and(use):
        def run(trainer):
            trainer.fit(X, Y, batch_size=8, **fit)
            change(trainer)
            use(trainer)

        return run

    def change_slot(trainer):
        trainer.fit(X, Y, batch_size=8, **fit)
        slot = trainer.model.optimizer.variables[-1]
        slot.assign(slot + float(alone))
        trainer.fit(X, Y, batch_size=8, **fit)

    def set_and_fit(trainer, part, name, value):
        setattr(part, name, value)
        trainer.fit(X, Y, **fit)

    def compile_and(use, loss="mse", optimizer="sgd", **options):
        def run(trainer):
            trainer.compile(optimizer, loss, **options)
            use(trainer)

        return run

    def fit_once(trainer):
        trainer.fit(X, Y, **fit)

    def name_otherwise(trainer):
        """Workers that have built other models before, and functions without a name."""
        for _ in range(3 * index):
            keras.layers.Dense(1)

        def build():
            inner = keras.layers.TimeDistributed(keras.Sequential([keras.layers.Dense(2)]))
            model = keras.Sequential(
                [
                    keras.Input((ROWS,)),
                    keras.layers.Dense(4, activation=lambda x: 2 * x),
                    keras.layers.Reshape((2, 2)),
                    inner,
                    keras.layers.Lambda(lambda x: keras.ops.mean(x, (1, 2))),
                ]
            )
            rate = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
            model.compile(
                keras.optimizers.SGD(rate), lambda y, found: (y - found) ** 2, metrics=["mae"]
            )
            return model

        fit_once(Trainer(build, strategy=trainer.strategy, step_options=StepOptions(check="off")))
        for _ in range(3 * (1 - index)):  # the names of what follows are alike again
            keras.layers.Dense(1)

    def call(*names):
        def run(trainer):
            for name in names:
                given = (X[:8],) if name == "predict" else (X[:8], Y[:8])
                getattr(trainer, f"{name}_on_batch")(*given)

        return run

    def step(trainer):
        loop = Loop(strategy=trainer.strategy)
        model, optimizer = trainer.model, trainer.model.optimizer

        @loop.distribute
        def train_step(x, y):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x) - y) ** 2)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            return loss

        @loop.distribute
        def validation_step(x, y):
            return tf.reduce_mean((model(x) - y) ** 2)

        for number in range(4):
            (validation_step if alone and number == 3 else train_step)(X[:8], Y[:8])

    def train_on_drawn(trainer):
        for x, y in draw_batches():
            trainer.train_on_batch(x, y)

    def predict_few(trainer):
        """The last batch has no example for the second worker."""
        assert np.asarray(trainer.predict(X[:3], batch_size=2)).shape == (3, 1)
        for name in TYPES:
            whole = np.arange(6).reshape(2, 3).astype(name)
            gathered = trainer.engine.workers.gather(whole[: 0 if index else 2])
            assert gathered.dtype == whole.dtype
            np.testing.assert_array_equal(gathered, whole)

    return {
        "generator": ({}, lambda trainer: trainer.fit(draw_batches(), verbose=0)),
        "PyDataset": ({}, lambda trainer: trainer.fit(Batches(is_drawn=True), **fit)),
        "seeded PyDataset": ({}, lambda trainer: trainer.fit(Batches(is_drawn=False), **fit)),
        "scan": ({}, lambda trainer: trainer.fit(scan(), **fit)),
        "evaluate": ({}, lambda trainer: trainer.evaluate(draw_batches(), verbose=0)),
        "predict": ({}, lambda trainer: trainer.predict(Batches(is_drawn=True))),
        "fewer batches": ({}, lambda trainer: trainer.fit(yield_batches(4 - index), verbose=0)),
        "fewer batches to evaluate": (
            {},
            lambda trainer: trainer.evaluate(yield_batches(4 - index), verbose=0),
        ),
        "arrays to evaluate": (
            {},
            lambda trainer: trainer.evaluate(X + index, Y, batch_size=8, verbose=0),
        ),
        "arrays to validate": (
            {},
            lambda trainer: trainer.fit(X, Y, validation_data=(X, Y + index), **fit),
        ),
        "arrays to predict": ({}, lambda trainer: trainer.predict(X[: 8 + index])),
        "shuffled": ({}, lambda trainer: trainer.evaluate(data.shuffle(9).batch(8), verbose=0)),
        "single batches": ({}, train_on_drawn),
        "augmented": ({}, lambda trainer: trainer.fit(data.map(augment).batch(8), **fit)),
        "declared": (
            {"random_augmentation": True},
            lambda trainer: trainer.fit(Batches(is_drawn=True), **fit),
        ),
        "weights before": ({}, lambda trainer: (change(trainer), trainer.fit(X, Y, **fit))),
        "weights in a callback": ({}, change_in_callback),
        "statistics in a callback": ({}, change_statistics),
        "weights, then evaluate": ({}, change_and(lambda t: t.evaluate(X, Y, verbose=0))),
        "weights, then predict": ({}, change_and(lambda t: t.predict(X))),
        "optimizer": ({}, change_slot),
        "epochs": ({}, lambda trainer: trainer.fit(X, Y, epochs=1 + index, verbose=0)),
        "validation": (
            {},
            lambda trainer: trainer.fit(X, Y, validation_data=(X, Y) if alone else None, **fit),
        ),
        "batch size": ({}, lambda trainer: trainer.predict(X, batch_size=8 - index)),
        "frozen layer": ({}, lambda t: set_and_fit(t, t.model.layers[0], "trainable", alone)),
        "penalty": (
            {},
            lambda t: set_and_fit(
                t, t.model.layers[0], "kernel_regularizer", keras.regularizers.L2(0.1 + index)
            ),
        ),
        "momentum": ({}, lambda t: set_and_fit(t, t.model.optimizer, "beta_1", 0.5 + index / 10)),
        "activation": (
            {},
            lambda t: set_and_fit(
                t,
                t.model.layers[0],
                "activation",
                keras.activations.get("tanh" if alone else "relu"),
            ),
        ),
        "initializer": (
            {},
            lambda t: set_and_fit(
                t,
                t.model.layers[0],
                "kernel_initializer",
                keras.initializers.get("ones" if alone else "he_normal"),
            ),
        ),
        "another optimizer": ({}, compile_and(fit_once, optimizer="sgd" if alone else "adam")),
        "another loss": ({}, compile_and(fit_once, loss="mae" if alone else "mse")),
        "another loss to evaluate": (
            {},
            compile_and(
                lambda trainer: trainer.evaluate(X, Y, verbose=0),
                loss=keras.losses.Huber(1.0 + index),
            ),
        ),
        "other metrics": ({}, compile_and(fit_once, metrics=["mae"] if alone else ["mse"])),
        "another schedule": (
            {},
            compile_and(
                fit_once,
                optimizer=keras.optimizers.SGD(
                    keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9 - 0.1 * index)
                ),
            ),
        ),
        "other names": ({}, name_otherwise),
        "train and test on batch": ({}, call("train", *(["test"] if alone else ["train"]))),
        "one batch more": ({}, call(*["train"] * (5 + alone), *["predict"] * (1 - alone))),
        "another step": ({}, step),
        "nothing": ({}, lambda trainer: trainer.fit(X, Y, batch_size=8, **fit)),
        "few": ({}, predict_few),
    }


def main(directory):
    strategy = strategies.make_multi_worker_mirrored()
    index = strategy.cluster_resolver.task_id
    found = {}
    for kind in (strategy, strategies.LocalSgdStrategy(strategy, strategies.LocalSgd())):
        for name, (options, run) in list_cases(index).items():
            if kind is not strategy and name in ("optimizer", "statistics in a callback"):
                continue  # a worker's own
            try:
                run(make_trainer(kind, **options))
                message = ""
            except TfdistError as error:
                message = str(error)
            found[f"{kind.__class__.__name__}: {name}"] = message
    (Path(directory) / f"worker-{index}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
