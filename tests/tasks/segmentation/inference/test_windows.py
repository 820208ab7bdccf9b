import numpy as np
import pytest

from tfdist.errors import TfdistError
from tfdist.tasks.segmentation.inference.windows import (
    Canvas,
    check_overlap,
    make_weights,
    plan_starts,
)


@pytest.mark.parametrize("length", [16, 17, 31, 32, 33, 100])
@pytest.mark.parametrize("overlap", [0.0, 0.25, 0.5, 0.99])
def test_windows_cover_an_axis_and_overlap_enough(length, overlap):
    starts = plan_starts(length, 16, overlap)
    assert starts[0] == 0
    assert starts[-1] == length - 16
    strides = np.diff(starts)
    assert (strides > 0).all()
    assert (strides <= max(1, 16 * (1 - overlap)) + 1).all()


@pytest.mark.parametrize("size", [(16, 24), (40, 61), (5, 100), (1, 1)])
def test_blending_what_the_windows_agree_on_gives_it_back(size):
    """The windows' values are their own pixels, so that the blend must be the image."""
    image = np.random.default_rng(0).integers(0, 256, (*size, 3), np.uint8)
    canvas = Canvas(image, window=(16, 24), overlap=0.5, num_classes=3)
    weights = make_weights((16, 24))
    for place in canvas.places:
        assert not canvas.is_complete
        canvas.add(place, canvas.cut(place).astype(np.float32), weights)
    assert canvas.is_complete
    np.testing.assert_allclose(canvas.blend(), image, rtol=1e-5)


def test_a_blend_has_no_seams():
    """Two windows that disagree meet in a slope: no step is much larger than an even one's."""
    canvas = Canvas(np.zeros((16, 24, 3), np.uint8), window=(16, 16), overlap=0.5, num_classes=1)
    assert canvas.places == [(0, 0), (0, 8)]
    for value, place in enumerate(canvas.places):
        canvas.add(place, np.full((16, 16, 1), value, np.float32), make_weights((16, 16)))
    row = canvas.blend()[8, :, 0]
    assert (row[0], row[-1]) == (0, 1)
    assert np.diff(row).min() >= 0
    assert np.diff(row).max() < 0.25


@pytest.mark.parametrize("overlap", [-0.1, 1.0])
def test_refuses_an_overlap_that_never_moves_on(overlap):
    with pytest.raises(TfdistError, match=r"Cannot overlap windows by .* `overlap` in \[0, 1\)"):
        check_overlap(overlap)
