"""Which examples of a batch the guard computes with."""

from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.aliases import Batch

_COLUMNS = 8  # Larger examples are compared by their means.


def choose_rows(batch: Batch, count: int) -> Batch:
    """Returns examples of a batch, of which the first half differs from the second.

    They have the smallest and the largest ones of weights, labels and inputs. Halves that are
    alike, such as without a positive example, would hide that a loss divides by a count.
    """
    leaves = [leaf for leaf in tf.nest.flatten(batch) if leaf is not None]
    if not all(isinstance(leaf, tf.Tensor) for leaf in leaves):
        return slice_batch(batch, 0, count)
    sizes = [size for leaf in reversed(leaves) if leaf.shape.rank for size in _measure_rows(leaf)]
    orders = [list(np.argsort(each, kind="stable")) for each in sizes if np.ptp(each) > 0]
    if not orders:
        return slice_batch(batch, 0, count)
    chosen: tuple[list[int], list[int]] = [], []
    rest = set(orders[0])
    for number in range(count):
        # From the start of an order and from its end, in turn, of one after the other.
        is_large = number % 2
        order = orders[number // 2 % len(orders)]
        row = next(row for row in (reversed(order) if is_large else order) if row in rest)
        rest.discard(row)
        chosen[is_large].append(row)
    rows = tf.constant([*chosen[0], *chosen[1]])
    return tf.nest.map_structure(
        lambda t: t if t is None or t.shape.rank == 0 else tf.gather(t, rows), batch
    )


def _measure_rows(leaf: tf.Tensor) -> list[np.ndarray]:
    """Returns the columns of a small table of numbers, or the mean of each example.

    They are without their last bits, which workers may round in other ways.
    """
    if leaf.dtype.is_complex or leaf.dtype == tf.string:
        return []
    rows = np.asarray(leaf).reshape([len(leaf), -1])
    if rows.shape[1] <= _COLUMNS:
        found = list(rows.T.astype("float64"))
    else:
        found = [rows.mean(1, dtype="float64")]
    found = [np.nan_to_num(each) for each in found]
    return [np.round(each / max(np.ptp(each), 1e-300), 6) for each in found]


def weigh(batch: Batch) -> Batch:
    """Returns a batch that is not without weight, in which no loss would show anything."""
    if not (isinstance(batch, tuple) and len(batch) == 3):
        return batch
    x, y, weights = batch
    leaves = [leaf for leaf in tf.nest.flatten(weights) if leaf is not None]
    if not leaves or any(np.any(leaf) for leaf in leaves):
        return batch
    return x, y, tf.nest.map_structure(lambda w: w if w is None else tf.ones_like(w), weights)


def count_rows(batch: Batch) -> int:
    """Returns the number of examples of a batch."""
    leaves = [t for t in tf.nest.flatten(batch) if t is not None and t.shape.rank]
    return int(leaves[0].shape[0])


def slice_batch(batch: Batch, first: int, last: int) -> Any:
    """Returns some examples of a batch; None and scalars stay as they are."""
    return tf.nest.map_structure(
        lambda t: t if t is None or t.shape.rank == 0 else t[first:last], batch
    )
