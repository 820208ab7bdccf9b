"""Sources of examples: with random access, or read from the first to the last."""

import abc
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.aliases import Nested
from tfdist.data.fingerprint import hash_arrays, hash_loaded, hash_text, make_header
from tfdist.data.tf_data import call_python
from tfdist.errors import TfdistError
from tfdist.internals import array_slicing


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Examples(abc.ABC):
    """What both kinds of sources say about their examples, and how many are left out."""

    num_examples: int
    num_skipped: int = 0

    @property
    @abc.abstractmethod
    def element_spec(self) -> Any:
        """The structure of `tf.TensorSpec` of one example, without a batch dimension."""

    @property
    def stored_spec(self) -> Any:
        """`element_spec` with the dtypes in which a cache keeps the examples."""
        return self.element_spec

    @property
    def info(self) -> Mapping[str, Any]:
        """What a task must know about the examples; a cache of them has the same."""
        return {}

    def _make_header(self, kind: str) -> dict[str, Any]:
        """Returns the beginning of the fingerprint of a kind of data."""
        return make_header(
            kind=kind, num_examples=self.num_examples, element_spec=self.element_spec
        )


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Source(Examples):
    """A finite set of examples, each a pure function of its index.

    A subclass defines what one example is (`element_spec`) and how to read it (`load`).
    A subclass that can read many at once also overrides `load_batch`, or derives from
    `BatchSource`.
    """

    @abc.abstractmethod
    def load(self, index: tf.Tensor) -> Any:
        """Returns the example at `index`, an int64 scalar, by TensorFlow operations only."""

    def load_batch(self, indices: tf.Tensor) -> Any:
        """Returns the examples at `indices`, int64 [batch], stacked."""
        return tf.map_fn(self.load, indices, fn_output_signature=self.element_spec)

    def load_for_augmentation(self, indices: tf.Tensor) -> Any:
        """Returns what an augmentation makes the examples at `indices` (int64 [batch]) from.

        It may be larger than the examples: a crop then has more details.
        """
        return self.load_batch(indices)

    def make_fingerprint(self) -> dict[str, Any]:
        """Returns a fingerprint of the examples, ready for JSON; loads a few of them.

        Two processes that read the same data return the same, wherever the data is stored.
        `tfdist.data.describe_difference` compares two fingerprints.
        """
        return {**self._make_header("source"), "loaded": hash_loaded(self.load, self.num_examples)}


class BatchSource(Source):
    """The base class of sources that read a batch as easily as an example."""

    @abc.abstractmethod
    def load_batch(self, indices: tf.Tensor) -> Any:
        """Returns the examples at `indices` (int64 [batch]), stacked."""

    def load(self, index: tf.Tensor) -> Any:
        return tf.nest.map_structure(lambda leaf: leaf[0], self.load_batch(index[None]))


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class ArraySource(BatchSource):
    """Arrays [num_examples, ...] in memory or in memory-mapped files.

    Build it with `ArraySource.from_arrays`.

    Attributes:
      arrays: a structure of `tf.Tensor` (held on the CPU) and `np.memmap`.
    """

    arrays: Any

    @classmethod
    def from_arrays(cls, arrays: Any) -> "ArraySource":
        """Returns a source of any nested structure of arrays, such as `(x, y)`.

        Arrays are passed to graphs as inputs, not as constants, so they may be larger
        than the 2 GB that a graph can hold. An `np.memmap` stays on disk and is read one
        batch at a time (in this process only: a parameter server's workers cannot reach
        it).

        >>> source = ArraySource.from_arrays({"x": [[1.0], [2.0]], "y": [0, 1]})
        >>> source.num_examples, source.element_spec["x"].shape
        (2, TensorShape([1]))

        Args:
          arrays: a structure of arrays of shape [num_examples, ...].

        Raises:
          TfdistError: there is no array, one is a scalar or empty, or their first
            dimensions differ.
        """
        with tf.device("CPU:0"):
            arrays = _map_arrays(_to_tensor, arrays)
        lengths = [_get_length(leaf) for leaf in tf.nest.flatten(arrays)]
        if not lengths or min(lengths) < 1 or len(set(lengths)) > 1:
            found = ", ".join(map(str, lengths)) or "no array"
            raise TfdistError(
                "Cannot make a source of arrays: their first dimensions must be equal "
                f"and at least 1, found {found}. Give every array one entry per example."
            )
        return cls(num_examples=lengths[0], arrays=arrays)

    @property
    def element_spec(self) -> Any:
        return tf.nest.map_structure(
            lambda leaf: tf.TensorSpec(leaf.shape[1:], tf.as_dtype(leaf.dtype)), self.arrays
        )

    def load_batch(self, indices: tf.Tensor) -> Any:
        return tf.nest.map_structure(lambda leaf: _gather(leaf, indices), self.arrays)

    def make_fingerprint(self) -> dict[str, Any]:
        return {**self._make_header("arrays"), "rows": hash_arrays(self.arrays)}


def _map_arrays(function: Callable[..., Any], arrays: Nested[np.ndarray]) -> Any:
    # tf.nest would treat a list of numbers as a structure; Keras users mean an array.
    if isinstance(arrays, dict):
        return {key: _map_arrays(function, value) for key, value in arrays.items()}
    if isinstance(arrays, tuple):
        values = [_map_arrays(function, value) for value in arrays]
        return type(arrays)(*values) if hasattr(arrays, "_fields") else tuple(values)
    return function(arrays)


def _to_tensor(array: np.ndarray | tf.Tensor) -> Any:
    return array if isinstance(array, np.memmap) else tf.convert_to_tensor(array)


def _get_length(array: np.ndarray | tf.Tensor) -> int:
    return int(array.shape[0]) if len(array.shape) else 0


def _gather(array: np.ndarray | tf.Tensor, indices: tf.Tensor) -> tf.Tensor:
    if not isinstance(array, np.memmap):
        return tf.gather(array, indices)
    rows = call_python(
        lambda i: np.ascontiguousarray(array[i]), [indices], tf.as_dtype(array.dtype)
    )
    return tf.ensure_shape(rows, [*indices.shape, *array.shape[1:]])


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class SparseSource(BatchSource):
    """Sparse or ragged arrays, perhaps with dense ones, in the form that Keras gives them."""

    arrays: Any

    @property
    def element_spec(self) -> Any:
        """The structure of the specs of a batch, as sparse and ragged arrays have no other."""
        indices = tf.data.Dataset.range(self.num_examples).batch(self.num_examples)
        return indices.map(self.load_batch).element_spec

    def load_batch(self, indices: tf.Tensor) -> Any:
        def gather(array: np.ndarray | tf.Tensor | None) -> Any:
            if isinstance(array, array_slicing.TensorflowSparseWrapper):
                return array_slicing.slice_tensorflow_sparse_wrapper(array, indices)
            if isinstance(array, (list, tuple, dict)):
                return None
            return array if array is None else tf.gather(array, indices)

        return keras.tree.traverse(gather, self.arrays)

    def make_fingerprint(self) -> dict[str, Any]:
        header = self._make_header("sparse arrays")
        parts = tf.nest.flatten(self.arrays, expand_composites=True)
        return {**header, "contents": hash_text(str(hash_arrays(parts)))}


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class SequentialSource(Examples):
    """The base class of sources whose examples are read from the first to the last."""

    @abc.abstractmethod
    def read_examples(self) -> Iterator[Any]:
        """Yields every example in order, as a structure of arrays that matches `stored_spec`."""

    @abc.abstractmethod
    def get_fingerprint(self) -> str:
        """Returns a text that changes whenever the output of `read_examples` does.

        It decides whether a cache on disk can be used again.
        """

    def make_fingerprint(self) -> dict[str, Any]:
        """Returns a fingerprint of the examples, ready for JSON.

        Two processes that read the same data return the same, wherever the data is stored,
        unless `get_fingerprint` depends on more, such as the path.
        """
        header = self._make_header("sequence")
        return {**header, "contents": hash_text(self.get_fingerprint())}
