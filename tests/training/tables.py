"""Scenarios of `parameter_server_task.py` with tables that are divided over the servers."""

import functools

import keras
import numpy as np
import tensorflow as tf

from tests import zoo
from tfdist.errors import TfdistError, TrainingError
from tfdist.placement.shards.divided import find_divided

ROWS, UNITS = 23, 6
OPTIMIZERS = {
    "momentum, clipped over all": lambda: keras.optimizers.SGD(
        0.5, momentum=0.9, global_clipnorm=0.05
    ),
    "AdamW, clipped by weight": lambda: keras.optimizers.AdamW(
        0.01, weight_decay=0.1, clipnorm=0.01
    ),
    "Adagrad, clipped by value": lambda: keras.optimizers.Adagrad(0.1, clipvalue=0.002),
}


CONTINUED = OPTIMIZERS["AdamW, clipped by weight"]


class OwnEmbedding(keras.layers.Embedding):
    """Looks up rows in a way that nobody knows."""

    def call(self, inputs):
        return 2 * super().call(inputs)


def build_text(optimizer, *, kind=keras.layers.Embedding, tied=False):
    """A table that is used twice, beside one that is too small to be divided."""
    words = keras.Input((7,), dtype="int32")
    table = kind(
        ROWS,
        UNITS,
        mask_zero=True,
        name="table",
        embeddings_initializer=zoo.seeded(1),
    )
    kinds = keras.layers.Embedding(5, UNITS, name="kinds", embeddings_initializer=zoo.seeded(2))
    x = table(words) + kinds(words % 5)
    x = x * keras.ops.mean(table(words[:, :2]), axis=1, keepdims=True)
    x = keras.layers.Dropout(0.1, seed=3)(keras.layers.GlobalAveragePooling1D()(x))
    if tied:
        x = keras.layers.Lambda(lambda x: x @ keras.ops.transpose(table.embeddings))(x)
    outputs = keras.layers.Dense(4, kernel_initializer=zoo.seeded(4))(x)
    model = keras.Model(words, outputs)
    model.compile(
        optimizer,
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def make_texts():
    rng = np.random.default_rng(0)
    return rng.integers(-2, ROWS, (40, 7)), rng.integers(0, 4, 40)


def make_text_trainer(strategy, make_optimizer, *, directory=None, **options):
    if "ParameterServer" in type(strategy).__name__:
        options = {"max_in_flight": 1, "shard_tables_bytes": 500} | options
    build = functools.partial(build_text, **options.pop("build", {}))
    return zoo.make_trainer(
        lambda: build(make_optimizer()),
        strategy=strategy,
        seed=5,
        checkpoint_dir=directory and str(directory),
        **options,
    )


def train_texts(strategy, make_optimizer, *, steps=12, **options):
    """Returns the trainer, all variables and the losses of epochs of five steps."""
    callbacks = options.pop("callbacks", [])
    trainer = make_text_trainer(strategy, make_optimizer, **options)
    losses = trainer.fit(
        *make_texts(), batch_size=8, max_steps=steps, checkpoint_every=2, callbacks=callbacks,
        verbose=0,
    ).history["loss"]  # fmt: skip
    model = trainer.model
    return trainer, [v.numpy() for v in [*model.variables, *model.optimizer.variables]], losses


def compare_texts(strategy, make_optimizer, path):
    """Compares with one device, and with the saved model in Keras."""
    _, expected, expected_losses = train_texts(
        tf.distribute.OneDeviceStrategy("CPU:0"), make_optimizer
    )
    trainer, found, losses = train_texts(strategy, make_optimizer)
    x, y = make_texts()
    trainer.model.save(path)
    saved = keras.saving.load_model(path)
    table = find_divided(trainer.model.get_layer("table").embeddings)
    slots = [find_divided(v) for v in trainer.model.optimizer.variables]
    return {
        "variables": zoo.largest_difference(found, expected),
        "losses": zoo.largest_difference([np.array(losses)], [np.array(expected_losses)]),
        "predictions": float(np.abs(trainer.predict(x) - saved.predict(x, verbose=0)).max()),
        "logs": [trainer.evaluate(x, y, verbose=0), saved.evaluate(x, y, verbose=0)],
        "paths": [weight.path for weight in saved.weights][:2],
        "devices": [part.device for part in table.parts],
        "rows": [part.shape[0] for part in table.parts],
        "slots": [[part.device for part in slot.parts] for slot in slots if slot],
        "divided": sum(find_divided(v) is not None for v in trainer.model.variables),
    }


def list_refused_tables(strategy):
    refused = {}
    for name, make_optimizer, options in (
        ("LAMB", keras.optimizers.Lamb, {}),
        ("average", lambda: keras.optimizers.Adam(use_ema=True), {}),
        ("tied", keras.optimizers.Adam, {"build": {"tied": True}}),
        ("own call", keras.optimizers.Adam, {"build": {"kind": OwnEmbedding}}),
        ("small", keras.optimizers.Adam, {"shard_tables_bytes": 1 << 20}),
    ):
        try:
            train_texts(strategy, make_optimizer, **options)
        except TfdistError as error:
            refused[name] = str(error)
    return refused


def look_up_outside(strategy):
    """Returns what is said of a row that the table does not have."""
    try:
        make_text_trainer(strategy, keras.optimizers.SGD).fit(
            np.full((8, 7), ROWS), np.zeros(8), verbose=0
        )
    except TfdistError as error:
        return str(error)


def run_tables(strategy, here, kill):
    """Compares, and at last loses a server with its part of a table."""
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    found = {
        name: compare_texts(strategy, make, here / "model.keras")
        for name, make in OPTIMIZERS.items()
    }
    _, _, losses = train_texts(strategy, keras.optimizers.Adagrad, max_in_flight=3)
    found = {"compared": found, "refused": list_refused_tables(strategy), "in_flight": losses}
    try:
        train_texts(strategy, CONTINUED, directory=here / "checkpoints", callbacks=[kill])
    except TrainingError as error:
        found["lost"] = str(error)
    return found


def run_continued_table(strategy, here):
    """Continues what `run_tables` has begun to the end, and then on one device."""
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    one = tf.distribute.OneDeviceStrategy("CPU:0")
    directory = here / "checkpoints"
    trainers = [
        train_texts(strategy, CONTINUED, directory=directory),
        (continued := train_texts(one, CONTINUED, steps=15, directory=directory)),
    ]
    _, expected, _ = train_texts(one, CONTINUED, steps=15)
    return {
        "resumed_from": [trainer.progress.resumed_from_step for trainer, *_ in trainers],
        "variables": zoo.largest_difference(continued[1], expected),
        "outside": look_up_outside(strategy),
    }
