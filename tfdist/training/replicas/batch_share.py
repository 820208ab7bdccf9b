"""One replica's part of a global batch."""

from typing import NamedTuple

import keras
import tensorflow as tf

from tfdist.aliases import Batch
from tfdist.training.replicas.reduction import SUM


class BatchShare(NamedTuple):
    """One replica's part of a global batch.

    Attributes:
      first: int64 scalar, the index of the first example in the global batch.
      is_copy: bool scalar, whether every replica has the whole global batch.
      weight: float64 scalar, the weight of this replica's values; the weights add up to 1.
      sum_scale: float64 scalar, makes the weighted mean of the replicas' sums the total.
      mean_scale: float64 scalar, makes the plain mean of the replicas' values the weighted mean.
      total: int64 scalar, the number of examples in the global batch.
      static_rows: `rows` if it is known while tracing, else None.
    """

    first: tf.Tensor
    rows: tf.Tensor
    is_copy: tf.Tensor
    weight: tf.Tensor
    sum_scale: tf.Tensor
    mean_scale: tf.Tensor
    total: tf.Tensor
    static_rows: int | None

    def narrow(self, rows: tf.Tensor, parts: int) -> "BatchShare":
        """Returns the part for one of `parts` micro-batches, which has `rows` examples."""
        share = tf.cast(rows, tf.float64) / tf.cast(self.rows, tf.float64)
        return self._replace(
            rows=rows,
            sum_scale=self.sum_scale / share,
            mean_scale=self.mean_scale * share * parts,
            static_rows=None,
        )

    def unite(self, replicas: int) -> "BatchShare":
        """Returns the part of a replica that has a copy of the whole global batch."""
        one = tf.ones_like(self.weight)
        return BatchShare(
            first=tf.zeros_like(self.first),
            rows=self.total,
            is_copy=tf.ones_like(self.is_copy),
            weight=one / replicas,
            sum_scale=one,
            mean_scale=one,
            total=self.total,
            static_rows=None,
        )


def make_part(batch: Batch, place: tf.Tensor | None, *, is_apart: bool = False) -> BatchShare:
    """Returns the part that a replica's batch is. Must be called in replica context.

    Args:
      batch: any structure of [examples, ...].
      place: int64 [2], the index of its first example and the number of examples in the global
        batch; None if unknown, which costs a small all-reduce.
      is_apart: whether the workers train independently, each on its own batch.
    """
    context = tf.distribute.get_replica_context()
    replicas = context.num_replicas_in_sync
    leaf = next(t for t in keras.tree.flatten(batch) if t is not None and t.shape.rank)
    rows = tf.shape(leaf, tf.int64)[0]
    if replicas == 1 and not is_apart:
        first, total, one = tf.zeros([], tf.int64), rows, tf.ones([], tf.float64)
        return BatchShare(first, rows, tf.constant(False), one, one, one, total, leaf.shape[0])
    if place is None:
        replica = tf.cast(context.replica_id_in_sync_group, tf.int64)
        counts = context.all_reduce(SUM, tf.one_hot(replica, replicas, rows, 0, dtype=tf.int64))
        first, total = tf.reduce_sum(counts[:replica]), tf.reduce_sum(counts)
    else:
        first, total = place[0], place[1]  # on the device, unlike the results of `tf.unstack`
    is_copy = tf.logical_and(tf.equal(rows, total), replicas > 1 or is_apart)
    if is_apart:
        total = context.all_reduce(SUM, rows)
    share = tf.cast(rows, tf.float64) / tf.cast(total, tf.float64)
    return BatchShare(
        first=first,
        rows=rows,
        is_copy=is_copy,
        weight=tf.where(is_copy, tf.constant(1 / replicas, tf.float64), share),
        sum_scale=tf.where(is_copy, tf.ones_like(share), 1 / share),
        mean_scale=tf.where(is_copy, tf.ones_like(share), share * replicas),
        total=tf.where(is_copy, rows, total),
        static_rows=leaf.shape[0],
    )
