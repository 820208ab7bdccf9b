"""Shows how many items are done: as a bar in a terminal, as lines elsewhere."""

import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

import keras

from tfdist.cluster import can_redraw

_EVERY_S = 60.0  # between two lines

Item = TypeVar("Item")


def show_progress(items: Iterable[Item], total: int, *, unit: str, quiet: bool) -> Iterator[Item]:
    """Yields items and shows on standard output how many have been done.

    Args:
      items: the items to yield.
      total: the number of items.
      unit: the name of one item, such as "example".
      quiet: whether to show nothing.
    """
    if quiet:
        yield from items
        return
    if can_redraw(sys.stdout):
        yield from _show_bar(items, total, unit)
        return
    shown, count = time.monotonic(), 0
    for count, item in enumerate(items, 1):
        yield item
        if count == total or time.monotonic() - shown >= _EVERY_S:
            shown = time.monotonic()
            print(f"{time.strftime('%H:%M:%S')} {count}/{total} {unit}s", flush=True)


def _show_bar(items: Iterable[Item], total: int, unit: str) -> Iterator[Item]:
    bar = keras.utils.Progbar(total, unit_name=unit)
    count = 0
    for count, item in enumerate(items, 1):
        bar.update(count, finalize=False)
        yield item
    bar.update(count, finalize=True)
