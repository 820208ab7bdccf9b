import numpy as np
import pytest
import tensorflow as tf

from tfdist.data.cache import cache_source
from tfdist.errors import TfdistError
from tfdist.tasks.segmentation.class_weights import count_classes
from tfdist.tasks.segmentation.shapes import make_shapes


def load(source, *indices):
    return [part.numpy() for part in source.load_batch(tf.constant(indices, tf.int64))]


def test_elements_are_as_specified():
    source = make_shapes("train", (48, 64))
    assert source.num_examples == 2000
    assert make_shapes("val").num_examples == 200
    image, mask = source.load(tf.constant(3, tf.int64))
    for tensor, spec in zip((image, mask), source.element_spec, strict=True):
        assert spec.is_compatible_with(tensor)
    assert image.numpy().min() >= 0
    assert image.numpy().max() <= 255
    np.testing.assert_array_equal(image, np.round(image))


def test_example_depends_on_index_split_and_seed_alone():
    source = make_shapes("train", (24, 24))
    together = load(source, 4, 5, 6, 7, 8)
    alone = load(make_shapes("train", (24, 24), 10), 6)
    np.testing.assert_array_equal(together[0][2], alone[0][0])
    np.testing.assert_array_equal(together[1][2], alone[1][0])
    others = make_shapes("val", (24, 24)), make_shapes("train", (24, 24), seed=1)
    for other in others:
        assert not np.array_equal(load(other, 6)[0], alone[0])


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_rounding_does_not_depend_on_the_batch(size):
    source = make_shapes("train", (96, 96))
    whole = load(source, *range(14))
    load_batch = tf.function(source.load_batch)
    for start in range(0, 14, size):
        part = load_batch(tf.range(start, min(start + size, 14), dtype=tf.int64))
        for left, right in zip(part, whole, strict=True):
            np.testing.assert_array_equal(left, right[start : start + size])


def test_shapes_are_large_and_classes_balanced():
    source = make_shapes("train", (32, 32), 300)
    share = count_classes(source) / (300 * 32 * 32)
    assert 0.6 < share[0] < 0.88
    np.testing.assert_array_less(0.04, share[1:])
    assert share[1:].max() < 1.3 * share[1:].min()


def test_colors_tell_shapes_from_the_background():
    images, masks = load(make_shapes("train", (48, 48)), *range(64))
    gaps = [
        np.abs(image[mask > 0].mean(0) - image[mask == 0].mean(0)).max()
        for image, mask in zip(images, masks, strict=True)
        if (mask > 0).any()
    ]
    assert np.median(gaps) > 30


def test_cache_holds_the_same():
    source = make_shapes("train", (16, 16), 40)
    cached = cache_source(source, "memory", quiet=True)
    for left, right in zip(load(source, *range(40)), load(cached, *range(40)), strict=True):
        np.testing.assert_array_equal(left, right)


def test_refuses_sizes_that_make_no_sense():
    with pytest.raises(TfdistError, match="shapes on 8x64 pixels"):
        make_shapes("train", (8, 64))
    with pytest.raises(TfdistError, match="at least 1 example, found 0"):
        make_shapes("train", num_examples=0)
