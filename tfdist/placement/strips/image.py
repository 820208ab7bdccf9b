"""Images divided into strips or a grid, and which rows and columns a layer needs for a part."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

Area = tuple[tuple[int, int], tuple[int, int]]
"""The first row and the one after the last; the same of the columns."""

Bounds = tuple[tuple[int, ...], tuple[int, ...]]
"""The first row of each part, and the height; the same of the columns."""


def is_picture(spec: tf.TypeSpec) -> bool:
    """Returns whether a symbolic tensor is [examples, height, width, channels] of a known size."""
    return len(spec.shape) == 4 and None not in spec.shape[1:3]


class StripedImage(NamedTuple):
    """An image batch [examples, height, width, channels] whose rows and columns are divided.

    Attributes:
      parts: the parts, each on a device: from left to right, and then from top to bottom.
      bounds: where they begin and end.
    """

    parts: tuple[tf.Tensor, ...]
    bounds: Bounds

    @property
    def size(self) -> tuple[int, int]:
        """The height and width of the image."""
        return self.bounds[0][-1], self.bounds[1][-1]

    @property
    def areas(self) -> list[Area]:
        """The area of each part."""
        return list_areas(self.bounds)


class Pieces(NamedTuple):
    """Tensors that an area consists of.

    Attributes:
      tensors: from left to right, and then from top to bottom.
      across: how many there are from left to right.
      missing: the rows that the image lacks before and after; the same of the columns.
    """

    tensors: list[tf.Tensor]
    across: int
    missing: Area

    def join(self, *tensors: tf.Tensor) -> tf.Tensor:
        """Returns what such tensors are together."""
        return join(tensors, self.across)


def join(tensors: Sequence[tf.Tensor], across: int) -> tf.Tensor:
    """Returns tensors in rows of `across`, from left to right and from top to bottom, as one."""
    rows = [tensors[place : place + across] for place in range(0, len(tensors), across)]
    joined = [tf.concat(row, 2) if across > 1 else row[0] for row in rows]
    return tf.concat(joined, 1) if len(joined) > 1 else joined[0]


class Window(NamedTuple):
    """How a layer slides over one axis of an image.

    Attributes:
      size: the elements from the first to the last that one output depends on.
      stride: the elements between the windows of two neighbors.
      is_same: whether the output has an element for each stride, and the input is padded for it.
    """

    size: int
    stride: int
    is_same: bool

    def count_outputs(self, length: int) -> int:
        """Returns the length of the output."""
        if self.is_same:
            return -(-length // self.stride)
        return (length - self.size) // self.stride + 1

    def find_inputs(self, first: int, last: int, length: int) -> tuple[int, int]:
        """Returns the bounds of the inputs for some outputs, which may lie outside of the image."""
        padding = 0  # the elements that are added before the first input
        if self.is_same:
            covered = (self.count_outputs(length) - 1) * self.stride + self.size
            padding = max(0, covered - length) // 2
        return first * self.stride - padding, (last - 1) * self.stride - padding + self.size


def divide_size(size: tuple[int, int], grid: tuple[int, int]) -> Bounds:
    """Returns the bounds of parts of about the same size."""
    rows, columns = (
        tuple(place * length // count for place in range(count + 1))
        for length, count in zip(size, grid, strict=True)
    )
    return rows, columns


def list_areas(bounds: Bounds) -> list[Area]:
    """Returns the areas of parts, from left to right, and then from top to bottom."""
    rows, columns = map(itertools.pairwise, bounds)
    return list(itertools.product(rows, columns))


def find_overlaps(
    bounds: Sequence[int], first: int, last: int
) -> tuple[list[tuple[int, int, int]], tuple[int, int]]:
    """Returns (part, first, end) of the elements between bounds, and how many are missing."""
    low, high = max(first, 0), min(last, bounds[-1])
    found = []
    for part, (begin, end) in enumerate(itertools.pairwise(bounds)):
        own = max(begin, low) - begin, min(end, high) - begin
        if own[0] < own[1]:
            found.append((part, *own))
    return found, (low - first, last - high)
