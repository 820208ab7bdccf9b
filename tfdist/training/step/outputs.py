"""The step of a prediction, and its outputs: rows from all replicas, workers and batches."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.aliases import Batch, BatchIterator, Nested
from tfdist.errors import TfdistError
from tfdist.internals import potentially_ragged_concat
from tfdist.training.inputs.data_adapter import take_next
from tfdist.training.replicas.batch_share import make_part
from tfdist.training.replicas.compilation import compile_with_xla
from tfdist.training.replicas.random_layers import RowDraws, Rows, hide_rows
from tfdist.training.workers.communication import Workers

Pack = Callable[[Any], list[tuple[Any, bool]]]


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


def join_workers(outputs: Nested[tf.Tensor], workers: Workers) -> Any:
    """Returns the rows of a batch, from all workers, all of which must call this."""
    if workers.count == 1:
        return outputs
    return keras.tree.map_structure(lambda leaf: _gather(leaf, workers), outputs)


def join_batches(batches: Sequence[Any]) -> Any:
    """Returns the rows of all batches: ragged, as in Keras, if their other sizes differ."""
    return keras.tree.map_structure(lambda *leaves: _join(leaves), *batches)


def is_composite(leaf: tf.Tensor) -> bool:
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


def _to_arrays(outputs: Nested[tf.Tensor]) -> Any:
    return keras.tree.map_structure(
        lambda t: t.numpy() if tf.is_tensor(t) and not is_composite(t) else t, outputs
    )


def _drop_rows(leaf: tf.Tensor | None) -> Any:
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


def _gather(leaf: tf.Tensor | None, workers: Workers) -> Any:
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


def make_predict_step(
    model: keras.Model,
    strategy: tf.distribute.Strategy,
    *,
    compile_step: Callable[[Any], Any],
    placing: Callable[[], contextlib.AbstractContextManager[None]],
    draws: RowDraws | None,
    is_apart: bool,
    is_chief: bool,
    is_jitted: bool,
) -> tuple[Callable[[Any], Any], Pack]:
    """Returns a function: iterator -> tensors, and a function of them, wherever they are by then.

    The latter returns each replica's outputs, in the model's structure, and whether they are a
    copy.

    Args:
      placing: opens the context in which the model is computed.
      draws: decides what the model draws; None to draw as Keras does.
      is_apart, is_chief: see `Steps`.
      is_jitted: whether XLA compiles what a replica computes, as in Keras.
    """
    structure: Any = None
    is_divided = strategy.num_replicas_in_sync > 1 or is_apart
    draws = draws if is_divided else None

    def replica_step(data: Batch, place: tf.Tensor | tuple[()]) -> list[tf.Tensor]:
        nonlocal structure
        is_copy = tf.constant(False)
        drawing: Any = contextlib.nullcontext()
        if is_divided:
            known = None if isinstance(place, tuple) else place
            part = make_part(data, known, is_apart=is_apart)
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            is_copy = tf.logical_and(part.is_copy, tf.logical_or(replica > 0, not is_chief))
            if draws:
                drawing, data = draws.of(Rows(part.first, part.rows)), hide_rows(data)
        with drawing:
            structure = outputs = model.predict_step(data)
        # To count draws, replicas take turns: `structure` may be another one's by now.
        return [is_copy, *keras.tree.flatten(outputs)]

    if is_jitted:
        replica_step = compile_with_xla(replica_step)

    def run(iterator: BatchIterator) -> list[tuple[Any, ...]]:
        with placing(), draws.intercept() if draws else contextlib.nullcontext():
            values = strategy.run(replica_step, args=take_next(strategy, iterator))
        return [strategy.experimental_local_results(value) for value in values]

    compiled = compile_step(run)

    def pack(found: Any) -> list[tuple[Any, bool]]:
        copies, *leaves = found
        leaves = [leaf * (len(copies) // len(leaf)) for leaf in leaves]  # a None is not per replica
        return [
            (keras.tree.pack_sequence_as(structure, outputs), bool(is_copy))
            for is_copy, *outputs in zip(copies, *leaves, strict=True)
        ]

    return compiled, pack
