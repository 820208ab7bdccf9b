"""Fingerprints that identify data sets by counts, sizes and samples of contents, as JSON."""

import concurrent.futures
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.aliases import Nested
from tfdist.data.listing import check_regular

FORMAT = 1

# The maximum number of groups of consecutive examples. Each group has one digest, so the
# fingerprint stays small; in a small data set, each example is a group.
_MAX_GROUPS = 256
_MAX_LOADED = 5
# Arrays and files up to these sizes are read in full, larger ones in samples.
_WHOLE_ARRAY_BYTES = 256 * 2**20
_WHOLE_FILE_BYTES = 2**20
_FILE_SAMPLES = 16
_THREADS = 16
# The kinds of data that are counted in batches.
_KINDS_OF_BATCHES = ("dataset", "batches")


def make_header(
    *, kind: str, num_examples: int, element_spec: Nested[tf.TypeSpec]
) -> dict[str, Any]:
    """Returns the beginning of a source's fingerprint, whose other parts depend on the kind."""
    return {
        "format": FORMAT,
        "kind": kind,
        "num_examples": num_examples,
        "element_spec": describe_spec(element_spec),
    }


def describe_spec(spec: Nested[tf.TypeSpec]) -> Any:
    """Returns a structure of `tf.TensorSpec` as JSON.

    >>> describe_spec({"x": tf.TensorSpec((2, 3)), "y": (tf.TensorSpec((), tf.int32),)})
    {'x': 'float32 [2, 3]', 'y': ['int32 []']}
    """
    if isinstance(spec, Mapping):
        return {str(key): describe_spec(spec[key]) for key in sorted(spec, key=str)}
    if isinstance(spec, (tuple, list)):
        return [describe_spec(part) for part in spec]
    if isinstance(spec, tf.TensorSpec):
        shape = "unknown" if spec.shape.rank is None else spec.shape.as_list()
        return f"{spec.dtype.name} {shape}"
    return str(spec)


def hash_files(files: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """Returns a digest of the files of each group of consecutive examples.

    It covers all names and sizes, and the contents of the first example of each group: small
    files in full, large ones in samples. With few examples, each of them is a group.

    Args:
      files: for each example, kind of file, such as "x" -> path.

    Returns:
      For each group, the names of its `first` and `last` file, and a digest per kind of file.
    """
    groups = split_groups(len(files))
    first = {start for start, _ in groups}
    kinds = list(files[0])
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        hashes = {
            kind: list(
                pool.map(
                    lambda item: _hash_file(item[1], with_contents=item[0] in first),
                    enumerate(example[kind] for example in files),
                )
            )
            for kind in kinds
        }
    return [
        {
            "first": _get_name(files[start][kinds[0]]),
            "last": _get_name(files[stop - 1][kinds[0]]),
            **{kind: _combine(hashes[kind][start:stop]) for kind in kinds},
        }
        for start, stop in groups
    ]


def hash_arrays(arrays: Nested[np.ndarray]) -> list[list[str]]:
    """Returns, for each array of a structure, a digest of each group of consecutive examples.

    Small arrays are read in full; of large ones, the first example of each group is read.

    Args:
      arrays: a structure of arrays of shape [num_examples, ...].
    """
    return [_hash_rows(array) for array in tf.nest.flatten(arrays)]


def hash_tensor(array: np.ndarray) -> list[str]:
    """Returns a digest of each group of rows of an array; of a scalar, its digest."""
    return _hash_rows(array) if array.ndim else [hash_leaf(array)]


def hash_leaf(leaf: np.ndarray | tf.Tensor) -> str:
    """Returns a digest of the type, the shape and the values of an array or tensor."""
    parts = tf.nest.flatten(leaf, expand_composites=True)
    if len(parts) > 1:  # a ragged or sparse tensor
        return _combine(map(hash_leaf, parts))
    array = np.asarray(leaf)
    digest = _start(f"{array.dtype} {array.shape}")
    if array.dtype == object:  # strings
        for item in array.ravel():
            data = item if isinstance(item, bytes) else str(item).encode()
            digest.update(f"{len(data)} ".encode() + data)
    else:
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def hash_loaded(load: Callable[[tf.Tensor], Any], num_examples: int) -> list[dict[str, Any]]:
    """Returns the digests of a few examples, among them the first and the last."""
    indices = sorted({int(i) for i in np.linspace(0, num_examples - 1, _MAX_LOADED)})
    found = []
    for index in indices:
        with tf.device("CPU:0"):
            example = load(tf.constant(index, tf.int64))
        found.append({"index": index, "digest": _combine(map(hash_leaf, tf.nest.flatten(example)))})
    return found


def hash_text(text: str) -> str:
    """Returns a digest of a text."""
    return _start(text).hexdigest()


def describe_difference(
    old: Mapping[str, Any], new: Mapping[str, Any], *, split: str = ""
) -> str | None:
    """Returns a short description of how two fingerprints differ, or None.

    A part that only one of them has is ignored: another version of tfdist wrote the other one.

    >>> old = {"kind": "folder", "num_examples": 32}
    >>> describe_difference(old, {"kind": "folder", "num_examples": 64}, split="training")
    '64 training examples instead of 32'

    Args:
      old: the earlier result of a source's `make_fingerprint`, possibly read from JSON.
      split: a word for the examples, such as "training".
    """
    if dict(old) == dict(new):
        return None
    examples = "batches" if new.get("kind") in _KINDS_OF_BATCHES else "examples"
    of_split = f"{split} {examples}" if split else examples
    known = [name for name in new if name in old]
    if "num_examples" in known and old["num_examples"] != new["num_examples"]:
        return f"{new.get('num_examples')} {of_split} instead of {old.get('num_examples')}"
    if old.get("format", FORMAT) != new.get("format", FORMAT):
        return None
    for name in known:
        before, after = old.get(name), new.get(name)
        if before == after:
            continue
        describe = _DESCRIBED.get(name) if before and after else None
        found = describe(before, after, new.get("num_examples", 0)) if describe else None
        if found is None:
            text = name.replace("_", " ")
            found = f"the {text} is {_shorten(after)} instead of {_shorten(before)}"
        return f"{of_split}: {found}" if split else found
    return None


def split_groups(num_examples: int) -> list[tuple[int, int]]:
    """Returns the [start, end) of each group; all but the last have the same size.

    >>> split_groups(3)
    [(0, 1), (1, 2), (2, 3)]
    >>> split_groups(1000)[-1], len(split_groups(1000))
    ((996, 1000), 250)
    """
    size = max(1, -(-num_examples // _MAX_GROUPS))
    starts = range(0, num_examples, size)
    return [(start, min(start + size, num_examples)) for start in starts]


def _hash_file(path: str, *, with_contents: bool) -> str:
    """Returns a digest of a file's name and size, and of its contents if wanted."""
    check_regular(path)
    size_bytes = tf.io.gfile.stat(path).length
    digest = _start(f"{_get_name(path)} {size_bytes}")
    if with_contents:
        with tf.io.gfile.GFile(path, "rb") as file:
            if size_bytes <= _WHOLE_FILE_BYTES:
                digest.update(file.read())
            else:
                piece_bytes = _WHOLE_FILE_BYTES // _FILE_SAMPLES
                for start in np.linspace(0, size_bytes - piece_bytes, _FILE_SAMPLES):
                    file.seek(int(start))
                    digest.update(file.read(piece_bytes))
    return digest.hexdigest()


def _hash_rows(array: np.ndarray) -> list[str]:
    shape, dtype = tuple(array.shape), tf.as_dtype(array.dtype)
    row_bytes = int(np.prod(shape[1:], dtype=np.int64)) * max(dtype.size or 0, 1)
    is_whole = shape[0] * row_bytes <= _WHOLE_ARRAY_BYTES
    return [
        hash_leaf(array[start : stop if is_whole else start + 1])
        for start, stop in split_groups(shape[0])
    ]


def _combine(digests: Iterable[str]) -> str:
    return hash_text(" ".join(digests))


def _start(text: str) -> Any:
    return hashlib.blake2b(text.encode(), digest_size=8)


def _get_name(path: str) -> str:
    return path.rpartition("/")[2]


def _describe_files(
    before: Sequence[Mapping[str, str]], after: Sequence[Mapping[str, str]], num_examples: int
) -> str | None:
    for old, new in zip(before, after, strict=False):
        for end in ("first", "last"):
            if old[end] != new[end]:
                return f"there is {new[end]} instead of {old[end]}"
        kinds = " and ".join(kind for kind in new if old.get(kind) != new[kind])
        if kinds and new["first"] == new["last"]:
            return f"{kinds} {new['first']} changed"
        if kinds:
            return f"{kinds} files changed between {new['first']} and {new['last']}"
    return None


def _describe_rows(
    before: Sequence[Sequence[str]], after: Sequence[Sequence[str]], num_examples: int
) -> str | None:
    groups = split_groups(num_examples)
    for place, pair in enumerate(zip(before, after, strict=False)):
        changed = [group for group, old, new in zip(groups, *pair, strict=False) if old != new]
        if changed:
            first, last = changed[0][0], changed[-1][1] - 1
            found = f"example {first}" if first == last else f"examples between {first} and {last}"
            return f"{found} of array {place} changed"
    return None


def _describe_loaded(
    before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]], num_examples: int
) -> str | None:
    changed = [new["index"] for old, new in zip(before, after, strict=False) if old != new]
    return f"example {changed[0]} changed" if changed else None


def _describe_order(
    before: Mapping[str, Any], after: Mapping[str, Any], num_examples: int
) -> str | None:
    if before["shuffle"] != after["shuffle"]:
        return f"shuffle is {after['shuffle']} instead of {before['shuffle']}"
    if before.get("by") != after.get("by"):
        orders = [f"that of {part.get('by', 'tfdist')}" for part in (after, before)]
        return f"the order of the arrays is {' instead of '.join(orders)}"
    return f"the seed of the order is {after.get('seed')} instead of {before.get('seed')}"


def _describe_shuffles(
    before: Sequence[Sequence[int]], after: Sequence[Sequence[int]], num_examples: int
) -> str | None:
    words = ("the global seed", "the seed of shuffle", "the buffer of shuffle")
    for old, new in zip(before, after, strict=False):
        for word, *numbers in zip(words, new, old, strict=False):
            if numbers[0] != numbers[1]:
                return f"{word} is {numbers[0]} instead of {numbers[1]}"
    return f"{len(after)} calls of shuffle instead of {len(before)}"


def _describe_tensors(
    before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]], num_examples: int
) -> str | None:
    if len(before) != len(after):
        return f"the dataset has {len(after)} tensors instead of {len(before)}"
    for place, (old, new) in enumerate(zip(before, after, strict=True)):
        if old["rows"] != new["rows"]:
            return f"tensor {place} has {new['rows']} rows instead of {old['rows']}"
        if old != new:
            found = _describe_rows([old["digests"]], [new["digests"]], new["rows"])
            return found and found.replace("array 0", f"tensor {place}")
    return None


def _describe_operations(
    before: Sequence[str], after: Sequence[str], num_examples: int
) -> str | None:
    found = [pair for pair in zip(after, before, strict=False) if pair[0] != pair[1]]
    if found and len(before) == len(after):
        return f"the dataset has {found[0][0]} instead of {found[0][1]}"
    return None


def _shorten(value: object) -> str:
    text = str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


_DESCRIBED: dict[str, Callable[[Any, Any, int], str | None]] = {
    "files": _describe_files,
    "rows": _describe_rows,
    "loaded": _describe_loaded,
    "order": _describe_order,
    "shuffle": _describe_shuffles,
    "tensors": _describe_tensors,
    "operations": _describe_operations,
    "contents": lambda before, after, num_examples: "the contents changed",
}
