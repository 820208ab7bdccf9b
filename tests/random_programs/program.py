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

from tests.random_programs.data import FORMS, ROWS, Data, list_fit_options
from tests.random_programs.inputs import INPUTS
from tests.random_programs.layers import CLASSES, LAYERS
from tests.random_programs.training import (
    BATCH_CALLBACKS,
    CALLBACKS,
    COMPILED,
    LOSSES,
    METRICS,
    OPTIMIZER_OPTIONS,
    OPTIMIZERS,
    WEIGHTS,
    weigh_nothing,
)
from tests.random_programs.uses import USES


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
    cls = pick("class", CLASSES[kind])
    make_optimizer = pick("optimizer", OPTIMIZERS)
    make_options = pick("optimizer's options", OPTIMIZER_OPTIONS)
    make_loss = pick("loss", LOSSES[kind])
    make_metrics = pick("metrics", METRICS[kind])
    takes_weights = kind != "two" and choices.made.get("class") not in ("own steps", "adversarial")
    weights = WEIGHTS if takes_weights else {"none": weigh_nothing}
    metrics_are_weighted = pick("weighted metrics", {"no": False, "yes": True})
    make_weights = pick("sample weights", weights)
    form = pick("data", FORMS)
    data = Data(
        rows=pick("rows", ROWS),
        kind=kind,
        make_input=make_input,
        make_weights=make_weights,
        form=form,
        fit=pick("fit", list_fit_options(form, kind, is_weighted=make_weights != weigh_nothing)),
    )
    compiled = pick("compiled", COMPILED)
    batch_callbacks = {} if "steps_per_execution" in compiled else BATCH_CALLBACKS
    callbacks = pick("callbacks", CALLBACKS | batch_callbacks)
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
            **compiled,
            **{"weighted_metrics" if metrics_are_weighted else "metrics": make_metrics()},
        )
        return model

    def use(model):
        return uses(model, data, {"callbacks": callbacks(), "validates": validates})

    return RandomProgram(choices.made, build, use)
