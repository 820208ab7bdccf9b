"""Replaces functions of other libraries for a while, for the code that asked for it only.

A replaced function is looked up in a context variable when it is called, so other threads call the
original, unless it is replaced for the whole process. The threads in which a strategy runs its
replicas inherit the context. When no context replaces a function any more, its owner is as it was.
`tfdist.patches` lists what may be replaced.
"""

import contextlib
import contextvars
import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from tfdist.internals import ReplicaThread
from tfdist.patches import is_listed

_Key = tuple[int, str]
_replacements: contextvars.ContextVar[Mapping[_Key, Any] | None] = contextvars.ContextVar(
    "replacements", default=None
)
_lock = threading.Lock()
_in_all_threads: dict[_Key, list[Any]] = {}  # the last one is called


@dataclass
class _Place:
    """A function of a class or module that is replaced in some contexts.

    Attributes:
      own: the attribute of the owner; None if a class inherits it.
    """

    original: Any
    own: Any
    num_contexts: int = 0


_places: dict[_Key, _Place] = {}


@contextlib.contextmanager
def replaced(
    owner: object, name: str, value: object, *, in_all_threads: bool = False
) -> Iterator[None]:
    """Replaces a function of a module or class within the context, or an object's attribute.

    An object belongs to one thread, so its attribute is replaced for all; so is a value that is no
    function.

    Args:
      value: what takes its place. If it calls what it replaces, take this from `find_function`.
      in_all_threads: whether the whole process calls it.
    """
    _check_listed(owner, name)
    before = getattr(owner, name)
    is_function = callable(before) or isinstance(before, property)
    if not (is_function and isinstance(owner, (type, ModuleType))):
        is_own = name in vars(owner)
        setattr(owner, name, value)
        try:
            yield
        finally:
            if is_own:
                setattr(owner, name, before)
            else:
                delattr(owner, name)
        return
    key = (id(owner), name)
    _install(owner, name)
    try:
        with _in_process(key, value) if in_all_threads else _in_context(key, value):
            yield
    finally:
        _uninstall(owner, name)


def replace_always(owner: object, name: str, value: object) -> None:
    """Replaces an attribute of a class, module or object for the rest of the process."""
    _check_listed(owner, name)
    setattr(owner, name, value)


def find_function(owner: object, name: str) -> Any:
    """Returns the function of a class or module that this context calls, for a replacement of it.

    The attribute itself may look the function up, and so would call the replacement again.
    """
    with _lock:
        for each in owner.__mro__ if isinstance(owner, type) else [owner]:
            key = (id(each), name)
            if key in _places:
                return _find(key, _places[key].original)
            if name in vars(each):
                break
        return getattr(owner, name)


@contextlib.contextmanager
def wrapped_in_subclasses(
    owner: type, **wraps: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    """Wraps methods, by name, of a class and of its subclasses that override them."""
    with contextlib.ExitStack() as stack:
        for each in [owner, *list_subclasses(owner)]:
            for name, wrap in wraps.items():
                if name in vars(each):
                    stack.enter_context(replaced(each, name, wrap(find_function(each, name))))
        yield


def list_subclasses(owner: type) -> list[type]:
    """Returns all direct and indirect subclasses of a class, each once."""
    found: dict[type, None] = {}
    children: list[type] = owner.__subclasses__()
    for child in children:
        found |= dict.fromkeys([child, *list_subclasses(child)])
    return list(found)


@contextlib.contextmanager
def _in_context(key: _Key, value: object) -> Iterator[None]:
    token = _replacements.set({**(_replacements.get() or {}), key: value})
    try:
        yield
    finally:
        _replacements.reset(token)


@contextlib.contextmanager
def _in_process(key: _Key, value: object) -> Iterator[None]:
    with _lock:
        _in_all_threads.setdefault(key, []).append(value)
    try:
        yield
    finally:
        with _lock:  # threads may end in another order than they began in
            values = _in_all_threads[key]
            del values[next(i for i, each in enumerate(values) if each is value)]
            if not values:
                del _in_all_threads[key]


def _check_listed(owner: object, name: str) -> None:
    place = owner if isinstance(owner, (type, ModuleType)) else type(owner)
    home = place.__name__ if isinstance(place, ModuleType) else place.__module__
    if not home.startswith("tfdist.") and not is_listed(place, name):
        raise LookupError(f"{place.__name__}.{name} is not in tfdist/patches.py. Add it there.")


def _install(owner: object, name: str) -> None:
    key = (id(owner), name)
    with _lock:
        if key not in _places:
            original = getattr(owner, name)
            own = vars(owner).get(name)
            lookup = _make_lookup(original, key)
            setattr(owner, name, staticmethod(lookup) if isinstance(own, staticmethod) else lookup)
            _places[key] = _Place(original, own)
        _places[key].num_contexts += 1
        if "start" not in vars(ReplicaThread):
            replace_always(ReplicaThread, "start", _start_in_context)


def _uninstall(owner: object, name: str) -> None:
    key = (id(owner), name)
    with _lock:
        place = _places[key]
        place.num_contexts -= 1
        if place.num_contexts:
            return
        if place.own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, place.own)
        del _places[key]


def _make_lookup(original: Callable[..., Any], key: _Key) -> Any:
    """Returns what takes a function's place, and calls the replacement of the context, if any."""
    if isinstance(original, property):
        return property(lambda owner: _find(key, original).fget(owner))

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return _find(key, original)(*args, **kwargs)

    return call


def _find(key: _Key, original: Callable[..., Any]) -> Any:
    found = _replacements.get()
    if found is not None and key in found:
        return found[key]
    values = _in_all_threads.get(key)
    return values[-1] if values else original


def _start_in_context(thread: threading.Thread) -> None:
    """Starts a replica's thread in the context of the thread that waits for it."""
    context, run = contextvars.copy_context(), thread.run
    thread.run = lambda: context.run(run)  # type: ignore[method-assign]
    threading.Thread.start(thread)
