"""The outputs of a prediction: their rows from all replicas, workers and batches, as in Keras."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.errors import TfdistError
from tfdist.internals import potentially_ragged_concat
from tfdist.training.workers.communication import Workers


def join_replicas(replicas: Sequence[tuple[Any, bool]]) -> Any:
    """Returns the rows of a batch, from all replicas of this process.

    Args:
      replicas: the outputs of each replica, and whether they repeat another replica's.

    Returns:
      The structure of outputs: ragged and sparse tensors as they are, others as arrays.

    Raises:
      TfdistError: the outputs of replicas have different sizes.
    """
    kept = [_to_arrays(outputs) for outputs, is_copy in replicas if not is_copy]
    if not kept:  # the batch's rows are another worker's
        return keras.tree.map_structure(_drop_rows, _to_arrays(replicas[0][0]))
    return kept[0] if len(kept) == 1 else keras.tree.map_structure(_concatenate, *kept)


def join_workers(outputs: Any, workers: Workers) -> Any:
    """Returns the rows of a batch, from all workers, all of which must call this."""
    if workers.count == 1:
        return outputs
    return keras.tree.map_structure(lambda leaf: _gather(leaf, workers), outputs)


def join_batches(batches: Sequence[Any]) -> Any:
    """Returns the rows of all batches: ragged, as in Keras, if their other sizes differ."""
    return keras.tree.map_structure(lambda *leaves: _join(leaves), *batches)


def is_composite(leaf: Any) -> bool:
    """Returns whether an output is a ragged or sparse tensor."""
    return isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor))


def summarize_rows(outputs: tf.RaggedTensor | tf.SparseTensor) -> tf.Tensor:
    """Returns numbers that tell rows apart, float64 [rows, 3]; of strings, only their places."""
    if isinstance(outputs, tf.RaggedTensor):
        outputs = outputs.to_sparse()
    rows, columns = outputs.indices[:, 0], tf.cast(outputs.indices[:, 1:], tf.float64)
    places = 1 + tf.reduce_sum(columns * (1 + tf.range(tf.shape(columns)[1], dtype=tf.float64)), 1)
    values = tf.ones_like(places)
    if outputs.dtype.is_floating or outputs.dtype.is_integer:
        values = tf.cast(outputs.values, tf.float64)
    numbers = tf.stack([places, values, places * values], 1)
    return tf.math.unsorted_segment_sum(numbers, rows, outputs.dense_shape[0])


def _to_arrays(outputs: Any) -> Any:
    return keras.tree.map_structure(
        lambda t: t.numpy() if tf.is_tensor(t) and not is_composite(t) else t, outputs
    )


def _drop_rows(leaf: Any) -> Any:
    if isinstance(leaf, tf.SparseTensor):
        size = tf.concat([[0], leaf.dense_shape[1:]], 0)
        return tf.sparse.slice(leaf, tf.zeros_like(size), size)
    return leaf if leaf is None else leaf[:0]


def _concatenate(*leaves: Any) -> Any:
    first = leaves[0]
    if first is None:
        return None
    if isinstance(first, tf.RaggedTensor):
        return tf.concat(leaves, 0)
    if not first.shape and all(leaf == first for leaf in leaves):
        return first
    sizes = [tuple(leaf.shape[1:]) for leaf in leaves]
    if len(set(sizes)) > 1 or not first.shape:
        raise TfdistError(
            f"Cannot predict over {len(leaves)} replicas: an output of theirs depends on which "
            f"examples are together (a row has the sizes {' and '.join(map(str, sizes))}). Give "
            "every example one row of one size, or predict on one device."
        )
    return tf.sparse.concat(0, list(leaves)) if is_composite(first) else np.concatenate(leaves)


def _join(leaves: Sequence[Any]) -> Any:
    first = leaves[0]
    if first is None or len(leaves) == 1:
        return first
    if not is_composite(first):
        if first.shape and len({leaf.shape[1:] for leaf in leaves}) == 1:
            return np.concatenate(leaves)
        leaves = [tf.convert_to_tensor(leaf) for leaf in leaves]
    return _to_arrays(potentially_ragged_concat(list(leaves)))


def _gather(leaf: Any, workers: Workers) -> Any:
    if leaf is None:
        return None
    if isinstance(leaf, tf.RaggedTensor):
        lengths = [workers.gather(part.numpy()) for part in leaf.nested_row_lengths()]
        values = workers.gather(leaf.flat_values.numpy())
        return tf.RaggedTensor.from_nested_row_lengths(values, lengths)
    if not isinstance(leaf, tf.SparseTensor):
        return workers.gather(leaf)
    sizes = workers.gather(leaf.dense_shape.numpy()[None])
    if (sizes[:, 1:] != sizes[0, 1:]).any():
        raise TfdistError(
            f"Cannot predict on {workers.count} workers: their sparse outputs for one batch have "
            f"the sizes {' and '.join(str(tuple(size[1:].tolist())) for size in sizes)}. Give them "
            "one size, or predict on one device."
        )
    indices = leaf.indices.numpy()
    indices[:, 0] += sizes[: workers.index, 0].sum()
    size = [sizes[:, 0].sum(), *sizes[0, 1:]]
    values = workers.gather(leaf.values.numpy())
    return tf.SparseTensor(workers.gather(indices), values, size)
