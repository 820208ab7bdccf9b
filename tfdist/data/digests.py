"""Digests of the global batches that a process reads, by which workers compare their data."""

import itertools
import re
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.aliases import Batch
from tfdist.data.dataset_graph import read_graph
from tfdist.data.fingerprint import hash_leaf, hash_text
from tfdist.data.tf_data import call_python, set_options

END = "end"  # in place of the digests of a batch that does not exist
# The values of a tensor that are read, in columns that are scattered over each example.
_MAX_VALUES = 1 << 14
_MIN_COLUMNS = 8
_PRIME = 2654435761
_DRAWS = re.compile(r"Random|Multinomial|Stateful(Uniform|Standard|Truncated)|Rng|SampleDistorted")


class BatchDigests:
    """Notes a digest of each global batch that this process reads.

    A digest covers the sizes of the batch's tensors, and samples of their contents.

    Attributes:
      is_augmented: whether examples are changed at random. Digests then cover the contents of those
        tensors only that have one number per example, such as a label.
    """

    def __init__(self):
        self.is_augmented = False
        self._lock = threading.Lock()
        self._passes = itertools.count(1)
        self._newest = 0
        self._found: dict[int, list[str]] = {}
        self._num_taken = 0

    def watch(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Returns a dataset of global batches that notes each of them."""
        # What identifies an iterator is drawn when it reads its first element.
        passes = (
            tf.data.Dataset.from_tensors(0)
            .map(lambda _: call_python(self._begin, [], tf.int64))
            .flat_map(lambda number: tf.data.Dataset.from_tensors(number).repeat())
        )
        self.is_augmented = self.is_augmented or is_augmented(dataset)

        def note(count: tf.Tensor | np.ndarray, number: tf.Tensor, batch: Batch) -> Any:
            leaves = [leaf for leaf in tf.nest.flatten(batch) if leaf is not None]
            inputs = [number, count, *map(tf.shape, leaves), *map(_sample, leaves)]
            noted = call_python(self._note, inputs, tf.int64)
            with tf.control_dependencies([noted]):
                return tf.nest.map_structure(
                    lambda leaf: None if leaf is None else tf.identity(leaf), batch
                )

        def unpack(number: tf.Tensor, numbered: Any) -> Any:
            count, batch = numbered
            return note(count, number, batch)

        return set_options(tf.data.Dataset.zip((passes, dataset.enumerate())).map(unpack))

    def expect_augmentation(self) -> None:
        """Sets `is_augmented`."""
        self.is_augmented = True

    def note_end(self, batches: Iterator[Any], *, skipped: int) -> Iterator[Any]:
        """Yields batches, and notes that none follows before it yields the last one.

        So workers whose data end at different batches learn it before one of them waits for the
        others.

        Args:
          skipped: how many of them are dropped before `watch` sees the others.
        """
        waiting: list[Any] = []
        count = 0
        for batch in batches:
            if waiting:
                yield waiting.pop()
            waiting.append(batch)
            count += 1
        if waiting:
            with self._lock:
                self._found[count - skipped] = [END]
            yield waiting.pop()

    def take(self, end: int) -> dict[str, list[str]]:
        """Returns the digests of the batches before `end` of the pass that were not taken yet.

        Returns:
          Number of a batch -> the digests of its tensors; of the batch `end`, `END` if it is known
          that there is none.
        """
        with self._lock:
            numbers = range(self._num_taken, end)
            self._num_taken = max(self._num_taken, end)
            found = {str(n): self._found.pop(n) for n in numbers if n in self._found}
            if self._found.get(end) == [END]:
                found[str(end)] = self._found.pop(end)
            return found

    def _begin(self) -> np.int64:
        with self._lock:
            self._newest = next(self._passes)
            self._found.clear()
            self._num_taken = 0
            return np.int64(self._newest)

    def _note(
        self, number: tf.Tensor | np.ndarray, count: tf.Tensor | np.ndarray, *arrays: Any
    ) -> np.int64:
        digests = [
            self._describe(shape, sample)
            for shape, sample in zip(
                arrays[: len(arrays) // 2], arrays[len(arrays) // 2 :], strict=True
            )
        ]
        with self._lock:
            if int(number) == self._newest:  # else an iterator that was left reads ahead
                self._found[int(count)] = digests
        return np.int64(0)

    def _describe(self, shape: np.ndarray, sample: np.ndarray) -> str:
        text = "x".join(map(str, shape))
        is_one = int(np.prod(shape[1:])) == 1
        return f"{text} {hash_leaf(sample)}" if is_one or not self.is_augmented else text


def digest_batch(batch: Batch) -> list[str]:
    """Returns the digests of a batch of arrays or tensors, as `BatchDigests` notes them."""
    digests = BatchDigests()
    leaves = [tf.convert_to_tensor(leaf) for leaf in tf.nest.flatten(batch) if leaf is not None]
    return [digests._describe(np.array(leaf.shape), _sample(leaf).numpy()) for leaf in leaves]


def hash_digests(digests: Any) -> int:
    """Returns a hash of digests, JSON, that a float64 can hold."""
    return int(hash_text(repr(digests)), 16) >> 16


def is_augmented(dataset: tf.data.Dataset) -> bool:
    """Returns whether a function that a dataset maps draws random numbers.

    Functions that choose examples, or their order, do not count, such as those of `scan`.

    >>> data = tf.data.Dataset.range(3)
    >>> is_augmented(data.map(lambda x: tf.random.uniform([]))), is_augmented(data.map(tf.square))
    (True, False)
    """
    graph = read_graph(dataset)
    if graph is None:
        return False
    functions = {function.signature.name: function for function in graph.library.function}
    nodes = [*graph.node, *(node for f in functions.values() for node in f.node_def)]
    mapped = [node for node in nodes if re.match(r"(Parallel)?Map(AndBatch)?Dataset", node.op)]
    waiting = [name for node in mapped for name in _list_functions(node)]
    seen: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name in seen or name not in functions:
            continue
        seen.add(name)
        for node in functions[name].node_def:
            if _DRAWS.search(node.op):
                return True
            waiting += _list_functions(node)
    return False


def _list_functions(node: Any) -> list[str]:
    """Returns the names of the functions that a node calls."""
    found = [value.func.name for value in node.attr.values() if value.HasField("func")]
    return found + [f.name for value in node.attr.values() for f in value.list.func]


def _sample(leaf: tf.Tensor) -> tf.Tensor:
    """Returns some values of each example of a batch: [examples, values]."""
    rows = tf.maximum(tf.shape(leaf, tf.int64)[0], 1)
    size = tf.size(leaf, tf.int64) // rows
    count = tf.minimum(size, tf.maximum(_MAX_VALUES // rows, _MIN_COLUMNS))
    # Scattered, since the edges of pictures are often alike; each column once, as 1 is the only
    # divisor that the prime and the size share.
    columns = tf.range(count) * _PRIME % tf.maximum(size, 1)
    return tf.gather(tf.reshape(leaf, [tf.shape(leaf, tf.int64)[0], size]), columns, axis=1)
