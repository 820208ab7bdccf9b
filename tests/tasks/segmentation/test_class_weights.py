from typing import ClassVar

import numpy as np
import pytest

from tfdist.data.source import ArraySource
from tfdist.errors import TfdistError
from tfdist.tasks.segmentation.class_weights import (
    count_classes,
    count_pixels_with_class,
    make_class_weights,
)

MASKS = np.array([[[0, 0], [0, 1]], [[0, 0], [0, 9]], [[2, 2], [9, 9]]], np.int32)


def make_masks(*, num_classes, ignore_label=None):
    class Masks(ArraySource):
        info: ClassVar[dict] = {
            "class_names": [str(label) for label in range(num_classes)],
            "ignore_label": ignore_label,
        }

    return Masks.from_arrays((np.zeros((3, 2, 2, 3), np.float32), MASKS))


def test_counts_leave_out_the_ignore_label():
    assert count_classes(make_masks(num_classes=4, ignore_label=9)).tolist() == [6, 1, 2, 0]
    assert count_classes(make_masks(num_classes=3, ignore_label=0)).tolist() == [0, 1, 2]
    assert count_classes(make_masks(num_classes=3)).dtype == np.int64


def test_presence_counts_the_images_that_show_a_class():
    source = make_masks(num_classes=4, ignore_label=9)
    assert count_pixels_with_class(source).tolist() == [7, 4, 2, 0]


@pytest.mark.parametrize("kind", ["none", "sqrt", "median_frequency"])
def test_mean_over_pixels_is_one(kind):
    counts = np.array([1000, 10, 90, 0])
    weights = make_class_weights(counts, kind)
    assert weights.dtype == np.float32
    assert weights[3] == 1
    assert np.sum(weights * counts) / counts.sum() == pytest.approx(1.0)


def test_kinds_differ_in_strength():
    counts = np.array([900, 100])
    sqrt = make_class_weights(counts, "sqrt")
    median = make_class_weights(counts, "median_frequency")
    assert sqrt[1] / sqrt[0] == pytest.approx(3.0)
    assert median[1] / median[0] == pytest.approx(9.0)
    present = make_class_weights(
        counts, "median_frequency", pixels_with_class=np.array([1000, 200])
    )
    assert present[1] / present[0] == pytest.approx(1.8)


def test_unknown_kind_is_refused():
    with pytest.raises(TfdistError, match=r"class weights 'median'. Valid: median_frequency"):
        make_class_weights(np.ones(2), "median")


def test_a_source_without_classes_is_refused():
    source = ArraySource.from_arrays((np.zeros((3, 2, 2, 3), np.float32), MASKS))
    with pytest.raises(ValueError, match="class_names"):
        count_classes(source)
