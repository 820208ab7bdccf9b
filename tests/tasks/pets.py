"""oxford_iiit_pet of TensorFlow Datasets, prepared by its own builder from a small archive."""

import dataclasses
import io
import tarfile

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds
from tensorflow_datasets.core.download import checksums

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
    for part, members in lists.items():
        lines = "".join(f"{name} {1 + names.index(name)} 1 1\n" for name in members)
        annotations[f"annotations/{part}.txt"] = lines.encode()
    infos = {}
    for name, files in (("images.tar.gz", images), ("annotations.tar.gz", annotations)):
        write_archive(folder / name, files)
        info = checksums.compute_url_info(folder / name)
        infos[URL + name] = dataclasses.replace(info, filename=name)
    return infos


def prepare_pets(folder):
    """Returns a data_dir in a folder in which oxford_iiit_pet is prepared."""
    archives = folder / "archives"
    archives.mkdir()
    infos = write_archives(archives)
    data_dir = str(folder / "data")
    config = tfds.download.DownloadConfig(manual_dir=archives, try_download_gcs=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checksums, "load_url_infos", lambda path: infos)
        make_tfds("oxford_iiit_pet", "train", SIZE, data_dir=data_dir, download_config=config)
    return data_dir
