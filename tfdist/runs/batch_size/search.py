"""Searches for the largest size that fits, with few trials guided by linear extrapolation."""

from collections.abc import Callable
from dataclasses import dataclass

_GROWTH = 16  # at most, from one trial to the next: far extrapolation is inaccurate
_MOST_TRIALS = 8
_AIM = 0.95  # the fraction of the limit to aim at: memory is not quite linear in the size
_CLOSE = 1.05  # the growth below which another trial is not worthwhile


@dataclass(frozen=True)
class Usage:
    """The memory that a size used, and the most that it may be, in bytes."""

    peak: int
    limit: int


def search_largest(
    try_size: Callable[[int], Usage | None], *, unit: int, most: int
) -> tuple[int, Usage | None]:
    """Returns the largest size that was tried and fits, and its usage; 0 and None for none.

    Memory grows almost linearly with the size. So the next trial is where the line through the
    last two trials comes close to the limit, or halfway to a size that did not fit.

    Args:
      try_size: tries a size; returns None if it does not fit.
      unit: the smallest size; all sizes are multiples of it.
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
