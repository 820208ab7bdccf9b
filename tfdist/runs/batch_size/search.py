"""The search for the largest size that fits: few trials, none larger than a line foretells."""

from collections.abc import Callable
from dataclasses import dataclass

_GROWTH = 16  # at most, from one trial to the next: a line drawn far ahead misses
_MOST_TRIALS = 8
_AIM = 0.95  # of the limit: what a size takes is not quite on the line
_CLOSE = 1.05  # a size that is less than this much larger is not worth a trial


@dataclass(frozen=True)
class Usage:
    """The memory that a size took, in bytes.

    Attributes:
      peak: the most in use.
      limit: what it may be.
    """

    peak: int
    limit: int


def search_largest(
    try_size: Callable[[int], Usage | None], *, unit: int, most: int
) -> tuple[int, Usage | None]:
    """Returns the largest size that was tried and fits, and what it took; 0 and None for none.

    What a size takes grows on a straight line, near enough: the next trial is where the line
    through the last two comes close to the limit, or halfway to a size that did not fit.

    Args:
      try_size: tries a size; returns None if it does not fit.
      unit: the smallest size, and what sizes are multiples of.
      most: the largest size, `unit` or more.
    """
    most -= most % unit
    points: list[tuple[int, int]] = []
    largest, found, too_large = 0, None, most + unit
    size = unit
    for _ in range(_MOST_TRIALS):
        usage = try_size(size)
        if usage is None:
            too_large = size
        else:
            points.append((size, usage.peak))
            largest, found = size, usage
        if found is None:  # not even the smallest
            break
        size = min(most, _GROWTH * largest)
        if len(points) > 1:
            size = min(size, _follow_line(points[-2:], int(_AIM * found.limit)))
        if size >= too_large:
            size = (largest + too_large) // 2
        size -= size % unit
        if size < max(largest + unit, _CLOSE * largest):
            break
    return largest, found


def _follow_line(points: list[tuple[int, int]], limit: int) -> int:
    """Returns the size at which the line through two (size, bytes) meets the limit."""
    (first, used_first), (second, used_second) = points
    slope = max(1.0, (used_second - used_first) / (second - first))
    return second + int((limit - used_second) / slope)
