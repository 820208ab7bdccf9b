"""What reading JPEG files costs: tfdist's data, the tutorials' pipeline, and decoding alone.

    python -m benchmarks.jpegs [--images=2000] [--size=224] [--rounds=3]

Generates photographs of 500 x 375 in two classes. Each form reads all of them once, in batches of
32, resized and mirrored at random; tfdist reads them through its cache in memory, so that its first
epoch fills the cache and later ones read it. Prints a Markdown table: medians over rounds of turns,
of the time and of the processor time for an image.
"""

import argparse
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf

from tfdist.data import cache_source, make_train_dataset, steps_per_epoch
from tfdist.launch.machine import describe_machine
from tfdist.tasks.classification.sources import Mirror, make_class_folder

BATCH = 32
HEIGHT, WIDTH = 375, 500


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--size", type=int, default=224, help="the side of a resized image")
    parser.add_argument("--rounds", type=int, default=3)
    flags = parser.parse_args()
    size = (flags.size, flags.size)
    with tempfile.TemporaryDirectory(prefix="tfdist-jpegs-") as directory:
        write_images(Path(directory), flags.images)
        forms: dict[str, Callable[[], int]] = {
            "decoding alone, `tf.io.decode_jpeg`": lambda: decode(directory),
            "tf.data as tutorials write it": lambda: read_as_tutorials(directory, size),
            "tfdist, first epoch": Tfdist(directory, size).read_first,
        }
        later = Tfdist(directory, size)
        later.read_first()
        forms["tfdist, later epochs"] = later.read
        forms["tfdist, later epochs, not shuffled or mirrored"] = later.read_plain
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in forms}
        for number in range(flags.rounds):
            for name, form in list(forms.items())[:: 1 if number % 2 == 0 else -1]:
                began, used = time.perf_counter(), time.process_time()
                count = form()
                assert count == flags.images, (name, count)
                found[name].append((time.perf_counter() - began, time.process_time() - used))
    print(f"{describe_machine()}, {flags.images} images, {size[0]} x {size[1]}\n")
    print("| | ms an image | of decoding | processor ms an image | of decoding |")
    print("|---|---|---|---|---|")
    first: list[float] = []
    for name, rounds in found.items():
        wall, used = (
            1e3 * statistics.median(times) / flags.images for times in zip(*rounds, strict=True)
        )
        first = first or [wall, used]
        ratios = first[0] / wall, first[1] / used
        print(f"| {name} | {wall:.2f} | {ratios[0]:.2f} | {used:.2f} | {ratios[1]:.2f} |")
    return 0


def write_images(directory: Path, count: int) -> None:
    """Writes images with the details and the file sizes of photographs."""
    rng = np.random.default_rng(0)
    for number in range(count):
        shapes = tf.image.resize(rng.integers(0, 256, (12, 16, 3)), (HEIGHT, WIDTH), "bicubic")
        pixels = np.clip(shapes + rng.normal(0, 12, (HEIGHT, WIDTH, 3)), 0, 255)
        path = directory / "train" / "ab"[number % 2] / f"{number:05}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(tf.io.encode_jpeg(pixels.astype(np.uint8), quality=90).numpy())


def decode(directory: str) -> int:
    """Decodes every file, and returns their number."""
    files = tf.data.Dataset.list_files(f"{directory}/train/*/*.jpg", shuffle=False)
    images = files.map(
        lambda path: tf.io.decode_jpeg(tf.io.read_file(path), channels=3),
        num_parallel_calls=tf.data.AUTOTUNE,
    )
    return sum(1 for _ in images.prefetch(tf.data.AUTOTUNE))


def read_as_tutorials(directory: str, size: tuple[int, int]) -> int:
    """Reads an epoch as TensorFlow's tutorials on loading images and augmentation do."""
    images = keras.utils.image_dataset_from_directory(
        f"{directory}/train", image_size=size, batch_size=BATCH, seed=1, verbose=False
    )
    mirrored = images.map(
        lambda x, y: (tf.image.random_flip_left_right(x), y), num_parallel_calls=tf.data.AUTOTUNE
    )
    return sum(len(y) for _, y in mirrored.prefetch(tf.data.AUTOTUNE))


class Tfdist:
    """The data of tfdist's classification."""

    def __init__(self, directory: str, size: tuple[int, int]):
        self._directory, self._size = directory, size

    def read_first(self) -> int:
        """Fills the cache, and reads an epoch."""
        source = make_class_folder(self._directory, "train", self._size)
        self._source = cache_source(source, "memory", quiet=True)
        return self.read()

    def read(self) -> int:
        """Reads an epoch, shuffled and mirrored."""
        return self._read(augmentation=Mirror())

    def read_plain(self) -> int:
        """Reads an epoch in the stored order."""
        return self._read(shuffle=False)

    def _read(self, **options: object) -> int:
        batches = make_train_dataset(
            self._source, global_batch_size=BATCH, seed=0, ends_epochs=True, **options
        )
        steps = steps_per_epoch(self._source.num_examples, BATCH)
        return sum(len(y) for _, y in itertools.islice(batches, steps))


if __name__ == "__main__":
    sys.exit(main())
