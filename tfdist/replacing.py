"""Temporarily replaces functions of other libraries."""

import contextlib
from collections.abc import Callable, Iterator
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


@contextlib.contextmanager
def wrapped_in_subclasses(
    owner: type, **wraps: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    """Wraps methods of a class, and of all its subclasses that override them, within the context.

    Args:
      owner: the class.
      **wraps: a method's name -> the method of a class -> what replaces it.
    """
    with contextlib.ExitStack() as stack:
        for each in [owner, *list_subclasses(owner)]:
            for name, wrap in wraps.items():
                if name in vars(each):
                    stack.enter_context(replaced(each, name, wrap(vars(each)[name])))
        yield


def list_subclasses(owner: type) -> list[type]:
    """Returns all direct and indirect subclasses of a class, each once."""
    found: dict[type, None] = {}
    children: list[type] = owner.__subclasses__()
    for child in children:
        found |= dict.fromkeys([child, *list_subclasses(child)])
    return list(found)
