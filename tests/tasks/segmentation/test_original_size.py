import pathlib

import numpy as np
import pytest
import tensorflow as tf

from tfdist.tasks.segmentation.folder import make_folder
from tfdist.tasks.segmentation.registry import make_source, measure_original_size


def write_folder(path, sizes):
    for name in ("images", "masks"):
        (path / "train" / name).mkdir(parents=True)
    for index, size in enumerate(sizes):
        image = tf.io.encode_png(np.zeros((*size, 3), np.uint8)).numpy()
        (path / "train" / "images" / f"{index}.png").write_bytes(image)
        mask = tf.io.encode_png(np.zeros((*size, 1), np.uint8)).numpy()
        (path / "train" / "masks" / f"{index}.png").write_bytes(mask)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([(36, 48)] * 3, (36, 48)),
        ([(36, 48), (40, 48), (38, 60)], (38, 48)),
        ([(36, 48), (36, 48), (72, 96)], None),
        ([(36, 60), (60, 36)], None),
    ],
)
def test_the_median_size_unless_sizes_differ(sizes, expected, path_with_spaces):
    write_folder(path_with_spaces, sizes)
    source = make_folder(str(path_with_spaces), "train", (16, 16), 2)
    assert measure_original_size(source) == expected


def test_unreadable_images_are_left_out(path_with_spaces):
    write_folder(path_with_spaces, [(36, 48)] * 3)
    pathlib.Path(path_with_spaces, "train", "images", "1.png").write_bytes(b"no image")
    source = make_folder(str(path_with_spaces), "train", (16, 16), 2)
    assert measure_original_size(source) == (36, 48)


def test_a_source_says_it_if_asked():
    options = {"split": "train", "image_size": (16, 20), "num_examples": 2, "quiet": True}
    assert make_source("shapes", measure_size=True, **options).info["original_size"] == (16, 20)
    assert "original_size" not in make_source("shapes", **options).info
