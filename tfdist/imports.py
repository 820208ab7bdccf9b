"""Imports objects that options name, as `package.module:NAME` or `FILE.py:NAME`, and subclasses."""

import contextlib
import importlib
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Collection, Iterable, Iterator
from typing import Any, TypeVar

from tfdist.errors import TfdistError

T = TypeVar("T")


def import_named(option: str, text: str) -> Any:
    """Returns the object that an option names.

    Args:
      option: the parameter's name, for errors.
      text: `package.module:NAME`, from an installed package or the working directory, or
        `FILE.py:NAME`.

    Raises:
      TfdistError: the module cannot be imported, or it has no such name.
    """
    place, _, name = text.rpartition(":")
    try:
        return getattr(_import_file(place) if place.endswith(".py") else _import(place), name)
    except (ImportError, AttributeError, OSError, ValueError) as error:
        raise TfdistError(
            f"`{option}={text}`: {error}. Write package.module:NAME, with the package in the "
            "current directory or installed, or FILE.py:NAME."
        ) from error


def _import(module: str) -> Any:
    # `python -m` looks in the working directory; a console script does not.
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.insert(0, os.getcwd())
    return importlib.import_module(module)


def _import_file(path: str) -> Any:
    path = os.path.abspath(os.path.expanduser(path))
    name = f"tfdist_file_{os.path.basename(path)[:-3]}"
    known = sys.modules.get(name)
    if known is not None and known.__file__ == path:
        return known
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up their module there
    sys.path.insert(0, os.path.dirname(path))  # it may import its neighbors, as a script may
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def find_subclasses(names: Iterable[str], base: type[T]) -> Iterator[type[T]]:
    """Imports modules, and yields the subclasses of a class that they define."""
    for name in names:
        for found in vars(importlib.import_module(name)).values():
            if isinstance(found, type) and issubclass(found, base) and found.__module__ == name:
                yield found


@contextlib.contextmanager
def import_lazily(names: Collection[str]) -> Iterator[None]:
    """Lets the modules of some names that are imported meanwhile load on their first use.

    A module that is not installed is not found, as always.

    Args:
      names: full names, such as "matplotlib.pyplot"; a package that has one of them loads at once.
    """

    class LazyFinder:
        @staticmethod
        def find_spec(
            name: str, path: Any = None, target: Any = None
        ) -> importlib.machinery.ModuleSpec | None:
            if name not in names:
                return None
            spec = importlib.machinery.PathFinder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = importlib.util.LazyLoader(spec.loader)
            return spec

    sys.meta_path.insert(0, LazyFinder)
    try:
        yield
    finally:
        sys.meta_path.remove(LazyFinder)
