"""The real builders of TensorFlow Datasets over a small archive made here."""

import dataclasses
import io
import json
import socket
import tarfile

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds
from tensorflow_datasets.core.download import checksums, downloader

from tfdist.data.cache import cache_source
from tfdist.errors import TfdistError
from tfdist.tasks.segmentation.tfds_source import make_tfds

URL = "https://thor.robots.ox.ac.uk/~vgg/data/pets/"
SIZE = (10, 14)
TRAIN = ["Abyssinian_1", "Bengal_2", "pug_3"]
TEST = ["beagle_4", "Sphynx_5"]


def make_trimap(index):
    """Labels 1, 2, 3, as the archive stores them."""
    return (1 + (np.arange(SIZE[0] * SIZE[1]).reshape(SIZE) // 4 + index) % 3).astype(np.uint8)


def make_jpeg(index):
    return tf.io.encode_jpeg(np.full((*SIZE, 3), 40 * index, np.uint8)).numpy()


def write_archive(path, files):
    with tarfile.open(path, "w") as archive:
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))


def write_archives(folder):
    """Writes the data set's two archives; returns their checksums, as the builder wants."""
    names = TRAIN + TEST
    images = {f"images/{name}.jpg": make_jpeg(i) for i, name in enumerate(names)}
    annotations = {
        f"annotations/trimaps/{name}.png": tf.io.encode_png(make_trimap(i)[..., None]).numpy()
        for i, name in enumerate(names)
    }
    lists = {"trainval": TRAIN, "test": TEST, "list": names}
    for name, members in lists.items():
        lines = "".join(f"{member} 1 1 1\n" for member in members)
        annotations[f"annotations/{name}.txt"] = lines.encode()
    infos = {}
    for name, files in (("images.tar.gz", images), ("annotations.tar.gz", annotations)):
        write_archive(folder / name, files)
        info = checksums.compute_url_info(folder / name)
        infos[URL + name] = dataclasses.replace(info, filename=name)
    return infos


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    """A data_dir in which oxford_iiit_pet is prepared, by its own builder."""
    folder = tmp_path_factory.mktemp("a folder with spaces")
    archives = folder / "archives"
    archives.mkdir()
    infos = write_archives(archives)
    data_dir = str(folder / "data")
    config = tfds.download.DownloadConfig(manual_dir=archives, try_download_gcs=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checksums, "load_url_infos", lambda path: infos)
        make_tfds("oxford_iiit_pet", "train", SIZE, data_dir=data_dir, download_config=config)
    return data_dir


@pytest.mark.parametrize(("split", "names", "first"), [("train", TRAIN, 0), ("val", TEST, 3)])
def test_labels_of_oxford_iiit_pet_start_at_zero(data_dir, split, names, first):
    source = make_tfds("oxford_iiit_pet", split, SIZE, data_dir=data_dir)
    assert source.num_examples == len(names)
    assert source.num_classes == 3
    assert source.class_names == ("pet", "background", "outline")
    examples = list(source.read_examples())
    assert len(examples) == len(names)
    # The stored order is by hash; an image's grey says which one it is.
    found = [round(image.mean() / 40) for image, _ in examples]
    assert sorted(found) == list(range(first, first + len(names)))
    for number, (image, mask) in zip(found, examples, strict=True):
        assert image.shape == (*SIZE, 3)
        np.testing.assert_array_equal(mask, make_trimap(number) - 1)


def test_order_is_fixed_and_sizes_can_change(data_dir):
    source = make_tfds("oxford_iiit_pet", "train", (5, 7), data_dir=data_dir, max_examples=2)
    runs = [list(source.read_examples()) for _ in range(2)]
    assert len(runs[0]) == 2
    for left, right in zip(*runs, strict=True):
        np.testing.assert_array_equal(left[0], right[0])
        np.testing.assert_array_equal(left[1], right[1])
    assert runs[0][0][1].shape == (5, 7)


def test_cache_gives_random_access(data_dir, path_with_spaces):
    source = make_tfds("oxford_iiit_pet", "train", SIZE, data_dir=data_dir)
    expected = [mask for _, mask in source.read_examples()]
    cached = cache_source(source, "disk", directory=str(path_with_spaces), quiet=True)
    _, masks = cached.load_batch(tf.constant([2, 0], tf.int64))
    np.testing.assert_array_equal(masks, [expected[2], expected[0]])


def test_fingerprint_has_the_name_and_the_sizes_of_the_splits(data_dir):
    found = make_tfds("oxford_iiit_pet", "val", SIZE, data_dir=data_dir).make_fingerprint()
    assert found["name"].startswith("oxford_iiit_pet/")
    assert (found["split"], found["split_sizes"]) == ("test", {"test": 2, "train": 3})
    assert json.loads(json.dumps(found)) == found


def test_label_out_of_range_is_named(data_dir):
    source = make_tfds(
        "oxford_iiit_pet",
        "train",
        SIZE,
        data_dir=data_dir,
        num_classes=2,
        class_names=("pet", "other"),
    )
    message = r"example 0 of the split 'train' .* mask holds 3, but classes are 1 to 2"
    with pytest.raises(TfdistError, match=message):
        list(source.read_examples())


def test_ignore_label_is_kept_as_stored(data_dir):
    source = make_tfds(
        "oxford_iiit_pet",
        "train",
        SIZE,
        data_dir=data_dir,
        num_classes=2,
        class_names=("pet", "other"),
        ignore_label=3,
    )
    labels = np.unique([mask for _, mask in source.read_examples()])
    assert labels.tolist() == [0, 1, 3]


def test_unknown_split_lists_those_there_are(data_dir):
    with pytest.raises(
        TfdistError, match=r"split 'dev' .* its splits are (train, test|test, train)\."
    ):
        make_tfds("oxford_iiit_pet", "dev", SIZE, data_dir=data_dir)


def test_unknown_name_gives_the_closest(path_with_spaces):
    with pytest.raises(
        TfdistError, match=r"'oxford_iit_pet'. Did you mean oxford_iiit_pet"
    ) as caught:
        make_tfds("oxford_iit_pet", "train", SIZE, data_dir=str(path_with_spaces))
    assert len(str(caught.value)) < 400


def test_data_set_without_masks_is_refused(path_with_spaces):
    with pytest.raises(TfdistError, match=r"tfds:mnist: it has no segmentation_mask, only image"):
        make_tfds("mnist", "train", SIZE, data_dir=str(path_with_spaces))


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
