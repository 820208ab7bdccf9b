"""Shows how many items are done: as a bar in a terminal, as lines elsewhere."""

import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from tfdist.cluster import can_redraw

_FIRST_S, _EVERY_S = 5.0, 60.0  # between two lines, at first and later

Item = TypeVar("Item")


class Pace:
    """Decides when the next line is due: soon at first, then more seldom, up to `every_s`."""

    def __init__(self, every_s: float = _EVERY_S):
        self._every_s = every_s
        self._wait_s = 0.0
        self._shown = 0.0

    def is_due(self) -> bool:
        """Returns whether to show a line now; the first one is due at once."""
        return time.monotonic() - self._shown >= self._wait_s

    def note(self) -> None:
        """Notes that a line is shown now."""
        self._shown = time.monotonic()
        self._wait_s = min(self._every_s, max(_FIRST_S, 2 * self._wait_s))


def print_line(text: str) -> None:
    """Prints a line at once; with the time where there is no terminal.

    In a terminal, it takes the place of a bar, which is drawn again below.
    """
    if can_redraw(sys.stdout):
        print(f"\r\x1b[K{text}", flush=True)
    else:
        print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def show_status(text: str) -> None:
    """Shows what is being done on one line of standard error, if that is a terminal."""
    if can_redraw(sys.stderr):
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def show_progress(items: Iterable[Item], total: int, *, unit: str, quiet: bool) -> Iterator[Item]:
    """Yields items and shows on standard output how many have been done."""
    if quiet:
        yield from items
        return
    if can_redraw(sys.stdout):
        yield from _show_bar(items, total, unit)
        return
    pace = Pace()
    pace.note()
    for count, item in enumerate(items, 1):
        yield item
        if count == total or pace.is_due():
            pace.note()
            print_line(f"{count}/{total} {unit}s")


def _show_bar(items: Iterable[Item], total: int, unit: str) -> Iterator[Item]:
    import keras  # not above: lines are printed before it is loaded

    bar = keras.utils.Progbar(total, unit_name=unit)
    count = 0
    for count, item in enumerate(items, 1):
        bar.update(count, finalize=False)
        yield item
    bar.update(count, finalize=True)
