"""Keras programs made at random, to compare Keras's own `fit` with tfdist's.

A program is a pure function of its seed. Each choice in it has a name and depends on the seed and
this name alone, so that a choice can be made plain while all others stay: this is how `reduce`
finds what of a program matters. Everything is computed in float64, where a difference is no
rounding.
"""

import dataclasses
import random
from collections.abc import Callable, Collection, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.training import programs

ROWS = {"30 rows": 30, "32 rows": 32, "25 rows": 25, "7 rows": 7}
BATCH = 8
VOCABULARY, TOKENS = 20, 8


class Choices:
    """Picks options by name.

    Args:
      seed: of the program.
      plain: the names for which the first option is picked.

    Attributes:
      made: name -> what was picked, where it is not the first option.
    """

    def __init__(self, seed: int, plain: Collection[str] = ()):
        self._seed, self._plain = seed, plain
        self.made: dict[str, str] = {}

    def pick(self, name: str, options: Mapping[str, Any]) -> Any:
        """Returns the first option in half of all programs, and any other in the rest."""
        rng = random.Random(f"{self._seed} {name}")
        first, *others = options
        if name in self._plain or not others or rng.random() < 0.5:
            return options[first]
        self.made[name] = rng.choice(others)
        return options[self.made[name]]


@dataclasses.dataclass(frozen=True)
class RandomProgram:
    """A program.

    Attributes:
      choices: what is special about it: name -> option.
      build: returns its compiled model, the same every time.
      use: trains, evaluates and predicts with a model or a trainer; returns name -> values.
    """

    choices: Mapping[str, str]
    build: Callable[[], keras.Model]
    use: Callable[[Any], dict[str, np.ndarray]]


def make_program(seed: int, plain: Collection[str] = ()) -> RandomProgram:
    """Returns the program of a seed.

    Args:
      seed: any number.
      plain: the names of choices that are made plain.
    """
    choices = Choices(seed, plain)
    pick = choices.pick
    make_input = pick("input", INPUTS)
    kind = pick("output", {name: name for name in ("numbers", "classes", "two")})
    layers = [pick(f"layer {number}", LAYERS) for number in range(3)]
    cls = pick("class", CLASSES if kind == "numbers" else {"Model": keras.Model})
    make_optimizer = pick("optimizer", OPTIMIZERS)
    make_options = pick("optimizer's options", OPTIMIZER_OPTIONS)
    make_loss = pick("loss", LOSSES[kind])
    make_metrics = pick("metrics", METRICS[kind])
    takes_weights = kind != "two" and choices.made.get("class") not in ("own steps", "adversarial")
    metrics_are_weighted = pick("weighted metrics", {"no": False, "yes": True})
    data = Data(
        rows=pick("rows", ROWS),
        kind=kind,
        make_input=make_input,
        make_weights=pick("sample weights", WEIGHTS if takes_weights else {"none": _weigh_nothing}),
        form=pick("data", FORMS),
    )
    callbacks = pick("callbacks", CALLBACKS)
    validates = pick("validation", {"no": False, "yes": True})
    uses = pick("use", USES)

    def build():
        keras.utils.set_random_seed(seed)
        inputs, x = make_input().build()
        for layer in layers:
            x = layer(x)
        outputs = {
            "numbers": lambda: keras.layers.Dense(3, name="numbers")(x),
            "classes": lambda: keras.layers.Dense(4, name="classes")(x),
            "two": lambda: {
                "numbers": keras.layers.Dense(3, name="numbers")(x),
                "classes": keras.layers.Dense(4, name="classes")(x),
            },
        }[kind]()
        model = cls(inputs, outputs)
        model.compile(
            make_optimizer(**make_options()),
            **make_loss(),
            **{"weighted_metrics" if metrics_are_weighted else "metrics": make_metrics()},
        )
        return model

    def use(model):
        return uses(model, data, {"callbacks": callbacks(), "validates": validates})

    return RandomProgram(choices.made, build, use)


@dataclasses.dataclass(frozen=True)
class Data:
    """What a program trains on."""

    rows: int
    kind: str
    make_input: Callable[[], "Input"]
    make_weights: Callable[[int], Any]
    form: str

    def make_arrays(self) -> tuple[Any, Any, Any]:
        rng = np.random.default_rng(self.rows)
        y = {"numbers": rng.normal(size=(self.rows, 3)), "classes": rng.integers(0, 4, self.rows)}
        return (
            self.make_input().draw(rng, self.rows),
            y if self.kind == "two" else y[self.kind],
            self.make_weights(self.rows),
        )

    def make_arguments(self) -> dict[str, Any]:
        """Returns arguments of `fit`."""
        x, y, weights = self.make_arrays()
        if self.form == "arrays":
            return {"x": x, "y": y, "sample_weight": weights, "batch_size": BATCH}
        parts = (x, y) if weights is None else (x, y, weights)
        if self.form == "batches":
            return {"x": Batches(parts)}
        dataset = tf.data.Dataset.from_tensor_slices(parts)
        if self.form == "shuffled":
            dataset = dataset.shuffle(self.rows, seed=3)
        dataset = dataset.batch(BATCH)
        if self.form == "endless":
            return {"x": dataset.repeat(), "steps_per_epoch": 3}
        if self.form == "generator":
            return {"x": _generate(dataset.repeat()), "steps_per_epoch": 3}
        return {"x": dataset}


def _generate(dataset):
    yield from dataset.as_numpy_iterator()


class Batches(keras.utils.PyDataset):
    """Batches of arrays, as a Keras sequence."""

    def __init__(self, parts):
        super().__init__()
        self._parts = parts
        self._rows = len(keras.tree.flatten(parts)[0])

    def __len__(self):
        return -(-self._rows // BATCH)

    def __getitem__(self, index):
        rows = slice(index * BATCH, (index + 1) * BATCH)
        return keras.tree.map_structure(lambda part: part[rows], self._parts)


def _fit(model, data, options, *, epochs=2):
    x, y, _ = data.make_arrays()
    validation = {"validation_data": (x, y), "validation_batch_size": 8}
    return model.fit(
        **data.make_arguments(),
        **(validation if options["validates"] else {}),
        callbacks=options["callbacks"],
        epochs=epochs,
        shuffle=False,
        verbose=0,
    ).history


def _use_once(model, data, options):
    return _read(model, data, {"fit": _fit(model, data, options)})


def _use_twice(model, data, options):
    found = {"fit": _fit(model, data, options, epochs=1)}
    _read(model, data, found)
    return _read(model, data, {**found, "again": _fit(model, data, options, epochs=1)})


def _take(arrays, count):
    """Returns the first rows of arrays in any structure; None stays."""
    if arrays is None:
        return None
    return keras.tree.map_structure(lambda array: array[:count], arrays)


def _use_batches(model, data, options):
    found = {}
    for call, count in enumerate((7, 3, 1)):
        batch = [_take(part, count) for part in data.make_arrays()]
        found[f"batch {call}"] = model.train_on_batch(*batch, return_dict=True)
        found[f"test {call}"] = model.test_on_batch(*batch, return_dict=True)
    return _read(model, data, {**found, "fit": _fit(model, data, options, epochs=1)})


def _read(model, data, found):
    """Returns what was found, and what the model gives now, by name."""
    x, y, weights = data.make_arrays()
    found["evaluate"] = model.evaluate(
        x, y, sample_weight=weights, batch_size=BATCH, verbose=0, return_dict=True
    )
    found["predict"] = model.predict(x, batch_size=BATCH, verbose=0)
    kept = getattr(model, "model", model)
    found["weights"] = [weight.numpy() for weight in kept.weights]
    found["steps"] = kept.optimizer.iterations.numpy()
    flat = {}
    for name, value in found.items():
        for path, leaf in keras.tree.flatten_with_path(value):
            key = " ".join([name, *map(str, path)])
            flat[key] = np.asarray(leaf, "float64")
    return flat


class Input:
    """Numbers."""

    def build(self):
        inputs = keras.Input((6,))
        return inputs, keras.layers.Dense(8, "tanh")(inputs)

    def draw(self, rng, rows):
        return rng.normal(size=(rows, 6))


class Images(Input):
    def build(self):
        inputs = keras.Input((6, 6, 2))
        x = keras.layers.Conv2D(4, 3, use_bias=False)(inputs)
        x = keras.layers.BatchNormalization()(x)
        return inputs, keras.layers.Dense(8)(keras.layers.Flatten()(keras.layers.ReLU()(x)))

    def draw(self, rng, rows):
        return rng.uniform(size=(rows, 6, 6, 2))


class Tokens(Input):
    """Rows of tokens, of different lengths.

    Args:
      reduce: returns a layer that makes one vector of those of all tokens.
    """

    def __init__(self, reduce=lambda: keras.layers.GlobalAveragePooling1D()):
        self._reduce = reduce

    def build(self):
        inputs = keras.Input((TOKENS,), dtype="int32")
        x = keras.layers.Embedding(VOCABULARY, 6, mask_zero=True)(inputs)
        return inputs, keras.layers.Dense(8, "tanh")(self._reduce()(x))

    def draw(self, rng, rows):
        tokens = rng.integers(1, VOCABULARY, (rows, TOKENS)).astype("int32")
        lengths = rng.integers(1, TOKENS + 1, rows)
        return np.where(np.arange(TOKENS) < lengths[:, None], tokens, 0)


class Pairs(Input):
    """A dictionary of numbers and tokens."""

    _numbers, _tokens = Input(), Tokens()

    def build(self):
        numbers, x = self._numbers.build()
        tokens, y = self._tokens.build()
        return {"numbers": numbers, "tokens": tokens}, keras.layers.Add()([x, y])

    def draw(self, rng, rows):
        return {"numbers": self._numbers.draw(rng, rows), "tokens": self._tokens.draw(rng, rows)}


def _attend(x):
    x = keras.layers.MultiHeadAttention(2, 3)(x, x)
    return keras.layers.GlobalMaxPooling1D()(x)


INPUTS: dict[str, Callable[[], Input]] = {
    "numbers": Input,
    "images": Images,
    "tokens": Tokens,
    "LSTM": lambda: Tokens(lambda: keras.layers.LSTM(5)),
    "GRU": lambda: Tokens(lambda: keras.layers.Bidirectional(keras.layers.GRU(4))),
    "attention": lambda: Tokens(lambda: _attend),
    "two": Pairs,
}


def _nest(x):
    inputs = keras.Input((8,))
    inner = keras.layers.Dropout(0.2)(keras.layers.Dense(8, "relu")(inputs))
    return keras.Model(inputs, inner)(x)


def _share(x):
    layer = keras.layers.Dense(8, "tanh")
    return layer(layer(x))


def _freeze(x):
    layer = keras.layers.Dense(8, "tanh")
    layer.trainable = False
    return layer(x)


def _scale_rows(x):
    return x / (1.0 + keras.ops.sum(x**2, -1, keepdims=True))


def _dense(**options):
    return lambda x: keras.layers.Dense(8, "tanh", **options)(x)


LAYERS: dict[str, Callable[[Any], Any]] = {
    "dense": _dense(),
    "nothing": lambda x: x,
    "batch normalization": lambda x: keras.layers.BatchNormalization(momentum=0.8)(x),
    "synchronized": lambda x: keras.layers.BatchNormalization(synchronized=True)(x),
    "layer normalization": lambda x: keras.layers.LayerNormalization()(x),
    "dropout": lambda x: keras.layers.Dropout(0.3)(x),
    "noise": lambda x: keras.layers.GaussianNoise(0.2)(x),
    "spectral": lambda x: keras.layers.SpectralNormalization(keras.layers.Dense(8))(x),
    "penalty": lambda x: keras.layers.Dense(8, kernel_regularizer="l2", bias_regularizer="l1")(x),
    "activity": lambda x: keras.layers.Dense(8, activity_regularizer="l2")(x),
    "constraint": _dense(kernel_constraint=keras.constraints.MaxNorm(0.7)),
    "low rank": lambda x: keras.layers.Dense(8, lora_rank=2)(x),
    "residual": lambda x: x + keras.layers.Dense(8, "gelu")(x),
    "nested": _nest,
    "shared": _share,
    "frozen": _freeze,
    "lambda": lambda x: keras.layers.Lambda(_scale_rows)(x),
    "PReLU": lambda x: keras.layers.PReLU()(x),
    "added loss": lambda x: programs.Adds(lambda x: 0.1 * keras.ops.mean(x**2))(x),
    "moving mean": lambda x: programs.MovingMean()(x),
    "measured": lambda x: programs.Measures()(x),
    "drawn": lambda x: programs.Noise()(x),
    "always drawn": lambda x: programs.DrawsAlways()(x),
    "centered": lambda x: programs.Centered()(x),
}

CLASSES: dict[str, type[keras.Model]] = {
    "Model": keras.Model,
    "own steps": programs.OwnSteps,
    "own loss": programs.MoreLoss,
    "plain loss": programs.PlainLoss,
    "own metric": programs.MoreMetrics,
    "measuring loss": programs.MeasuringLoss,
    "gradient penalty": programs.Smooth,
    "adversarial": programs.Adversarial,
}

_O = keras.optimizers
OPTIMIZERS: dict[str, Callable[..., keras.optimizers.Optimizer]] = {
    "SGD": lambda **options: _O.SGD(0.05, **options),
    "momentum": lambda **options: _O.SGD(0.05, momentum=0.9, nesterov=True, **options),
    "Adam": lambda **options: _O.Adam(0.01, **options),
    "amsgrad": lambda **options: _O.Adam(0.01, amsgrad=True, **options),
    "AdamW": lambda **options: _O.AdamW(0.01, **{"weight_decay": 0.1, **options}),
    "RMSprop": lambda **options: _O.RMSprop(0.01, centered=True, **options),
    "Adagrad": lambda **options: _O.Adagrad(0.05, **options),
    "Adadelta": lambda **options: _O.Adadelta(1.0, **options),
    "Nadam": lambda **options: _O.Nadam(0.01, **options),
    "Ftrl": lambda **options: _O.Ftrl(0.05, **options),
    "schedule": lambda **options: _O.Adam(_O.schedules.CosineDecay(0.02, 6), **options),
    "scaled": lambda **options: _O.LossScaleOptimizer(
        _O.SGD(0.05, **options), initial_scale=64, dynamic_growth_steps=2
    ),
}
OPTIMIZER_OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "none": dict,
    "clipnorm": lambda: {"clipnorm": 0.1},
    "clipvalue": lambda: {"clipvalue": 0.02},
    "weight_decay": lambda: {"weight_decay": 0.02},
    "average": lambda: {"use_ema": True, "ema_momentum": 0.7},
    "overwritten": lambda: {"use_ema": True, "ema_momentum": 0.7, "ema_overwrite_frequency": 3},
}

_L, _M = keras.losses, keras.metrics


def _classes():
    return _L.SparseCategoricalCrossentropy(from_logits=True)


LOSSES: dict[str, dict[str, Callable[[], dict[str, Any]]]] = {
    "numbers": {
        "mse": lambda: {"loss": "mse"},
        "Huber": lambda: {"loss": _L.Huber(0.5)},
        "sum": lambda: {"loss": _L.MeanAbsoluteError(reduction="sum")},
        "weighted mean": lambda: {"loss": _L.LogCosh(reduction="mean_with_sample_weight")},
        "cosine": lambda: {"loss": _L.CosineSimilarity()},
        "function": lambda: {"loss": lambda y, found: keras.ops.mean((y - found) ** 4, -1)},
        "one number": lambda: {"loss": programs.MeanLoss()},
    },
    "classes": {
        "crossentropy": lambda: {"loss": _classes()},
        "ignored": lambda: {
            "loss": _L.SparseCategoricalCrossentropy(from_logits=True, ignore_class=1)
        },
    },
    "two": {
        "both": lambda: {"loss": {"numbers": "mse", "classes": _classes()}},
        "weighted": lambda: {
            "loss": {"numbers": "mae", "classes": _classes()},
            "loss_weights": {"numbers": 0.3, "classes": 2.0},
        },
        "one": lambda: {"loss": {"numbers": "mse"}},
    },
}
METRICS: dict[str, dict[str, Callable[[], Any]]] = {
    "numbers": {
        "none": lambda: None,
        "mae": lambda: ["mae"],
        "R2": lambda: [_M.R2Score(), _M.RootMeanSquaredError()],
        "largest": lambda: [programs.Largest()],
    },
    "classes": {
        "none": lambda: None,
        "accuracy": lambda: ["accuracy"],
        "best two": lambda: [_M.SparseTopKCategoricalAccuracy(2)],
    },
    "two": {
        "none": lambda: None,
        "one": lambda: {"classes": ["accuracy"]},
        "both": lambda: {"classes": ["accuracy"], "numbers": ["mae", "mse"]},
    },
}


def _weigh_nothing(rows):
    return None


WEIGHTS: dict[str, Callable[[int], Any]] = {
    "none": _weigh_nothing,
    "rising": lambda rows: np.linspace(0.0, 3.0, rows),
    "some zero": lambda rows: (np.arange(rows) % 3 > 0).astype("float64"),
    "first half zero": lambda rows: (np.arange(rows) >= rows // 2).astype("float64"),
}
FORMS = {
    name: name for name in ("arrays", "dataset", "shuffled", "batches", "endless", "generator")
}


class _Rates(keras.callbacks.Callback):
    """Changes the learning rate after each batch."""

    def on_train_batch_end(self, batch, logs=None):
        rate = self.model.optimizer.learning_rate
        if isinstance(rate, keras.Variable):
            rate.assign(rate * 0.9)


_C = keras.callbacks
CALLBACKS: dict[str, Callable[[], list[keras.callbacks.Callback]]] = {
    "none": list,
    "plateau": lambda: [_C.ReduceLROnPlateau("loss", 0.5, patience=0, min_delta=10.0)],
    "stops": lambda: [_C.EarlyStopping("loss", patience=0, min_delta=10.0)],
    "best": lambda: [_C.EarlyStopping("loss", patience=1, restore_best_weights=True)],
    "rates": lambda: [_Rates()],
}
USES = {"once": _use_once, "twice": _use_twice, "single batches": _use_batches}
