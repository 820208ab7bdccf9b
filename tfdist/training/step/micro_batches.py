"""Gradient accumulation: a replica computes its examples in micro-batches, one after the other.

The memory of a micro-batch is freed before the next one begins, so only the activations of one are
in memory. It remains a single step, with one all-reduce and one update for all micro-batches.
"""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdist.aliases import Batch, Nested
from tfdist.data.graph_errors import assert_in_graph
from tfdist.errors import TfdistError


def sum_over_micro_batches(
    compute: Callable[[Any, tf.Tensor, tf.Tensor], Any], batch: Batch, *, micro_batches: int
) -> Any:
    """Returns the sum of a function's results for the micro-batches of a batch.

    Args:
      compute: (micro-batch, index of its first example, its number of examples) -> a structure of
        tensors, `tf.IndexedSlices` and None. Slices are concatenated, unless their number is
        static: then their values are added. Traced once.
      batch: one replica's batch, any structure of [examples, ...] and None.
    """

    def compute_part(index: tf.Tensor) -> Any:
        part, first, count = take_micro_batch(batch, index, micro_batches)
        return compute(part, first, count)

    # The loop must know the types and shapes that it adds before its body is traced.
    function = tf.function(compute_part, autograph=False).get_concrete_function(
        tf.TensorSpec([], tf.int64)
    )
    structure = function.structured_outputs
    leaves = tf.nest.flatten(structure)
    places = [place for place, leaf in enumerate(leaves) if leaf is not None]

    def add(index: tf.Tensor, sums: list[Any]) -> tuple[tf.Tensor, list[Any]]:
        parts = tf.nest.flatten(function(index))
        return index + 1, [
            _add(total, parts[place]) for total, place in zip(sums, places, strict=True)
        ]

    with tf.control_dependencies([check_enough(batch, micro_batches)]):
        first_index = tf.zeros([], tf.int64)
    _, sums = tf.while_loop(
        lambda index, _: index < micro_batches,
        add,
        (first_index, [_make_zero(leaves[place]) for place in places]),
        shape_invariants=(tf.TensorShape([]), [_make_shape(leaves[place]) for place in places]),
        # Two iterations at a time would need the memory of two.
        parallel_iterations=1,
    )
    result: list[Any] = [None] * len(leaves)
    for place, total in zip(places, sums, strict=True):
        result[place] = total
        if isinstance(leaves[place], tf.IndexedSlices):
            result[place] = tf.IndexedSlices(*total, tf.constant(leaves[place].shape.as_list()))
    return tf.nest.pack_sequence_as(structure, result)


def take_micro_batch(
    batch: Batch, index: tf.Tensor | int, micro_batches: int
) -> tuple[Any, tf.Tensor, tf.Tensor]:
    """Returns a micro-batch, the index of its first example, and its number of examples.

    Args:
      batch: one replica's batch, any structure of [examples, ...] and None.

    Raises:
      TfdistError: the batch has sparse tensors, which have no slices.
    """
    if any(isinstance(leaf, tf.SparseTensor) for leaf in keras.tree.flatten(batch)):
        raise TfdistError(
            "Cannot split sparse tensors into micro-batches. Convert them with tf.sparse.to_dense, "
            "or leave out `micro_batches`."
        )
    num_rows = _count_rows(batch)
    first = index * num_rows // micro_batches
    end = (index + 1) * num_rows // micro_batches
    part = keras.tree.map_structure(lambda t: None if t is None else t[first:end], batch)
    return part, first, end - first


def check_enough(batch: Batch, micro_batches: int) -> tf.Operation:
    """Returns an operation that fails if a batch has fewer examples than micro-batches."""
    num_rows = _count_rows(batch)
    return assert_in_graph(
        num_rows >= micro_batches,
        tf.strings.join(
            [
                "Cannot split a replica's batch of ",
                tf.strings.as_string(num_rows),
                f" examples into {micro_batches} micro-batches. Give larger batches "
                "(drop_remainder drops a small last one), or fewer micro-batches.",
            ]
        ),
    )


def _count_rows(batch: Batch) -> tf.Tensor:
    leaf = next(t for t in keras.tree.flatten(batch) if t is not None)  # an input may be missing
    return tf.shape(leaf, tf.int64)[0]


def add_gradients(total: Nested[tf.Tensor] | None, part: Nested[tf.Tensor] | None) -> Any:
    """Returns the sum of two gradients, on their device; None is zero."""
    if total is None or part is None:
        return part if total is None else total
    with tf.device(part.device):
        if isinstance(part, tf.IndexedSlices) and isinstance(total, tf.IndexedSlices):
            pair = _add((total.values, total.indices), part)
            return tf.IndexedSlices(*pair, part.dense_shape)
        return tf.convert_to_tensor(total) + tf.convert_to_tensor(part)


def _add(total: Nested[tf.Tensor], part: Nested[tf.Tensor]) -> Any:
    if isinstance(part, tf.IndexedSlices):
        values, indices = total
        if part.values.shape[0] is not None:
            return values + part.values, part.indices  # indices that do not depend on examples
        return tf.concat([values, part.values], 0), tf.concat([indices, part.indices], 0)
    return total + part


def _make_zero(leaf: tf.Tensor) -> Any:
    if isinstance(leaf, tf.IndexedSlices):
        rows = leaf.values.shape[0] or 0
        values = tf.zeros([rows, *leaf.values.shape[1:]], leaf.values.dtype)
        return values, tf.zeros([rows], leaf.indices.dtype)
    return tf.zeros(leaf.shape, leaf.dtype)


def _make_shape(leaf: tf.Tensor) -> Any:
    if isinstance(leaf, tf.IndexedSlices):
        return leaf.values.shape, leaf.indices.shape
    return leaf.shape
