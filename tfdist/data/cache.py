"""Caches decoded examples for random access, in memory or in memory-mapped files."""

import dataclasses
import hashlib
import itertools
import json
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from tfdist.data.checked_files import CheckedFile, find_damage, write_records
from tfdist.data.code_hash import hash_code
from tfdist.data.progress import show_progress
from tfdist.data.source import BatchSource, SequentialSource, Source
from tfdist.data.tf_data import set_options
from tfdist.errors import TfdistError, make_unknown_name_error

CACHES = ("auto", "memory", "disk", "none")
DEFAULT_MEMORY_LIMIT_BYTES = 2 * 2**30

_READ_BATCH = 32
_AT_ONCE = 128  # examples that are read faster than a pipeline for them is started
_FORMAT = 3
_MAX_LISTED_FILES = 100_000


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class CachedSource(BatchSource):
    """A cache of another source's examples; `cache_source` builds it.

    Attributes:
      leaves: an array [num_examples, ...] for each tensor of an example.
      spec: the structure of `tf.TensorSpec` of one example.
      origin: the fingerprint of the cached source when it was cached.
    """

    leaves: tuple["tf.Tensor | MappedFile", ...]
    spec: Any
    origin: dict[str, Any]
    origin_info: Mapping[str, Any]

    @property
    def element_spec(self) -> Any:
        return self.spec

    @property
    def info(self) -> Mapping[str, Any]:
        return self.origin_info

    def load_batch(self, indices: tf.Tensor) -> Any:
        specs = tf.nest.flatten(self.spec)
        rows = [
            tf.cast(_gather(leaf, indices), spec.dtype)
            for leaf, spec in zip(self.leaves, specs, strict=True)
        ]
        return tf.nest.pack_sequence_as(self.spec, rows)

    def make_fingerprint(self) -> dict[str, Any]:
        """Returns the fingerprint of the cached source, wherever the cache is kept."""
        return self.origin


@dataclasses.dataclass(frozen=True)
class MappedFile:
    """A memory-mapped file with one array, which graphs read without loading it."""

    path: str
    shape: tuple[int, ...]
    dtype: tf.DType = tf.uint8

    def read(self) -> tf.Tensor:
        """Returns the array, mapped so that only the gathered examples are read."""
        # Unlike np.memmap in a numpy_function, an operation of TensorFlow also works in the
        # other processes of a parameter server's cluster.
        return tf.raw_ops.ImmutableConst(
            dtype=self.dtype, shape=self.shape, memory_region_name=self.path
        )


def cache_source(
    source: Source | SequentialSource,
    where: str = "auto",
    *,
    directory: str | None = None,
    memory_limit_bytes: int = DEFAULT_MEMORY_LIMIT_BYTES,
    quiet: bool = False,
) -> Source:
    """Returns a source of the same examples with fast random access.

    Every example is read once, in order, and kept in the dtypes of its `stored_spec`; values
    that are kept as integers are rounded.

    Args:
      source: a source whose examples all have the same shape.
      where: "memory"; "disk", memory-mapped files that later runs use again as long as the
        source, its code and its files are the same, and that are rebuilt if damaged;
        "auto", memory up to `memory_limit_bytes` and disk beyond; "none", the source
        itself.
      directory: the directory for "disk", which must be local; ~/.cache/tfdist by
        default.

    Raises:
      TfdistError: `where` is unknown, or "none" for a source without random access; the
        examples have no fixed shape, contain strings or differ in number from what the source
        says; the directory is not local or not writable; or reading the source raises it.
    """
    if where not in CACHES:
        raise make_unknown_name_error("cache", where, CACHES)
    if where == "none":
        if not isinstance(source, Source):
            raise TfdistError(
                "Cannot read this data set without a cache: its examples can only be read in "
                "order. Choose a cache in memory or on disk."
            )
        return source
    specs = _list_stored(source)
    origin = source.make_fingerprint()
    size_bytes = sum(source.num_examples * _count_bytes(spec) for spec in specs)
    if where == "auto":
        where = "memory" if size_bytes <= memory_limit_bytes else "disk"
    shapes = [(source.num_examples, *spec.shape) for spec in specs]
    leaves: tuple[tf.Tensor | MappedFile, ...]
    if where == "memory":
        arrays = [
            np.empty(shape, spec.dtype.as_numpy_dtype)
            for shape, spec in zip(shapes, specs, strict=True)
        ]
        for i, example in enumerate(_read_checked(source, quiet)):
            for array, part in zip(arrays, example, strict=True):
                array[i] = part
        with tf.device("CPU:0"):
            leaves = tuple(tf.convert_to_tensor(array) for array in arrays)
    else:
        folder = _write_once(source, origin, Path(_get_local(directory)), quiet)
        leaves = tuple(
            MappedFile(str(folder / name), shape, spec.dtype)
            for name, shape, spec in zip(_name_files(specs), shapes, specs, strict=True)
        )
    return CachedSource(
        num_examples=source.num_examples,
        num_skipped=source.num_skipped,
        leaves=leaves,
        spec=source.element_spec,
        origin=origin,
        origin_info=source.info,
    )


def _gather(array: "tf.Tensor | MappedFile", indices: tf.Tensor) -> tf.Tensor:
    with tf.device("CPU:0") if tf.executing_eagerly() else tf.device(None):
        return tf.gather(array.read() if isinstance(array, MappedFile) else array, indices)


def _list_stored(source: Source | SequentialSource) -> list[tf.TensorSpec]:
    """Returns the specs of the tensors that are kept of an example."""
    specs = tf.nest.flatten(source.stored_spec)
    for spec in specs:
        if not spec.shape.is_fully_defined() or spec.dtype == tf.string:
            raise TfdistError(
                f"Cannot cache these examples: one of their tensors is {spec.dtype.name} of shape "
                f"{spec.shape}, and only numbers of a fixed shape can be cached. Use no cache."
            )
    return specs


def _count_bytes(spec: tf.TensorSpec) -> int:
    return int(spec.shape.num_elements()) * spec.dtype.size


def _name_files(specs: Sequence[tf.TensorSpec]) -> list[str]:
    return [f"{index}.{spec.dtype.name}" for index, spec in enumerate(specs)]


def read_examples(source: Source | SequentialSource) -> Iterator[Any]:
    """Yields every example in order, as a structure of arrays with the dtypes of `stored_spec`."""
    if isinstance(source, SequentialSource):
        yield from source.read_examples()
        return
    spec = source.stored_spec

    # AutoGraph takes time, which only a source that was written for it needs.
    @tf.autograph.experimental.do_not_convert
    def store(*leaves: Any) -> Any:
        stored = map(_to_stored, tf.nest.flatten(leaves), tf.nest.flatten(spec))
        return tf.nest.pack_sequence_as(spec, list(stored))

    batches: Iterable[Any]
    if isinstance(source, BatchSource) and source.num_examples <= _AT_ONCE:
        with tf.device("CPU:0"):
            found = store(source.load_batch(tf.range(source.num_examples, dtype=tf.int64)))
        batches = [tf.nest.map_structure(lambda leaf: leaf.numpy(), found)]
    else:
        dataset = tf.data.Dataset.range(source.num_examples).batch(_READ_BATCH)
        for function in (source.load_batch, store):
            dataset = dataset.map(function, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
        batches = set_options(dataset).as_numpy_iterator()
    for batch in batches:
        leaves = tf.nest.flatten(batch)
        for row in range(len(leaves[0])):
            yield tf.nest.pack_sequence_as(spec, [leaf[row] for leaf in leaves])


def _to_stored(value: tf.Tensor, spec: tf.TensorSpec) -> tf.Tensor:
    if spec.dtype.is_integer and value.dtype.is_floating:
        value = tf.round(value)
    return tf.cast(value, spec.dtype)


def _read_checked(source: Source | SequentialSource, quiet: bool) -> Iterator[list[np.ndarray]]:
    """Yields the arrays of each example; raises if they do not match the source's description."""
    specs = _list_stored(source)
    expected = [tuple(spec.shape) for spec in specs]
    count = 0
    for example in show_progress(
        read_examples(source), source.num_examples, unit="example", quiet=quiet
    ):
        arrays = [np.asarray(leaf) for leaf in tf.nest.flatten(example)]
        count += 1
        found = [array.shape for array in arrays]
        if found != expected or count > source.num_examples:
            break
        yield [
            array.astype(spec.dtype.as_numpy_dtype, copy=False)
            for array, spec in zip(arrays, specs, strict=True)
        ]
    else:
        if count == source.num_examples:
            return
        found = expected
    name = type(source).__name__
    if found != expected:
        shapes = (" and ".join(map(str, shapes)) for shapes in (found, expected))
        raise TfdistError(
            f"Cannot cache example {count - 1} of {name}: its shapes are {next(shapes)} instead "
            f"of {next(shapes)}. Fix the source."
        )
    raise TfdistError(
        f"Cannot cache {name}: it yields {'more' if count > source.num_examples else count} "
        f"examples, but num_examples is {source.num_examples}. Fix the source."
    )


def _get_local(directory: str | None) -> str:
    if directory is None:
        try:
            return str(Path.home() / ".cache" / "tfdist")
        except RuntimeError as error:
            raise TfdistError(
                f"Cannot keep the cache on disk: {error} Set HOME, or keep the cache in memory."
            ) from error
    if "://" in directory:
        raise TfdistError(
            f"Cannot map files of {directory!r} into memory: the cache's directory must be on "
            "a local disk."
        )
    return directory


def _write_once(
    source: Source | SequentialSource, origin: dict[str, Any], directory: Path, quiet: bool
) -> Path:
    """Returns the folder with the source's bytes; writes it if it is missing or damaged."""
    key = _make_key(source, origin)
    folder = directory / hashlib.sha256(key.encode()).hexdigest()[:24]
    specs = _list_stored(source)
    names = _name_files(specs)
    sizes_bytes = {
        name: source.num_examples * _count_bytes(spec)
        for name, spec in zip(names, specs, strict=True)
    }
    partial = directory / f"{folder.name}.{uuid.uuid4().hex[:8]}.partial"
    try:
        if folder.is_dir():
            damage = find_damage(folder, sizes_bytes)
            if damage is None:
                return folder
            logging.warning("The cache in %r is damaged: %s. Rebuilding it.", str(folder), damage)
        partial.mkdir(parents=True)
        _write_files(_read_checked(source, quiet), partial, names)
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


def _write_files(
    examples: Iterable[Sequence[np.ndarray]], directory: Path, names: Sequence[str]
) -> None:
    files = [CheckedFile(directory / name) for name in names]
    try:
        for arrays in examples:
            for file, array in zip(files, arrays, strict=True):
                file.write(array.tobytes())
        records = [file.close() for file in files]
    finally:
        for file in files:
            file.abandon()
    write_records(directory, dict(zip(names, records, strict=True)))


def _put_in_place(partial: Path, folder: Path, sizes_bytes: dict[str, int]) -> None:
    """Gives a finished folder its final name, unless another process was faster."""
    try:
        os.rename(partial, folder)
        return
    except OSError:
        if not folder.is_dir():
            raise
    if find_damage(folder, sizes_bytes) is None:
        return
    # A process that still reads the damaged files keeps them open until it ends.
    damaged = partial.with_suffix(".damaged")
    try:
        os.rename(folder, damaged)
        os.rename(partial, folder)
    finally:
        shutil.rmtree(damaged, ignore_errors=True)


def _to_json(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return os.fspath(value)


def _make_key(source: Source | SequentialSource, origin: dict[str, Any]) -> str:
    """Returns a text that changes when the source, its code or the files that it reads change."""
    what: Any
    if isinstance(source, SequentialSource):
        what = source.get_fingerprint()
    else:
        fields = {field.name: getattr(source, field.name) for field in dataclasses.fields(source)}
        try:
            what = [json.dumps(fields, sort_keys=True, default=_to_json)]
            if not type(source).__module__.startswith("tfdist."):  # none of ours has a path
                what.append(_list_files(fields))
        except TypeError as error:
            raise TfdistError(
                f"Cannot cache a {type(source).__name__} on disk: tfdist cannot tell whether its "
                "contents have changed. Keep the cache in memory."
            ) from error
    key = {
        "format": _FORMAT,
        "code": hash_code(type(source)),
        "source": what,
        "origin": origin,
        "stored": [[spec.dtype.name, *spec.shape] for spec in _list_stored(source)],
    }
    return json.dumps(key)


def _list_files(fields: Any) -> list[list[Any]]:
    """Returns the name, size and modification time of each file in the fields' paths.

    Directories are walked; only the first `_MAX_LISTED_FILES` files are listed.
    """
    named = (value for value in keras.tree.flatten(fields) if isinstance(value, (str, os.PathLike)))
    paths = itertools.chain.from_iterable(map(_walk, named))
    files = []
    for path in itertools.islice(paths, _MAX_LISTED_FILES):
        stat = os.stat(path)
        files.append([path, stat.st_size, stat.st_mtime_ns])
    return files


def _walk(path: str | os.PathLike[str]) -> Iterator[str]:
    """Yields the path of a file, or of the files in a directory, always in the same order."""
    if os.path.isfile(path):
        yield os.fspath(path)
    for directory, directories, names in os.walk(path):
        directories.sort()
        files = (os.path.join(directory, name) for name in sorted(names))
        yield from filter(os.path.isfile, files)
