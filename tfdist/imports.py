"""Imports objects that options name, as `package.module:NAME` or `FILE.py:NAME`, and subclasses."""

import ast
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
      text: `package.module:NAME`, from an installed package or the working directory, or
        `FILE.py:NAME`.

    Raises:
      TfdistError: the module cannot be imported, or it has no such name.
    """
    check_named(option, text)
    place, _, name = text.rpartition(":")
    try:
        return getattr(_import_file(place) if place.endswith(".py") else _import(place), name)
    except (ImportError, AttributeError, OSError, ValueError) as error:
        raise _make_error(option, text, error) from error


def check_named(option: str, text: str) -> None:
    """Checks, without importing anything, that an option's module, file and name may be there."""
    place, _, name = text.rpartition(":")
    problem = _find_problem(place, name)
    if problem is not None:
        raise _make_error(option, text, problem)


def _make_error(option: str, text: str, problem: Any) -> TfdistError:
    return TfdistError(
        f"`{option}={text}`: {problem}. Write package.module:NAME, with the package in the "
        "current directory or installed, or FILE.py:NAME."
    )


def _find_problem(place: str, name: str) -> str | None:
    if place.endswith(".py"):
        path = os.path.expanduser(place)
        if not os.path.isfile(path):
            return f"there is no file {place!r}"
        return None if _may_define(path, name) else f"the file {place!r} has no {name!r}"
    parts = place.split(".")
    if place in sys.modules or not all(parts):
        return None
    _look_here()
    spec: Any = None
    for end in range(1, len(parts) + 1):
        inside = spec.submodule_search_locations if spec else None
        try:
            found = _find_spec(".".join(parts[:end]), inside)
        except KeyError:  # of a directory without __init__.py in another: the import says more
            return None
        if found is None:
            # Code may make modules that are no files.
            is_made = ".".join(parts[:end]) in sys.modules
            is_made = is_made or (spec is not None and _may_define(spec.origin, parts[end - 1]))
            return None if is_made else f"No module named {'.'.join(parts[:end])!r}"
        if found.submodule_search_locations is None and end < len(parts):
            return None
        spec = found
    inside = spec.submodule_search_locations
    if _may_define(spec.origin, name) or (inside and _find_spec(f"{place}.{name}", inside)):
        return None
    return f"module {place!r} has no attribute {name!r}"


def _find_spec(name: str, inside: Any) -> importlib.machinery.ModuleSpec | None:
    """Returns where a module is; unlike `importlib.util.find_spec`, it imports no package."""
    if name in sys.modules:
        return sys.modules[name].__spec__
    for finder in sys.meta_path:
        found = finder.find_spec(name, inside) if hasattr(finder, "find_spec") else None
        if found is not None:
            return found
    return None


# What a source needs to have names that are not in it.
_MAKES_NAMES = {"*", "__getattr__", "__path__", "eval", "exec", "globals", "modules", "setattr"}


def _may_define(path: str | None, name: str) -> bool:
    """Returns whether a source may define a name, or cannot be read here."""
    try:
        assert path is not None
        with open(path, "rb") as file:
            tree = ast.parse(file.read())
    except (AssertionError, OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return True  # the import says what is wrong, or there is no source
    for node in ast.walk(tree):
        words = [word for _, value in ast.iter_fields(node) for word in _list_words(value)]
        if isinstance(node, ast.alias):
            words.append(node.name.partition(".")[0])
        is_used = isinstance(node, ast.Attribute | ast.keyword | ast.arg)
        is_own = not is_used and not isinstance(getattr(node, "ctx", None), ast.Load)
        if _MAKES_NAMES & set(words) or (is_own and name in words):
            return True
    return False


def _list_words(value: object) -> list[str]:
    parts = value if isinstance(value, list) else [value]
    return [part for part in parts if isinstance(part, str)]


def _import(module: str) -> Any:
    _look_here()
    return importlib.import_module(module)


def _look_here() -> None:
    # `python -m` looks in the working directory; a console script does not.
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.insert(0, os.getcwd())


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
