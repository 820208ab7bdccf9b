"""Divides weights over replicas, so that each has as many bytes of the optimizer's state."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

# How far the share of a replica may be from the average, so that rows are not cut and no piece is
# tiny.
_TOLERANCE = 1 / 64


@dataclass(frozen=True)
class Weight:
    """A weight that is given to one replica, or to several if it `may_be_cut`."""

    shape: tuple[int, ...]
    item_bytes: int
    may_be_cut: bool

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """The bytes of all elements."""
        return self.size * self.item_bytes


@dataclass(frozen=True)
class Piece:
    """Consecutive elements of a flattened weight, and the replica that updates them.

    Attributes:
      start, stop: the first element, and the one after the last.
      shape: the shape of the piece: the weight's, rows of it, or `[stop - start]`.
      row: the number of elements in a row of the piece; 1 if it is flat.
    """

    replica: int
    start: int
    stop: int
    shape: tuple[int, ...]
    row: int

    def take(self, value: tf.Tensor | tf.IndexedSlices) -> Any:
        """Returns the part of a value that has the shape of the whole weight."""
        if isinstance(value, tf.IndexedSlices):
            return self._take_slices(value)
        if self.row > 1:
            return value[self.start // self.row : self.stop // self.row]
        return tf.reshape(value, [-1])[self.start : self.stop]

    def _take_slices(self, value: tf.IndexedSlices) -> tf.IndexedSlices:
        indices, values, row = value.indices, value.values, self.row
        if row == 1:  # every element is a row of its own
            width = math.prod(values.shape[1:])
            columns = tf.range(width, dtype=indices.dtype)
            indices = tf.reshape(indices[:, None] * width + columns, [-1])
            values = tf.reshape(values, [-1])
        first, last = self.start // row, self.stop // row
        own = tf.where((indices >= first) & (indices < last))[:, 0]
        return tf.IndexedSlices(
            tf.gather(values, own),
            tf.gather(indices, own) - first,
            tf.constant(self.shape, indices.dtype),
        )


def cut_weights(weights: Sequence[Weight], count: int) -> list[list[Piece]]:
    """Returns the pieces of each weight, in order.

    Weights that must stay whole go to the replica with the fewest bytes, from the largest on. The
    others are laid end to end, and cut where a replica has its share.
    """
    loads = [0] * count
    found: list[list[Piece]] = [[] for _ in weights]
    for i in sorted(range(len(weights)), key=lambda i: weights[i].num_bytes, reverse=True):
        weight = weights[i]
        if not weight.may_be_cut:
            owner = loads.index(min(loads))
            loads[owner] += weight.num_bytes
            found[i] = [_make_piece(weight, owner, 0, weight.size)]
    share = sum(weight.num_bytes for weight in weights) / count
    slack = share * _TOLERANCE
    replica = 0
    for weight, pieces in zip(weights, found, strict=True):
        start = weight.size if pieces else 0
        while start < weight.size or not pieces:
            left = (weight.size - start) * weight.item_bytes
            room = share - loads[replica]
            if replica == count - 1 or left <= room + slack:
                stop = weight.size
            else:
                stop = start + _choose_length(weight, room, slack)
            if stop > start or not weight.size:
                pieces.append(_make_piece(weight, replica, start, stop))
                loads[replica] += (stop - start) * weight.item_bytes
            start = stop
            if start < weight.size:
                replica += 1
    return found


def _choose_length(weight: Weight, room: float, slack: float) -> int:
    """Returns how many elements fit in `room` bytes: whole rows if a row has `slack` at most."""
    if room < slack:
        return 0
    row = math.prod(weight.shape[1:])
    unit = row if row * weight.item_bytes <= slack else 1
    return round(room / weight.item_bytes / unit) * unit


def _make_piece(weight: Weight, replica: int, start: int, stop: int) -> Piece:
    row = math.prod(weight.shape[1:])
    if (start, stop) == (0, weight.size):
        return Piece(replica, start, stop, weight.shape, row)
    if row > 1 and start % row == 0 and stop % row == 0:
        return Piece(replica, start, stop, ((stop - start) // row, *weight.shape[1:]), row)
    return Piece(replica, start, stop, (stop - start,), 1)
