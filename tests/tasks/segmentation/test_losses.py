import keras
import numpy as np
import pytest

from tfdist.errors import TfdistError
from tfdist.tasks.segmentation.losses import LOSSES, PixelCrossEntropy, PixelFocal, make_loss

RNG = np.random.default_rng(1)
LABELS = RNG.integers(0, 4, (2, 6, 5)).astype("i4")
LOGITS = RNG.normal(size=(2, 6, 5, 3)).astype("f4")
IGNORE = 3


@pytest.mark.parametrize("name", LOSSES)
def test_ignored_pixels_count_nowhere(name):
    loss = make_loss(name, ignore_label=IGNORE)
    other = LOGITS.copy()
    other[LABELS == IGNORE] = 50 * RNG.normal(size=((LABELS == IGNORE).sum(), 3))
    assert float(loss(LABELS, LOGITS)) == pytest.approx(float(loss(LABELS, other)), rel=1e-6)
    other[LABELS == 1] += 50 * RNG.normal(size=((LABELS == 1).sum(), 3))
    assert float(loss(LABELS, LOGITS)) != pytest.approx(float(loss(LABELS, other)), rel=1e-3)


@pytest.mark.parametrize("name", LOSSES)
def test_survives_saving(name):
    weights = {"class_weights": [1, 2, 3], "logit_adjustment": 0.5}
    loss = make_loss(name, ignore_label=IGNORE, **weights)
    copy = keras.losses.deserialize(keras.losses.serialize(loss))
    assert float(copy(LABELS, LOGITS)) == float(loss(LABELS, LOGITS))


def test_cross_entropy_is_keras_s():
    keras_loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=IGNORE)
    ours = PixelCrossEntropy(ignore_label=IGNORE)(LABELS, LOGITS)
    assert float(ours) == pytest.approx(float(keras_loss(LABELS, LOGITS)), rel=1e-6)


def test_class_weights_multiply_a_class_s_pixels():
    labels = np.full((1, 2, 2), 2, "i4")
    logits = LOGITS[:1, :2, :2]
    plain, weighted = PixelCrossEntropy(), PixelCrossEntropy(class_weights=[1, 1, 5])
    assert float(weighted(labels, logits)) == pytest.approx(5 * float(plain(labels, logits)))


@pytest.mark.parametrize("name", LOSSES)
def test_logits_are_adjusted_by_the_logarithm_of_the_weights(name):
    options = {"ignore_label": IGNORE, "class_weights": [1.0, 2.0, 8.0]}
    adjusted = make_loss(name, logit_adjustment=0.5, **options)
    expected = make_loss(name, **options)
    moved = LOGITS + 0.5 * np.log([1.0, 2.0, 8.0]).astype("f4")
    assert float(adjusted(LABELS, LOGITS)) == pytest.approx(float(expected(LABELS, moved)))
    assert float(adjusted(LABELS, LOGITS)) != float(expected(LABELS, LOGITS))


def test_focal_without_gamma_is_cross_entropy():
    labels = np.minimum(LABELS, 2)
    focal, entropy = PixelFocal(gamma=0.0), PixelCrossEntropy()
    assert float(focal(labels, LOGITS)) == pytest.approx(float(entropy(labels, LOGITS)), rel=1e-5)
    assert float(PixelFocal()(labels, LOGITS)) < float(entropy(labels, LOGITS))


@pytest.mark.parametrize("name", ["dice", "focal", "cross_entropy", "cross_entropy_dice"])
def test_a_perfect_prediction_costs_nothing(name):
    loss = make_loss(name, ignore_label=IGNORE)
    perfect = 40 * keras.ops.one_hot(np.minimum(LABELS, 2), 3)
    assert float(loss(LABELS, perfect)) == pytest.approx(0, abs=1e-5)


def test_an_image_of_ignored_pixels_costs_nothing():
    labels = np.full((1, 6, 5), IGNORE, "i4")
    for name in LOSSES:
        assert float(make_loss(name, ignore_label=IGNORE)(labels, LOGITS[:1])) == 0


def test_an_unknown_name_lists_the_valid_ones():
    with pytest.raises(TfdistError, match="Unknown `loss` 'dise'. Valid: dice"):
        make_loss("dise")
