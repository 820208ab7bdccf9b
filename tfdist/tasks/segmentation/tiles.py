"""Where windows and tiles lie in an image."""

import math
from collections.abc import Iterable, Iterator

from tfdist.errors import TfdistError


def plan_starts(length: int, window: int, overlap: float) -> list[int]:
    """Returns where windows start along one axis: evenly spaced, the last one at the end.

    Args:
      overlap: the fraction in [0, 1) of a window that the next one overlaps at least.

    >>> plan_starts(360, 128, 0.5)
    [0, 58, 116, 174, 232]
    >>> plan_starts(128, 128, 0.5)
    [0]
    """
    stride = max(1, math.floor(window * (1 - overlap)))
    count = math.ceil((length - window) / stride) + 1
    return [round(i * (length - window) / max(count - 1, 1)) for i in range(count)]


def list_tiles(
    sizes: Iterable[tuple[str, tuple[int, int]]], tile: int
) -> Iterator[tuple[int, ...]]:
    """Yields the number of its image, the first row and the first column of each tile.

    The tiles cover each image; they overlap where its sides are no multiples of a tile.

    >>> list(list_tiles([("a.png", (8, 6))], 4))
    [(0, 0, 0), (0, 0, 2), (0, 4, 0), (0, 4, 2)]
    """
    for number, (name, (height, width)) in enumerate(sizes):
        if min(height, width) < tile:
            raise TfdistError(
                f"Cannot cut {name!r} of {height}x{width} pixels into tiles of `tile={tile}`. Give "
                "a smaller `tile`, or leave out the image."
            )
        for row in plan_starts(height, tile, 0.0):
            for column in plan_starts(width, tile, 0.0):
                yield number, row, column
