"""Whether random programs end under tfdist as under Keras, and what of them matters if not."""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Mapping, Sequence

import keras
import numpy as np

import tfdist
from tests import zoo
from tests.random_programs.program import make_program
from tests.random_programs.training import BATCH_CALLBACKS
from tfdist.errors import TfdistError
from tfdist.placement import Layers, Shards

EQUAL, REFUSED, DIFFERS, NO_PROGRAM, NOT_COMPARED = (
    "equal",
    "refused",
    "differs",
    "no program",
    "not compared",
)


@dataclasses.dataclass(frozen=True)
class Way:
    """A way to train.

    Attributes:
      strategy: a name in `zoo.STRATEGIES`.
      options: of the trainer and of its steps.
      is_exact: whether the result must have Keras's bits.
      skipped: choices that have another meaning here: name -> options.
    """

    strategy: str = "one_device"
    options: Callable[[], dict] = dict
    is_exact: bool = False
    skipped: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)

    def make_trainer(self, build: Callable[[], keras.Model]) -> tfdist.Trainer:
        strategy = zoo.STRATEGIES[self.strategy]()
        return zoo.make_trainer(build, strategy=strategy, **self.options())


WAYS = {
    "one_device": Way(is_exact=True),
    "mirrored": Way("mirrored-3"),
    "central_storage": Way("central_storage-2"),
    "shard_optimizer": Way("mirrored-2", lambda: {"shard_optimizer": True}),
    "micro_batches": Way(options=lambda: {"micro_batches": 2}),
    "rematerialize": Way(options=lambda: {"rematerialize": True}),
    # Its callbacks follow after both steps.
    "steps_per_loop": Way(
        options=lambda: {"steps_per_loop": 2}, skipped={"callbacks": tuple(BATCH_CALLBACKS)}
    ),
    "layers": Way(options=lambda: {"placement": Layers(devices=2)}),
    "shards": Way(options=lambda: {"placement": Shards(devices=2)}),
}


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a program ended: one of the constants above, and what there is to say."""

    kind: str
    text: str = ""


def compare(seed: int, way: str, plain: frozenset[str] = frozenset()) -> Outcome:
    """Trains a program with Keras, and with tfdist in some way.

    Args:
      seed: of the program.
      way: a key of `WAYS`.
      plain: see `make_program`.
    """
    program = make_program(seed, plain)
    skipped = WAYS[way].skipped
    if any(option in skipped.get(name, ()) for name, option in program.choices.items()):
        return Outcome(NOT_COMPARED)
    expected = _use_keras(seed, plain)
    if isinstance(expected, str):
        return Outcome(NO_PROGRAM, expected)
    try:
        found = program.use(WAYS[way].make_trainer(program.build))
    except TfdistError as error:
        return Outcome(REFUSED, str(error))
    except Exception as error:
        return Outcome(DIFFERS, _describe(error))
    finally:
        _clear()
    tolerance = 0 if WAYS[way].is_exact else _build_for_tolerance(seed, plain)
    text = find_difference(found, expected, tolerance)
    return Outcome(DIFFERS, text) if text else Outcome(EQUAL)


def reduce(seed: int, way: str) -> Mapping[str, str]:
    """Returns those choices of a program without which it would end as with Keras."""
    plain: frozenset[str] = frozenset()
    tried: set[str] = set()
    # A plain choice may lead to others.
    while names := make_program(seed, plain).choices.keys() - tried:
        tried.add(min(names))
        if compare(seed, way, plain | {min(names)}).kind == DIFFERS:
            plain |= {min(names)}
    return make_program(seed, plain).choices


def find_tolerance(model: keras.Model) -> float:
    """Returns the relative difference that rounding may make in a float64 program."""
    # A weight in float32, such as those of low rank, is rounded after each update.
    return 1e-5 if any(weight.dtype == "float32" for weight in model.weights) else 1e-7


def find_difference(
    found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray], tolerance: float
) -> str:
    """Returns what differs by more than a relative tolerance, or nothing."""
    if found.keys() != expected.keys():
        return f"other results: {', '.join(sorted(found.keys() ^ expected.keys()))}"
    texts = []
    for name, values in expected.items():
        if found[name].shape != values.shape:
            return f"{name}: shape {found[name].shape} instead of {values.shape}"
        if not np.allclose(found[name], values, tolerance, tolerance / 100, equal_nan=True):
            texts.append(f"{name} by {np.abs(found[name] - values).max():.1e}")
    more = f" and {len(texts) - 4} more" if len(texts) > 4 else ""
    return ", ".join(texts[:4]) + more


@functools.lru_cache(maxsize=4)
def _use_keras(seed: int, plain: frozenset[str]) -> dict[str, np.ndarray] | str:
    """Returns what Keras ends with, or why it does not run the program."""
    program = make_program(seed, plain)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Keras's, of data that ran out and of shuffling
            return program.use(program.build())
    except Exception as error:
        return _describe(error)
    finally:
        _clear()


def _build_for_tolerance(seed: int, plain: frozenset[str]) -> float:
    try:
        return find_tolerance(make_program(seed, plain).build())
    finally:
        _clear()  # or the next model's metrics have other names


def _describe(error: Exception) -> str:
    first = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first[:200]}"


def _clear() -> None:
    # To collect garbage takes seconds in a process that has run many tests.
    keras.backend.clear_session(free_memory=False)
