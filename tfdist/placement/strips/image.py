"""Images whose rows are divided into strips, and which rows a layer needs for a strip."""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf


def is_picture(spec: Any) -> bool:
    """Returns whether a symbolic tensor is [examples, height, width, channels], height known."""
    return len(spec.shape) == 4 and spec.shape[1] is not None


class StripedImage(NamedTuple):
    """An image batch [examples, height, width, channels] whose rows are divided.

    Attributes:
      parts: the strips, from the first rows to the last, each on a device.
      bounds: the first row of each strip, and the height.
    """

    parts: tuple[tf.Tensor, ...]
    bounds: tuple[int, ...]

    @property
    def height(self) -> int:
        """The height of the image."""
        return self.bounds[-1]


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

    def find_padding(self, length: int | None) -> tuple[int, int] | None:
        """Returns the elements to add before and after; None if it depends on an unknown length."""
        if not self.is_same:
            return 0, 0
        if length is None and self.stride > 1:
            return None
        outputs = self.count_outputs(length or 0)
        total = (outputs - 1) * self.stride + self.size - (length or 0) if length else self.size - 1
        total = max(0, total)
        return total // 2, total - total // 2

    def find_inputs(self, first: int, last: int, padding: int) -> tuple[int, int]:
        """Returns the bounds of the inputs for some outputs, which may lie outside of the image.

        Args:
          first, last: the bounds of the outputs.
          padding: the elements that are added before the first input.
        """
        return first * self.stride - padding, (last - 1) * self.stride - padding + self.size


def divide_rows(height: int, count: int) -> tuple[int, ...]:
    """Returns the bounds of strips of about the same height."""
    return tuple(place * height // count for place in range(count + 1))


def find_overlaps(
    bounds: Sequence[int], first: int, last: int
) -> tuple[list[tuple[int, int, int]], int, int]:
    """Returns which rows of which strips lie between two bounds.

    Args:
      bounds: the bounds of the strips.
      first, last: the bounds of the rows, which may lie outside of the image.

    Returns:
      (strip, its first row, its last row), and how many rows are missing before and after.
    """
    low, high = max(first, 0), min(last, bounds[-1])
    found = []
    for strip, (begin, end) in enumerate(itertools.pairwise(bounds)):
        own = max(begin, low) - begin, min(end, high) - begin
        if own[0] < own[1]:
            found.append((strip, *own))
    return found, low - first, last - high
