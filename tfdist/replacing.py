"""Temporarily replaces functions of other libraries."""

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replaces an attribute of a module or class within the context."""
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


def list_subclasses(owner: type) -> list[type]:
    """Returns all direct and indirect subclasses of a class, each once."""
    found: dict[type, None] = {}
    children: list[type] = owner.__subclasses__()
    for child in children:
        found |= dict.fromkeys([child, *list_subclasses(child)])
    return list(found)
