"""Classified images from directories, from TensorFlow Datasets or drawn, and their augmentation."""

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.data.fingerprint import hash_files
from tfdist.data.listing import find_split, list_directory, list_names, take_part
from tfdist.data.seeds import hash_uniform
from tfdist.data.source import BatchSource, SequentialSource
from tfdist.errors import TfdistError
from tfdist.tasks.images import tfds
from tfdist.tasks.images.mirror import mirror_chosen
from tfdist.tasks.images.reading import IMAGE_EXTENSIONS, read_all, read_image, resize_image
from tfdist.tasks.segmentation.shapes import ShapesSource, make_shapes

_FEATURES = ("image", "label")
_ADVICE = "Name one with an image and a label, such as tfds:cifar10."


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class ImagesAndClasses:
    """A mixin for sources that defines the types and the classes of the examples."""

    image_size: tuple[int, int]
    class_names: tuple[str, ...]

    @property
    def element_spec(self) -> Any:
        """(image float32 [height, width, 3] in [0, 255], class int32 scalar)."""
        return (tf.TensorSpec((*self.image_size, 3), tf.float32), tf.TensorSpec((), tf.int32))

    @property
    def stored_spec(self) -> Any:
        """`element_spec` with the image in uint8."""
        image, label = self.element_spec
        return tf.TensorSpec(image.shape, tf.uint8), label

    @property
    def info(self) -> Mapping[str, Any]:
        """The names of the classes, ready for JSON."""
        return {"class_names": list(self.class_names)}


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class DrawnSource(ImagesAndClasses, BatchSource):
    """The pictures of `tfdist.tasks.segmentation.make_shapes`; the class is the largest shape's."""

    pictures: ShapesSource

    def load_batch(self, indices: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        images, masks = self.pictures.load_batch(indices)
        pixels = tf.one_hot(masks, len(self.class_names) + 1)
        covered = tf.reduce_sum(pixels, axis=[1, 2])[:, 1:]  # without the background
        return images, tf.argmax(covered, axis=-1, output_type=tf.int32)

    def make_fingerprint(self) -> dict[str, Any]:
        """Returns everything that determines the pictures."""
        return {**self.pictures.make_fingerprint(), "kind": "drawn classes"}


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class ClassFolderSource(ImagesAndClasses, SequentialSource):
    """See `make_class_folder`; `tfdist.data.cache_source` adds random access.

    Attributes:
      files: (path, class) of every example.
    """

    files: tuple[tuple[str, int], ...]

    def read_examples(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        yield from read_all(self._read, self.files)

    def _read(self, file: tuple[str, int]) -> tuple[np.ndarray, np.ndarray]:
        path, label = file
        with tf.device("CPU:0"):
            return resize_image(read_image(path), self.image_size), np.array(label, np.int32)

    def make_fingerprint(self) -> dict[str, Any]:
        """Returns a fingerprint of the files' names, sizes and some of their contents."""
        header = self._make_header("class folder")
        files = hash_files([{"image": path} for path, _ in self.files])
        return {**header, "classes": list(self.class_names), "files": files}

    def get_fingerprint(self) -> str:
        """Returns a hash of the files' names, classes, sizes and modification times."""
        digest = hashlib.sha256()
        for path, label in self.files:
            stat = tf.io.gfile.stat(path)
            digest.update(f"{path}\0{label}\0{stat.length}\0{stat.mtime_nsec}\0".encode())
        return f"class folder {digest.hexdigest()}"


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class ClassTfdsSource(ImagesAndClasses, SequentialSource):
    """See `make_class_tfds`; `tfdist.data.cache_source` adds random access.

    Attributes:
      split: the data set's own name of the split.
    """

    builder: Any
    split: str

    def read_examples(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        examples = tfds.read_in_order(
            self.builder, self.split, features=_FEATURES, num_examples=self.num_examples
        )

        def resize(example: tuple[np.ndarray, int]) -> tuple[np.ndarray, np.ndarray]:
            image, label = example
            with tf.device("CPU:0"):
                return resize_image(image, self.image_size), np.array(label, np.int32)

        yield from read_all(resize, examples)

    def make_fingerprint(self) -> dict[str, Any]:
        """Returns the data set's full name and the sizes of its splits."""
        return tfds.describe_split(
            self.builder, self.split, num_examples=self.num_examples, spec=self.element_spec
        )

    def get_fingerprint(self) -> str:
        """Returns the data set's full name and split."""
        info = self.builder.info
        return f"class tfds {info.full_name} {self.split} {info.splits[self.split]}"


def make_drawn(
    split: str, image_size: tuple[int, int], num_examples: int | None, seed: int
) -> DrawnSource:
    """Returns drawn circles, squares and triangles; for the arguments, see `make_shapes`."""
    pictures = make_shapes(split, image_size, num_examples, seed)
    names = pictures.class_names
    assert names is not None
    return DrawnSource(
        num_examples=pictures.num_examples,
        image_size=pictures.image_size,
        class_names=tuple(names[1:]),
        pictures=pictures,
    )


def make_class_folder(
    data_dir: str,
    split: str,
    image_size: tuple[int, int],
    *,
    class_names: tuple[str, ...] = (),
    max_examples: int | None = None,
    val_fraction: float = 0.0,
) -> ClassFolderSource:
    """Returns a source of the images in DATA_DIR/SPLIT/CLASS.

    Args:
      data_dir: a directory on any file system of `tf.io.gfile`, such as gs://.
      split: a directory in it, such as "train", which holds a directory for each class.
      class_names: the directories, in the order of the classes; sorted by name by default.
      val_fraction: the fraction of DATA_DIR/train, or of DATA_DIR itself, that becomes the split
        "val", chosen by a hash of the names; the rest is "train". 0 if each has a directory.

    Raises:
      TfdistError: a directory is missing or has no image, or does not match the classes.
    """
    gfile = tf.io.gfile
    root = find_split(str(data_dir), split, val_fraction)
    if not gfile.isdir(root):
        raise TfdistError(
            f"Cannot read `data_dir={data_dir!r}`: there is no directory {root!r}. It must hold "
            "SPLIT/CLASS/*.jpg."
        )
    found = sorted(name.rstrip("/") for name in list_names(root) if not name.startswith("."))
    found = [name for name in found if gfile.isdir(gfile.join(root, name))]
    names = class_names or tuple(found)
    if len(names) < 2 or set(names) != set(found):
        raise TfdistError(
            f"Cannot classify the images in {root!r}: its directories are {', '.join(found)}"
            f"{f', but `class_names={chr(44).join(names)}`' if class_names else ''}. Give two or "
            "more classes one directory each."
        )
    files: list[tuple[int, int, str]] = []
    num_skipped = 0
    for label, name in enumerate(names):
        listing = list_directory(gfile.join(root, name), IMAGE_EXTENSIONS)
        listing.warn_of_skipped()
        num_skipped += len(listing.skipped)
        if not listing.names:
            raise TfdistError(f"Cannot read {listing.directory!r}: it has no images.")
        files += [
            (place, label, gfile.join(listing.directory, file))
            for place, file in enumerate(listing.names)
        ]
    # In turns: the first image of each class, the second of each, and so on.
    part = take_part(sorted(files), split, val_fraction, name=lambda file: file[2][len(root) :])
    chosen = part[:max_examples]
    return ClassFolderSource(
        num_examples=len(chosen),
        num_skipped=num_skipped,
        image_size=(int(image_size[0]), int(image_size[1])),
        class_names=tuple(names),
        files=tuple((path, label) for _, label, path in chosen),
    )


def make_class_tfds(
    name: str,
    split: str,
    image_size: tuple[int, int],
    *,
    data_dir: str | None = None,
    max_examples: int | None = None,
) -> ClassTfdsSource:
    """Returns a source of a TensorFlow Datasets data set that has `image` and `label`.

    The data set is downloaded and prepared if it is not yet in `data_dir`.

    Args:
      split: such as "train"; "val" stands for the data set's val, validation or test.
      data_dir: the directory of the data sets; ~/tensorflow_datasets by default.

    Raises:
      TfdistError: tensorflow_datasets is missing; there is no such data set or split; the data
        set has no label, or cannot be downloaded or prepared.
    """
    builder = _make_builder(name, data_dir)
    tfds.prepare(builder, name)
    stored_split = tfds.find_split(builder, name, split)
    num_examples = builder.info.splits[stored_split].num_examples
    return ClassTfdsSource(
        num_examples=min(num_examples, max_examples or num_examples),
        image_size=(int(image_size[0]), int(image_size[1])),
        class_names=tuple(builder.info.features["label"].names),
        builder=builder,
        split=stored_split,
    )


def list_unprepared_classes(name: str, data_dir: str | None) -> list[str] | None:
    """Returns the classes of a data set that is not prepared yet, or None if it is."""
    builder = _make_builder(name, data_dir)
    return None if builder.is_prepared() else list(builder.info.features["label"].names)


def _make_builder(name: str, data_dir: str | None) -> Any:
    builder = tfds.make_builder(name, data_dir, features=_FEATURES, advice=_ADVICE)
    if not getattr(builder.info.features["label"], "num_classes", 0):
        raise TfdistError(f"Cannot use tfds:{name}: its label is not a class. {_ADVICE}")
    return builder


@dataclasses.dataclass(frozen=True)
class Mirror:
    """Mirrors half of the examples horizontally."""

    @tf.autograph.experimental.do_not_convert
    def augment_batch(
        self, batch: tuple[tf.Tensor, tf.Tensor], seeds: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the augmented batch.

        Args:
          batch: images, float [batch, height, width, channels], and labels.
          seeds: int64 [batch, 2].
        """
        images, labels = batch
        return mirror_chosen(images, hash_uniform(seeds, 1)[:, 0] < 0.5), labels
