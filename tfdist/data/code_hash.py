"""Computes a digest of a class's code, which changes when its results may have changed."""

import functools
import hashlib
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

# Hashed at each occurrence: equal ones may or may not be one object; cycles need other objects.
_VALUES = (tuple, frozenset, types.CodeType, np.ndarray)
_CONSTANTS = (type(None), bool, int, float, complex, str, bytes)


def hash_code(cls: type) -> str:
    """Returns a digest of a class's name and of its methods' code.

    It covers what a method closes over and, recursively, the functions, classes and constants of
    the same top-level package that it names. It leaves out mutable containers, which are state.
    It is the same in every process with the same version of Python.
    """
    package = _get_package(cls)
    digest = hashlib.blake2b(digest_size=16)
    seen: set[int] = set()
    alive: list[Any] = []  # an id is unique only as long as its object exists
    waiting: list[Any] = [cls]
    while waiting:
        item = waiting.pop()
        if isinstance(item, _CONSTANTS):
            digest.update(f"{item!r} ".encode())
            continue
        digest.update(f"{type(item).__module__}.{type(item).__qualname__} ".encode())
        if not isinstance(item, _VALUES):
            if id(item) in seen:
                continue
            seen.add(id(item))
            alive.append(item)
        if isinstance(item, types.CodeType):
            digest.update(item.co_code)
        waiting += _list_parts(item, package)
    return digest.hexdigest()


def _list_parts(item: object, package: str) -> Iterator[Any]:
    """Yields the parts of an object that the digest covers."""
    if isinstance(item, type):
        yield f"{item.__module__}.{item.__qualname__}"
        if _get_package(item) == package:
            yield from item.__mro__[1:]
            yield from _list_members(item)
    elif isinstance(item, types.FunctionType):
        yield from (item.__code__, item.__defaults__, *sorted((item.__kwdefaults__ or {}).items()))
        for cell in item.__closure__ or ():
            try:
                yield cell.cell_contents
            except ValueError:  # the cell is still empty
                continue
        if item.__module__ and item.__module__.partition(".")[0] == package:
            yield from _list_globals(item, package)
    elif isinstance(item, types.CodeType):
        yield from (item.co_names, item.co_consts)
    elif isinstance(item, tuple):
        yield from item
    elif isinstance(item, frozenset):
        yield from sorted(map(repr, item))
    elif isinstance(item, property):
        yield from (item.fget,)
    elif isinstance(item, (staticmethod, classmethod, types.MethodType)):
        yield item.__func__
    elif isinstance(item, functools.cached_property):
        yield item.func
    elif isinstance(item, functools.partial):
        yield from (item.func, item.args, *sorted(item.keywords.items()))
    elif isinstance(item, (np.ndarray, tf.Tensor)) and hasattr(item, "__array__"):
        array = np.asarray(item)
        yield f"{array.dtype} {array.shape}"
        if array.dtype != object:
            yield hashlib.blake2b(array.tobytes()).digest()
    elif hasattr(item, "python_function"):  # a tf.function
        yield item.python_function


def _list_members(cls: type) -> Iterator[Any]:
    for name, value in sorted(vars(cls).items()):
        is_own = name.startswith("__") and name.endswith("__")  # Python's own
        if not is_own or isinstance(value, (types.FunctionType, staticmethod, classmethod)):
            yield from (name, value)


def _list_globals(function: types.FunctionType, package: str) -> Iterator[Any]:
    names = sorted(_list_names(function.__code__))
    for name in names:
        if name not in function.__globals__:
            continue
        value = function.__globals__[name]
        if isinstance(value, types.ModuleType):
            if value.__name__.partition(".")[0] == package:
                found = (vars(value)[other] for other in names if other in vars(value))
                yield from (part for part in found if _counts(part, package))
        elif _counts(value, package):
            yield from (name, value)


def _list_names(code: types.CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _list_names(constant)
    return names


def _counts(value: object, package: str) -> bool:
    if isinstance(value, (*_CONSTANTS, tuple, frozenset, np.ndarray)):
        return True
    return getattr(value, "__module__", None) is not None and _get_package(value) == package


def _get_package(value: object) -> str:
    return str(value.__module__).partition(".")[0]
