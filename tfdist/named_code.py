"""Code that options name, such as `--task=FILE.py:Class`, and whether the user has named it.

The options that a run directory records may come from someone else, and executing the code that
they name is executing that person's program. Code is known if a command line on this machine has
named it: `remember_code` keeps its place, and `check_recorded_code` refuses all other code.
"""

import contextlib
import importlib.machinery
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tfdist.errors import TfdistError
from tfdist.options import option

CODE_OPTIONS = ("task", "strategy", "strategies", "model", "make_data")
"""The options whose values may be FILE.py:NAME or package.module:NAME."""

TRUST = "add `trust_task`"
"""The advice of the commands that have `trust_option`."""

_MOST_REMEMBERED = 1000


class UnknownCodeError(TfdistError):
    """Recorded options name code that no command line has named."""


def trust_option() -> Any:
    """Returns the option that lets a command execute the code that a run's options name."""
    return option(
        False,
        "execute the code that the run's options name, such as task=FILE.py:Class, even if no "
        "command of yours has named it on this machine",
        result=False,
    )


def remember_code(names: Iterable[str]) -> None:
    """Remembers the code that a command line names, in `~/.cache/tfdist/named_code`.

    Without a home directory that can be written to, nothing is remembered.
    """
    found = [place for place in map(_find_place, names) if place]
    if not found:
        return
    # RuntimeError: there is no home directory.
    with contextlib.suppress(OSError, RuntimeError):
        known = _read_known()
        new = [place for place in dict.fromkeys(found) if place not in known]
        if new:
            path = _find_record()
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_name(f"{path.name}.{os.getpid()}.writing")
            lines = [*known, *new][-_MOST_REMEMBERED:]
            temporary.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
            temporary.replace(path)


def check_recorded_code(options: Mapping[str, Any], *, where: str, cure: str) -> None:
    """Checks that the code that recorded options name is known on this machine.

    Args:
      options: group -> option -> value, or option -> value.
      cure: what to do if the code can be trusted.
    """
    for kind, name in _list_code(options):
        with contextlib.suppress(OSError, RuntimeError):
            if _find_place(name) in _read_known():
                continue
        raise UnknownCodeError(
            f"{where} names code that would be executed, {kind}={name}, and no command of yours "
            f"has named it on this machine. If you trust it, {cure}."
        )


def _list_code(options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from _list_code(value)
        elif name in CODE_OPTIONS:
            parts = value if isinstance(value, list | tuple) else [value]
            yield from ((name, part) for part in map(str, parts) if ":" in part)


def _find_place(name: str) -> str | None:
    """Returns a name with the file or the package in which it is; None if there is none."""
    place, separator, attribute = name.rpartition(":")
    if not separator or not place or "\n" in name:
        return None
    if place.endswith(".py"):
        return f"{os.path.realpath(os.path.expanduser(place))}:{attribute}"
    # Looking for the whole module would import, and so execute, its package.
    found = importlib.machinery.PathFinder.find_spec(
        place.partition(".")[0], [os.getcwd(), *sys.path]
    )
    if found is None:
        return None
    origin = found.origin or next(iter(found.submodule_search_locations or ()), "")
    return f"{os.path.realpath(origin)}:{name}"


def _find_record() -> Path:
    return Path.home() / ".cache" / "tfdist" / "named_code"


def _read_known() -> list[str]:
    try:
        return _find_record().read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return []
