"""Announces what this process does next where that takes long, to whoever shows it."""

import contextlib
from collections.abc import Callable, Iterator

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
