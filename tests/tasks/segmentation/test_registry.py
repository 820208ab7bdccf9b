import pathlib

import numpy as np
import pytest
import tensorflow as tf

import tfdist.data
from tfdist.data.cache import CachedSource
from tfdist.errors import TfdistError
from tfdist.tasks.segmentation.registry import make_source
from tfdist.tasks.segmentation.shapes import ShapesSource

CAMVID = pathlib.Path(__file__).parents[4] / "shared" / "data" / "camvid"


def test_shapes_are_cached_when_they_are_few():
    few = make_source("shapes", split="train", image_size=(16, 16), num_examples=20, quiet=True)
    assert isinstance(few, CachedSource)
    assert few.info["class_names"] == ["background", "circle", "square", "triangle"]
    many = make_source("shapes", split="train", num_examples=10**9)
    assert isinstance(many, ShapesSource)
    direct = make_source(
        "shapes", split="train", image_size=(16, 16), num_examples=20, cache="none"
    )
    indices = tf.range(20, dtype=tf.int64)
    np.testing.assert_array_equal(direct.load_batch(indices)[0], few.load_batch(indices)[0])


@pytest.mark.skipif(not CAMVID.is_dir(), reason="CamVid is not beside the checkout")
def test_camvid_is_read_as_a_folder():
    source = make_source(
        "folder",
        split="val",
        image_size=(36, 48),
        data_dir=str(CAMVID),
        num_classes=11,
        ignore_label=11,
        num_examples=8,
        quiet=True,
    )
    images, masks = source.load_batch(tf.range(8, dtype=tf.int64))
    assert source.num_examples == 8
    assert set(np.unique(masks)) <= set(range(12))
    assert 30 < images.numpy().mean() < 200


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dataset": "shape"}, r"`dataset` 'shape'. Valid: shapes, "),
        ({"dataset": "tfds:"}, r"`dataset` 'tfds:'. Valid: tfds:NAME, "),
        ({"dataset": "folder:x"}, "`dataset` 'folder:x'. Valid: folder"),
        ({"dataset": "folder"}, "folder` without `data_dir`"),
        ({"dataset": "folder", "data_dir": "x"}, "folder` without `num_classes`"),
        ({"dataset": "shapes", "num_examples": 0}, "take 0 examples of the split 'train'"),
        ({"dataset": "shapes", "label_map": {255: 1}}, "`label_map` is only for `dataset=folder`"),
        ({"dataset": "shapes", "image_size": (0, 5)}, "images of 0x5 pixels"),
        ({"dataset": "shapes", "cache": "all"}, "Unknown cache 'all'"),
    ],
)
def test_refuses(arguments, message):
    with pytest.raises(TfdistError, match=message):
        make_source(**({"split": "train"} | arguments))


def test_package_exports_what_it_names():
    for name in tfdist.data.__all__:
        assert getattr(tfdist.data, name).__name__ == name
