"""A source of arrays whose rows are sparse or of different lengths."""

import dataclasses
from typing import Any

import keras
import tensorflow as tf

from tfdist.data.fingerprint import hash_arrays, hash_text, make_header
from tfdist.data.source import BatchSource
from tfdist.internals import array_slicing


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class SparseSource(BatchSource):
    """Sparse or ragged arrays, perhaps together with dense ones.

    Attributes:
      arrays: a structure of arrays in the form that Keras gives them for a `tf.data.Dataset`.
    """

    arrays: Any

    @property
    def element_spec(self) -> Any:
        """The structure of the specs of a batch, as sparse and ragged arrays have no other."""
        indices = tf.data.Dataset.range(self.num_examples).batch(self.num_examples)
        return indices.map(self.load_batch).element_spec

    def load_batch(self, indices: tf.Tensor) -> Any:
        """Returns the rows at `indices` (int64 [batch]) of every array."""

        def gather(array: Any) -> Any:
            if isinstance(array, array_slicing.TensorflowSparseWrapper):
                return array_slicing.slice_tensorflow_sparse_wrapper(array, indices)
            if isinstance(array, (list, tuple, dict)):
                return None
            return array if array is None else tf.gather(array, indices)

        return keras.tree.traverse(gather, self.arrays)

    def make_fingerprint(self) -> dict[str, Any]:
        """Returns a fingerprint of the arrays' shapes and contents, ready for JSON."""
        header = make_header(
            kind="sparse arrays", num_examples=self.num_examples, element_spec=self.element_spec
        )
        parts = tf.nest.flatten(self.arrays, expand_composites=True)
        return {**header, "contents": hash_text(str(hash_arrays(parts)))}
