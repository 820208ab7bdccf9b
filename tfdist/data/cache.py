"""Decoded examples as bytes, in memory or in a mapped file, read at random."""

import abc
import dataclasses
import hashlib
import itertools
import json
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from tfdist.data.checked_files import CheckedFile, find_damage, write_records
from tfdist.data.code_hash import hash_code
from tfdist.data.dataset_options import set_options
from tfdist.data.fingerprint import hash_text, make_header
from tfdist.data.source import BatchSource, Source
from tfdist.errors import TfdistError, make_unknown_name_error

CACHES = ("auto", "memory", "disk", "none")
DEFAULT_MEMORY_LIMIT_BYTES = 2 * 2**30

_READ_BATCH = 32
_FORMAT = 2
_FILES = ("images.u8", "masks.u8")
_MAX_LISTED_FILES = 100_000


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class SequentialSource(abc.ABC):
    """Images and masks that are read from the first to the last.

    Attributes:
      num_examples: how many examples there are.
      image_size: (height, width) in pixels of every example.
      num_classes: number of classes.
      class_names: their names, or None.
      ignore_label: label that neither loss nor metrics see, or None.
      num_skipped: examples that are left out because they could not be read.
    """

    num_examples: int
    image_size: tuple[int, int]
    num_classes: int
    class_names: tuple[str, ...] | None = None
    ignore_label: int | None = None
    num_skipped: int = 0

    @property
    def element_spec(self) -> Any:
        """(image float32 [height, width, 3] in [0, 255], mask int32 [height, width])."""
        return (
            tf.TensorSpec((*self.image_size, 3), tf.float32),
            tf.TensorSpec(self.image_size, tf.int32),
        )

    @abc.abstractmethod
    def read_examples(self, *, own_size: bool = False) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields (image uint8 [height, width, 3], mask uint8 [height, width]), in order.

        Args:
          own_size: leave each in the size that it is stored in, instead of `image_size`.
        """

    @abc.abstractmethod
    def get_fingerprint(self) -> str:
        """Returns a text that changes whenever what `read_examples` yields would.

        It tells whether a cache on disk can be used again.
        """

    def make_fingerprint(self) -> dict[str, Any]:
        """Returns what tells these examples from others, as JSON.

        Two processes that read the same data return the same, wherever the data lie, unless
        `get_fingerprint` says more, such as where they lie.
        """
        header = make_header(
            kind="sequence", num_examples=self.num_examples, element_spec=self.element_spec
        )
        return {**header, "contents": hash_text(self.get_fingerprint())}


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class CachedSource(BatchSource):
    """Decoded images and masks; build it with `cache_source`.

    Attributes:
      images: uint8 [num_examples, height, width, 3].
      masks: uint8 [num_examples, height, width].
      origin: the fingerprint of the source that was cached, at that time.
    """

    images: "tf.Tensor | MappedFile"
    masks: "tf.Tensor | MappedFile"
    origin: dict[str, Any]

    @property
    def element_spec(self) -> Any:
        """(image float32 [height, width, 3] in [0, 255], mask int32 [height, width])."""
        return (
            tf.TensorSpec(self.images.shape[1:], tf.float32),
            tf.TensorSpec(self.masks.shape[1:], tf.int32),
        )

    def load_batch(self, indices: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the images and masks at `indices` (int64 [batch])."""
        return (
            tf.cast(_gather(self.images, indices), tf.float32),
            tf.cast(_gather(self.masks, indices), tf.int32),
        )

    def make_fingerprint(self) -> dict[str, Any]:
        """Returns the fingerprint of what was cached: where it is kept makes no difference."""
        return self.origin


@dataclasses.dataclass(frozen=True)
class MappedFile:
    """A file of uint8 that graphs read without loading it.

    Attributes:
      path: of a local file of exactly the shape's number of bytes.
      shape: of the array in it.
    """

    path: str
    shape: tuple[int, ...]

    def read(self) -> tf.Tensor:
        """Returns the array: uint8, mapped, so that only what is gathered is read."""
        # An operation of TensorFlow, unlike np.memmap in a numpy_function, is found by
        # the other processes of a parameter server's cluster too.
        return tf.raw_ops.ImmutableConst(
            dtype=tf.uint8, shape=self.shape, memory_region_name=self.path
        )


def cache_source(
    source: Source | SequentialSource,
    where: str = "auto",
    *,
    directory: str | None = None,
    memory_limit_bytes: int = DEFAULT_MEMORY_LIMIT_BYTES,
    quiet: bool = False,
) -> Source:
    """Returns a source of the same examples that is fast at random access.

    Every example is read once, in order, and kept as bytes: images are rounded to whole
    numbers in [0, 255].

    Args:
      source: of (image, mask) examples.
      where: "memory"; "disk", a mapped file that later runs find again as long as the
        source, its code and its files are the same, and make again if it is damaged;
        "auto", memory up to `memory_limit_bytes` and disk beyond; "none", the source
        itself.
      directory: holds the files of "disk"; a local directory, by default
        ~/.cache/tfdist.
      memory_limit_bytes: see "auto".
      quiet: show no progress bar.

    Raises:
      TfdistError: an unknown `where`; "none" for a source without random access;
        examples that are not an image and a mask, or not as many as the source says; a
        directory that is not local or cannot be written; whatever reading the source raises.
    """
    if where not in CACHES:
        raise make_unknown_name_error("cache", where, CACHES)
    if where == "none":
        if not isinstance(source, Source):
            raise TfdistError(
                "Cannot read this data set without a cache: its examples come one after the "
                "other. Choose a cache in memory or on disk."
            )
        return source
    height, width = _get_image_size(source)
    origin = source.make_fingerprint()
    size_bytes = source.num_examples * height * width * 4
    if where == "auto":
        where = "memory" if size_bytes <= memory_limit_bytes else "disk"
    images_shape = (source.num_examples, height, width, 3)
    images: tf.Tensor | MappedFile
    masks: tf.Tensor | MappedFile
    if where == "memory":
        arrays = np.empty(images_shape, np.uint8), np.empty(images_shape[:3], np.uint8)
        for i, (image, mask) in enumerate(_read_checked(source, quiet)):
            arrays[0][i], arrays[1][i] = image, mask
        with tf.device("CPU:0"):
            images, masks = (tf.convert_to_tensor(array) for array in arrays)
    else:
        folder = _write_once(source, origin, Path(_get_local(directory)), quiet)
        images, masks = (
            MappedFile(str(folder / name), shape)
            for name, shape in zip(_FILES, (images_shape, images_shape[:3]), strict=True)
        )
    return CachedSource(
        num_examples=source.num_examples,
        num_classes=source.num_classes,
        class_names=source.class_names,
        ignore_label=source.ignore_label,
        num_skipped=source.num_skipped,
        images=images,
        masks=masks,
        origin=origin,
    )


def _gather(array: "tf.Tensor | MappedFile", indices: tf.Tensor) -> tf.Tensor:
    with tf.device("CPU:0") if tf.executing_eagerly() else tf.device(None):
        return tf.gather(array.read() if isinstance(array, MappedFile) else array, indices)


def _get_image_size(source: Source | SequentialSource) -> tuple[int, int]:
    if isinstance(source, SequentialSource):
        return source.image_size
    shapes = [tuple(spec.shape) for spec in tf.nest.flatten(source.element_spec)]
    if len(shapes) == 2 and shapes[0] == (*shapes[1], 3) and len(shapes[1]) == 2:
        return shapes[1]
    raise TfdistError(
        "Cannot cache these examples: they must be an image [height, width, 3] and its mask "
        f"[height, width], found shapes {', '.join(map(str, shapes))}. Use no cache."
    )


def read_examples(
    source: Source | SequentialSource, *, own_size: bool = False
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields (image uint8 [height, width, 3], mask uint8 [height, width]), in order.

    Args:
      source: of (image, mask) examples.
      own_size: leave each in the size that it is stored in, if it is stored.
    """
    if isinstance(source, SequentialSource):
        yield from source.read_examples(own_size=own_size)
        return
    indices = tf.data.Dataset.range(source.num_examples).batch(_READ_BATCH)
    batches = indices.map(
        lambda i: tf.nest.map_structure(
            lambda leaf: tf.cast(tf.round(tf.cast(leaf, tf.float32)), tf.uint8),
            source.load_batch(i),
        ),
        num_parallel_calls=tf.data.AUTOTUNE,
        deterministic=True,
    )
    for images, masks in set_options(batches).as_numpy_iterator():
        yield from zip(images, masks, strict=True)


def _read_checked(
    source: Source | SequentialSource, quiet: bool
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields the examples, and fails if they are not what the source says of itself."""
    expected = (*_get_image_size(source), 3), _get_image_size(source)
    count = 0
    for image, mask in _show_progress(source, quiet):
        count += 1
        found = image.shape, mask.shape
        if found != expected or count > source.num_examples:
            break
        yield image, mask
    else:
        if count == source.num_examples:
            return
        found = expected
    name = type(source).__name__
    if found != expected:
        raise TfdistError(
            f"Cannot cache example {count - 1} of {name}: its shapes are {found[0]} and "
            f"{found[1]} instead of {expected[0]} and {expected[1]}. Mend the source."
        )
    raise TfdistError(
        f"Cannot cache {name}: it gives {'more' if count > source.num_examples else count} "
        f"examples, and num_examples is {source.num_examples}. Mend the source."
    )


def _show_progress(
    source: Source | SequentialSource, quiet: bool
) -> Iterable[tuple[np.ndarray, np.ndarray]]:
    if quiet:
        yield from read_examples(source)
        return
    bar = keras.utils.Progbar(source.num_examples, unit_name="example")
    for example in read_examples(source):
        yield example
        bar.add(1)


def _get_local(directory: str | None) -> str:
    if directory is None:
        return str(Path.home() / ".cache" / "tfdist")
    if "://" in directory:
        raise TfdistError(
            f"Cannot map files of {directory!r} into memory: the cache's directory must be on "
            "a local disk."
        )
    return directory


def _write_once(
    source: Source | SequentialSource, origin: dict[str, Any], directory: Path, quiet: bool
) -> Path:
    """Returns the folder that holds the source's bytes, writing it unless it is there and whole."""
    key = _make_key(source, origin)
    folder = directory / hashlib.sha256(key.encode()).hexdigest()[:24]
    height, width = _get_image_size(source)
    num_pixels = source.num_examples * height * width
    sizes_bytes = dict(zip(_FILES, (3 * num_pixels, num_pixels), strict=True))
    partial = directory / f"{folder.name}.{uuid.uuid4().hex[:8]}.partial"
    try:
        if folder.is_dir():
            damage = find_damage(folder, sizes_bytes)
            if damage is None:
                return folder
            logging.warning("The cache in %r is damaged: %s. Making it again.", str(folder), damage)
        partial.mkdir(parents=True)
        _write_files(_read_checked(source, quiet), partial)
        (partial / "fingerprint.json").write_text(key + "\n")
        _put_in_place(partial, folder, sizes_bytes)
    except OSError as error:
        raise TfdistError(
            f"Cannot keep the cache in {str(directory)!r}: {error.strerror or error}. Name "
            "another directory, or keep the cache in memory."
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def _write_files(examples: Iterable[tuple[np.ndarray, np.ndarray]], directory: Path) -> None:
    files = [CheckedFile(directory / name) for name in _FILES]
    try:
        for arrays in examples:
            for file, array in zip(files, arrays, strict=True):
                file.write(array.astype(np.uint8, copy=False).tobytes())
        records = [file.close() for file in files]
    finally:
        for file in files:
            file.abandon()
    write_records(directory, dict(zip(_FILES, records, strict=True)))


def _put_in_place(partial: Path, folder: Path, sizes_bytes: dict[str, int]) -> None:
    """Gives a folder that is written its name, unless another process was faster."""
    try:
        os.rename(partial, folder)
        return
    except OSError:
        if not folder.is_dir():
            raise
    if find_damage(folder, sizes_bytes) is None:
        return
    # A process that still reads the damaged files keeps them until it ends.
    damaged = partial.with_suffix(".damaged")
    try:
        os.rename(folder, damaged)
        os.rename(partial, folder)
    finally:
        shutil.rmtree(damaged, ignore_errors=True)


def _make_key(source: Source | SequentialSource, origin: dict[str, Any]) -> str:
    """Returns a text that changes when the source, its code or what it reads does."""
    what: Any
    if isinstance(source, SequentialSource):
        what = source.get_fingerprint()
    else:
        fields = {field.name: getattr(source, field.name) for field in dataclasses.fields(source)}
        try:
            what = [json.dumps(fields, sort_keys=True, default=os.fspath)]
            if not type(source).__module__.startswith("tfdist."):  # else no field is a path
                what.append(_list_files(fields))
        except TypeError as error:
            raise TfdistError(
                f"Cannot cache a {type(source).__name__} on disk: nothing tells whether its "
                "contents have changed. Keep the cache in memory."
            ) from error
    key = {
        "format": _FORMAT,
        "code": hash_code(type(source)),
        "source": what,
        "origin": origin,
        "size": list(_get_image_size(source)),
    }
    return json.dumps(key)


def _list_files(fields: Any) -> list[list[Any]]:
    """Returns name, size and time of change of each file, and of those in each directory, named.

    Of very many files it is the first ones.
    """
    named = (value for value in keras.tree.flatten(fields) if isinstance(value, (str, os.PathLike)))
    paths = itertools.chain.from_iterable(map(_walk, named))
    files = []
    for path in itertools.islice(paths, _MAX_LISTED_FILES):
        stat = os.stat(path)
        files.append([path, stat.st_size, stat.st_mtime_ns])
    return files


def _walk(path: str | os.PathLike[str]) -> Iterator[str]:
    """Yields a file's path, or those of the files in a directory, always in one order."""
    if os.path.isfile(path):
        yield os.fspath(path)
    for directory, directories, names in os.walk(path):
        directories.sort()
        files = (os.path.join(directory, name) for name in sorted(names))
        yield from filter(os.path.isfile, files)
