"""Announces what this process does next where that takes long, and prints messages."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import TextIO

_listeners: list[Callable[[str], None]] = []


def announce(text: str) -> None:
    """Says what this process does next. Without `announcing`, nobody hears it."""
    for listen in _listeners[-1:]:
        listen(text)


@contextlib.contextmanager
def announcing(listen: Callable[[str], None]) -> Iterator[None]:
    """Calls a function with all that is announced within the context, in any thread."""
    _listeners.append(listen)
    try:
        yield
    finally:
        _listeners.remove(listen)


def print_message(text: str) -> None:
    """Prints a line on standard error, or loses it; a signal handler may call this."""
    stream = sys.stderr
    if stream is None:  # it was closed, and `print` would take standard output instead
        return
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        if _is_own(stream):
            os.write(2, f"{text}\n".encode())  # what a stream cannot write, it tries again later
        else:
            print(text, file=stream, flush=True)


def _is_own(stream: TextIO) -> bool:
    """Returns whether a stream is the process's standard error."""
    try:
        return stream.fileno() == 2
    except (AttributeError, OSError, ValueError):
        return False
