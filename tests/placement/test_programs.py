"""Strangers' programs under every placement: equal to plain Keras, or refused in one line."""

import functools

import keras
import numpy as np
import pytest

import tfdist
from tests.training.programs import INDIVISIBLE, PROGRAMS
from tfdist.errors import TfdistError
from tfdist.placement.options import PLACEMENTS

pytestmark = pytest.mark.filterwarnings("ignore:Gradients do not exist")
ALL = {**PROGRAMS, **INDIVISIBLE}
# Their layers are known only while they run.
SUBCLASSES = (
    "no training argument",
    "no training argument around an augmentation",
    "positions",
    "two optimizers",
    "an autoencoder that draws",
    "gradients of two batches",
    "a teacher",
    "an optimizer that starts from a number",
    "an optimizer that keeps rows and columns",
)
PICTURES = ("images that count nothing",)
REFUSED = {
    "layers": (*SUBCLASSES, "a metric in a layer", "a spectral norm"),
    "shards": ("an optimizer that keeps rows and columns",),
    "strips": tuple(name for name in ALL if name not in PICTURES),
}
MESSAGE = (
    "^Cannot (divide|compute) the model|`placement=strips` has nothing to divide"
    "|`placement=shards` does not support"
)


def _fit(name, **options):
    keras.utils.set_random_seed(1)
    trainer = tfdist.Trainer(ALL[name].build, **options)
    history = trainer.fit(ALL[name].make_dataset(), epochs=2, verbose=0, shuffle=False)
    return history.history, [weight.numpy() for weight in trainer.model.weights]


@functools.cache
def _fit_whole(name):
    return _fit(name)


@pytest.mark.thorough(keep=6)
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("name", ALL)
def test_a_strangers_program_is_equal_or_refused(placement, name):
    placed = PLACEMENTS[placement](devices=2)
    if name in REFUSED.get(placement, ()):
        with pytest.raises(TfdistError, match=MESSAGE) as caught:
            _fit(name, placement=placed)
        assert "\n" not in str(caught.value)
        return
    expected, weights = _fit_whole(name)
    history, found = _fit(name, placement=placed)
    assert history.keys() == expected.keys()
    for key, values in expected.items():
        np.testing.assert_allclose(history[key], values, rtol=1e-5, atol=1e-6, err_msg=key)
    # Rounding the first weights of this one differently changes its last ones by as much.
    tolerance = 1e-3 if name == "a sum of rows" else 1e-5
    for ours, theirs in zip(found, weights, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=tolerance, rtol=tolerance)
