"""The real builders of TensorFlow Datasets over a small archive made here."""

import json
import socket

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds
from tensorflow_datasets.core.download import downloader

from tests.tasks.pets import SIZE, TEST, TRAIN, make_trimap
from tfdist.data.cache import cache_source
from tfdist.errors import TfdistError
from tfdist.tasks.images.tfds import make_builder, read_in_order
from tfdist.tasks.segmentation.tfds_source import make_tfds


@pytest.mark.parametrize(("split", "names", "first"), [("train", TRAIN, 0), ("val", TEST, 3)])
def test_labels_of_oxford_iiit_pet_start_at_zero(pets_dir, split, names, first):
    source = make_tfds("oxford_iiit_pet", split, SIZE, data_dir=pets_dir)
    assert source.num_examples == len(names)
    assert source.num_classes == 3
    assert source.class_names == ("pet", "background", "outline")
    examples = list(source.read_examples())
    assert len(examples) == len(names)
    # The stored order is by hash; an image's gray says which one it is.
    found = [round(image.mean() / 40) for image, _ in examples]
    assert sorted(found) == list(range(first, first + len(names)))
    for number, (image, mask) in zip(found, examples, strict=True):
        assert image.shape == (*SIZE, 3)
        np.testing.assert_array_equal(mask, make_trimap(number) - 1)


def test_order_is_fixed_and_sizes_can_change(pets_dir):
    source = make_tfds("oxford_iiit_pet", "train", (5, 7), data_dir=pets_dir, max_examples=2)
    runs = [list(source.read_examples()) for _ in range(2)]
    assert len(runs[0]) == 2
    for left, right in zip(*runs, strict=True):
        np.testing.assert_array_equal(left[0], right[0])
        np.testing.assert_array_equal(left[1], right[1])
    assert runs[0][0][1].shape == (5, 7)


def test_cache_gives_random_access(pets_dir, path_with_spaces):
    source = make_tfds("oxford_iiit_pet", "train", SIZE, data_dir=pets_dir)
    expected = [mask for _, mask in source.read_examples()]
    cached = cache_source(source, "disk", directory=str(path_with_spaces), quiet=True)
    _, masks = cached.load_batch(tf.constant([2, 0], tf.int64))
    np.testing.assert_array_equal(masks, [expected[2], expected[0]])


def test_fingerprint_has_the_name_and_the_sizes_of_the_splits(pets_dir):
    found = make_tfds("oxford_iiit_pet", "val", SIZE, data_dir=pets_dir).make_fingerprint()
    assert found["name"].startswith("oxford_iiit_pet/")
    assert (found["split"], found["split_sizes"]) == ("test", {"test": 2, "train": 3})
    assert json.loads(json.dumps(found)) == found


def test_label_out_of_range_is_named(pets_dir):
    source = make_tfds(
        "oxford_iiit_pet",
        "train",
        SIZE,
        data_dir=pets_dir,
        num_classes=2,
        class_names=("pet", "other"),
    )
    message = r"example 0 of the split 'train' .* mask holds 3, but classes are 1 to 2"
    with pytest.raises(TfdistError, match=message):
        list(source.read_examples())


def test_ignore_label_is_kept_as_stored(pets_dir):
    source = make_tfds(
        "oxford_iiit_pet",
        "train",
        SIZE,
        data_dir=pets_dir,
        num_classes=2,
        class_names=("pet", "other"),
        ignore_label=3,
    )
    labels = np.unique([mask for _, mask in source.read_examples()])
    assert labels.tolist() == [0, 1, 3]


def test_unknown_split_lists_those_there_are(pets_dir):
    with pytest.raises(
        TfdistError, match=r"split 'dev' .* its splits are (train, test|test, train)\."
    ):
        make_tfds("oxford_iiit_pet", "dev", SIZE, data_dir=pets_dir)


def test_unknown_name_gives_the_closest(path_with_spaces):
    with pytest.raises(
        TfdistError, match=r"'oxford_iit_pet'. Did you mean oxford_iiit_pet"
    ) as caught:
        make_tfds("oxford_iit_pet", "train", SIZE, data_dir=str(path_with_spaces))
    assert len(str(caught.value)) < 400


def test_data_set_without_masks_is_refused(path_with_spaces):
    with pytest.raises(TfdistError, match=r"tfds:mnist: it has no segmentation_mask, only image"):
        make_tfds("mnist", "train", SIZE, data_dir=str(path_with_spaces))


def _store(name, image, directory):
    """Writes a data set of one image, and makes its builder."""
    dtype = image.dtype.type
    features = {
        "image": tfds.features.Image(shape=(None, None, image.shape[-1]), dtype=dtype),
        "label": tfds.features.Scalar(np.int64),
    }
    tfds.dataset_builders.store_as_tfds_dataset(
        name=name,
        version="1.0.0",
        features=tfds.features.FeaturesDict(features),
        split_datasets={
            "train": tf.data.Dataset.from_tensors({"image": image, "label": np.int64(1)})
        },
        data_dir=str(directory),
    )
    return make_builder(name, str(directory), features=("image", "label"), advice="Or not.")


def test_images_of_16_bits_are_refused_instead_of_cut(path_with_spaces):
    with pytest.raises(TfdistError, match="images are uint16, not uint8"):
        _store("deep", np.full((2, 2, 3), 800, np.uint16), path_with_spaces)


def test_gray_images_are_read_as_three_channels(path_with_spaces):
    gray = np.arange(6, dtype=np.uint8).reshape(2, 3, 1)
    builder = _store("gray", gray, path_with_spaces)
    ((image, label),) = read_in_order(builder, "train", features=("image", "label"), num_examples=1)
    np.testing.assert_array_equal(image, np.tile(gray, 3))
    assert label == 1


def test_no_network_is_one_line(path_with_spaces, monkeypatch):
    def refuse(*arguments, **options):
        raise OSError("Network is unreachable")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    # TensorFlow Datasets tries ten times, minutes apart in the end.
    monkeypatch.setattr(downloader, "MAX_RETRIES", 0)
    config = tfds.download.DownloadConfig(try_download_gcs=False)
    with pytest.raises(TfdistError, match=r"Cannot prepare tfds:oxford.*ConnectionError") as caught:
        make_tfds(
            "oxford_iiit_pet", "train", SIZE, data_dir=str(path_with_spaces), download_config=config
        )
    assert "\n" not in str(caught.value)
