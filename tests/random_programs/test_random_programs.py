"""The short form of `make random-programs`: some random programs, in every way of training."""

import keras
import pytest

from tests.random_programs import comparison
from tests.random_programs.comparison import (
    DIFFERS,
    EQUAL,
    WAYS,
    Way,
    compare,
    find_tolerance,
    reduce,
)
from tests.random_programs.layers import LAYERS
from tests.random_programs.program import make_program

pytestmark = pytest.mark.optimized
SEEDS = range(3)


@pytest.mark.thorough(keep=3)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("seed", SEEDS)
def test_ends_as_with_keras_or_is_refused(float64, seed, way):
    outcome = compare(seed, way)
    assert outcome.kind != DIFFERS, f"{make_program(seed).choices}: {outcome.text}"


@pytest.mark.parametrize(
    ("name", "tolerance"), [("dense", 1e-7), ("float32", 1e-5), ("low rank", 1e-5)]
)
def test_weights_in_float32_are_rounded(float64, name, tolerance):
    inputs = keras.Input((8,))
    assert find_tolerance(keras.Model(inputs, LAYERS[name](inputs))) == tolerance


class _Wrong(Way):
    """Keras's own model, whose noise is twice as strong."""

    def make_trainer(self, build):
        model = build()
        for layer in model.layers:
            if isinstance(layer, keras.layers.GaussianNoise):
                layer.stddev *= 2
        return model


def test_a_difference_is_found_and_reduced_to_its_cause(float64, monkeypatch):
    monkeypatch.setitem(comparison.WAYS, "wrong", _Wrong(is_exact=True))

    def find(is_noisy):
        return next(
            seed
            for seed in range(10000)
            if 2 < len(choices := make_program(seed).choices) < 6
            and is_noisy == ("noise" in {choices.get(f"layer {n}") for n in range(3)})
            and not {"input", "class", "use"} & choices.keys()
        )

    assert "noise" in LAYERS
    assert compare(find(is_noisy=False), "wrong").kind == EQUAL
    noisy = find(is_noisy=True)
    outcome = compare(noisy, "wrong")
    assert outcome.kind == DIFFERS
    assert "fit loss" in outcome.text
    assert set(reduce(noisy, "wrong").values()) == {"noise"}
