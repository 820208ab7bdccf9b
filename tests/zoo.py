"""The strategies and models that the contract tests cross."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tfdist import models, strategies
from tfdist.models.layers import FusedBatchNormalization
from tfdist.tasks.segmentation.losses import make_loss
from tfdist.tasks.segmentation.metrics import SegmentationMetrics

KIND = "GPU" if tf.config.list_physical_devices("GPU") else "CPU"
_TWO = [f"{KIND}:0", f"{KIND}:1"]

# What every synchronous strategy is compared with comes first; `make test` runs the first two or
# three of them in most tests.
STRATEGIES: dict[str, Callable[[], tf.distribute.Strategy]] = {
    "one_device": lambda: strategies.make_one_device(devices=[f"{KIND}:0"]),
    "mirrored-2": lambda: strategies.make_mirrored(devices=_TWO),
    "central_storage-2": lambda: strategies.make_central_storage(devices=_TWO),
    "mirrored-3": lambda: strategies.make_mirrored(devices=[*_TWO, f"{KIND}:2"]),
}
REPLICAS_FIRST = [*list(STRATEGIES)[1:], "one_device"]

# The flags of a training of a few seconds, besides those of its data and its directory.
SMALL_RUN = [
    "--strategy=one_device",
    "--image_size=16,16",
    "--train_examples=64",
    "--val_examples=10",
    "--base_filters=4",
    "--depth=2",
    "--global_batch_size=16",
    "--epochs=4",
    "--learning_rate=1e-2",
    "--notensorboard",
]


@dataclass(frozen=True)
class Example:
    """A model to train and what to train it on.

    Attributes:
      build: optimizer -> compiled model; the same weights every time.
      data: `x` and `y` of 40 examples.
      sample_weight: weights of the examples, or None.
    """

    build: Callable[[keras.optimizers.Optimizer], keras.Model]
    data: tuple[Any, Any]
    sample_weight: Any = None


def seeded(seed: int) -> keras.initializers.Initializer:
    """Returns what draws the same weights every time."""
    return keras.initializers.GlorotUniform(seed=seed)


def _build_dense(optimizer):
    model = keras.Sequential(
        [
            keras.layers.Input((12,)),
            keras.layers.Dense(16, "tanh", kernel_initializer=seeded(1), kernel_regularizer="l2"),
            keras.layers.Dense(
                4, kernel_initializer=seeded(2), activity_regularizer=keras.regularizers.L2(0.01)
            ),
        ]
    )
    model.compile(
        optimizer,
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        weighted_metrics=[keras.metrics.SparseCategoricalAccuracy(name="weighted_accuracy")],
    )
    return model


def build_linear(optimizer):
    """Returns a model for the data of `dense`, whose gradient grows with them."""
    model = keras.Sequential(
        [keras.layers.Input((12,)), keras.layers.Dense(4, kernel_initializer=seeded(1))]
    )
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def _build_convolutional(optimizer):
    model = keras.Sequential(
        [
            keras.layers.Input((12, 12, 3)),
            keras.layers.Conv2D(8, 3, use_bias=False, kernel_initializer=seeded(1)),
            FusedBatchNormalization(synchronized=True),
            keras.layers.ReLU(),
            keras.layers.GlobalAveragePooling2D(),
            keras.layers.Dense(4, kernel_initializer=seeded(2)),
        ]
    )
    model.compile(
        optimizer,
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def _build_two_inputs(optimizer):
    left, right = keras.Input((6,), name="left"), keras.Input((4,), name="right")
    hidden = keras.layers.Concatenate()(
        [
            keras.layers.Dense(8, "tanh", kernel_initializer=seeded(1))(left),
            keras.layers.Dense(8, "tanh", kernel_initializer=seeded(2))(right),
        ]
    )
    outputs = {
        "kind": keras.layers.Dense(3, name="kind", kernel_initializer=seeded(3))(hidden),
        "size": keras.layers.Dense(1, name="size", kernel_initializer=seeded(4))(hidden),
    }
    model = keras.Model({"left": left, "right": right}, outputs)
    model.compile(
        optimizer,
        {
            "kind": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            "size": keras.losses.MeanAbsoluteError(),
        },
        loss_weights={"kind": 1.0, "size": 0.5},
        metrics={"kind": ["accuracy"], "size": ["mse"]},
    )
    return model


def _build_transformer(optimizer):
    tokens = keras.Input((10,), dtype="int32")
    x = keras.layers.Embedding(20, 16, mask_zero=True, embeddings_initializer=seeded(1))(tokens)
    attended = keras.layers.MultiHeadAttention(2, 8, kernel_initializer=seeded(2))(x, x)
    x = keras.layers.LayerNormalization()(x + attended)
    x = keras.layers.Dense(16, "gelu", kernel_initializer=seeded(3))(x) + x
    outputs = keras.layers.Dense(20, kernel_initializer=seeded(4))(x)
    model = keras.Model(tokens, outputs)
    model.compile(
        optimizer,
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def _build_random(optimizer):
    """Draws by example, by element, by channel and by weight, with results in blocks or not."""
    inputs = keras.Input((9, 5))
    x = keras.layers.GaussianNoise(0.1, seed=11)(inputs)
    x = keras.layers.Conv1D(7, 3, kernel_initializer=seeded(1))(x)
    x = keras.layers.SpatialDropout1D(0.3, seed=12)(x)
    x = keras.layers.AlphaDropout(0.2, seed=13)(x)
    x = keras.layers.SimpleRNN(
        8,
        dropout=0.2,
        recurrent_dropout=0.2,
        seed=14,
        kernel_initializer=seeded(3),
        recurrent_initializer=seeded(4),
    )(x)
    x = keras.layers.GaussianDropout(0.2, seed=15)(x)
    x = keras.layers.Dropout(0.4, seed=16)(x)
    model = keras.Model(inputs, keras.layers.Dense(4, kernel_initializer=seeded(2))(x))
    model.compile(
        optimizer,
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


IGNORE_LABEL = 3


def _build_unet(optimizer):
    model = models.make_model(
        "unet", image_size=(16, 16), num_classes=3, base_filters=4, depth=1, seed=1
    )
    model.compile(
        optimizer,
        make_loss("cross_entropy", ignore_label=IGNORE_LABEL, class_weights=[1.0, 2.0, 0.5]),
        metrics=[SegmentationMetrics(3, ignore_label=IGNORE_LABEL)],
    )
    return model


def _make_data() -> dict[str, tuple[Any, Any]]:
    rng = np.random.default_rng(7)
    n = 40
    tokens = rng.integers(1, 20, (n, 10)).astype("int32")
    for row, length in enumerate(rng.integers(3, 11, n)):
        tokens[row, length:] = 0
    masks = rng.integers(0, 4, (n, 16, 16)).astype("int32")
    # Replicas see very different numbers of pixels that count.
    masks[::5] = IGNORE_LABEL
    return {
        "dense": (rng.normal(size=(n, 12)).astype("f4"), rng.integers(0, 4, n).astype("int32")),
        "convolutional": (
            rng.normal(size=(n, 12, 12, 3)).astype("f4"),
            rng.integers(0, 4, n).astype("int32"),
        ),
        "two_inputs": (
            {
                "left": rng.normal(size=(n, 6)).astype("f4"),
                "right": rng.normal(size=(n, 4)).astype("f4"),
            },
            {
                "kind": rng.integers(0, 3, n).astype("int32"),
                "size": rng.normal(size=(n, 1)).astype("f4"),
            },
        ),
        "transformer": (tokens, tokens[:, ::-1].copy()),
        "unet": (rng.uniform(0, 255, (n, 16, 16, 3)).astype("f4"), masks),
        "random": (rng.normal(size=(n, 9, 5)).astype("f4"), rng.integers(0, 4, n).astype("int32")),
    }


_DATA = _make_data()
EXAMPLES: dict[str, Example] = {
    "dense": Example(_build_dense, _DATA["dense"], np.linspace(0.1, 3, 40).astype("f4")),
    "convolutional": Example(_build_convolutional, _DATA["convolutional"]),
    "two_inputs": Example(_build_two_inputs, _DATA["two_inputs"]),
    "transformer": Example(_build_transformer, _DATA["transformer"]),
    "unet": Example(_build_unet, _DATA["unet"]),
    "random": Example(_build_random, _DATA["random"]),
}


def largest_difference(ours: list[np.ndarray], theirs: list[np.ndarray]) -> float:
    """Returns the largest difference relative to the largest value."""
    difference = max(np.abs(a - b).max() for a, b in zip(ours, theirs, strict=True))
    return float(difference / max(np.abs(b).max() for b in theirs))


def trace_once(model):
    """Builds the optimizer of a model that Keras trains.

    Otherwise Keras's step makes the optimizer's variables, and TensorFlow traces it twice.
    """
    if model.built and model.optimizer is not None and not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    return model


def take_turns(names, ways):
    """Returns all pairs of names and ways: first each name with one way in turn, then the others.

    >>> take_turns("abc", [1, 2])
    [('a', 1), ('b', 2), ('c', 1), ('a', 2), ('b', 1), ('c', 2)]
    """
    names, ways = list(names), list(ways)
    return [
        (name, ways[(number + turn) % len(ways)])
        for turn in range(len(ways))
        for number, name in enumerate(names)
    ]


def make_trainer(build_model, **options):
    """Returns a trainer of options of its own and of its steps."""
    names = {item.name for item in dataclasses.fields(tfdist.StepOptions)} & options.keys()
    step_options = tfdist.StepOptions(**{name: options.pop(name) for name in names})
    return tfdist.Trainer(build_model, step_options=step_options, **options)
