"""Checks that what the flags name is there: files, directories, modules and their objects.

These checks need no TensorFlow, so that a mistyped name is reported before it is imported.
"""

import dataclasses
import glob
import os
from collections.abc import Iterable, Sequence

from tfdist.cli.arguments import find_flag
from tfdist.errors import TfdistError
from tfdist.imports import check_named
from tfdist.options import CommandOptions, OptionGroup

_MISSING = {
    "DIR": "there is no such directory",
    "FILE": "there is no such file",
    "DIR_OR_FILE": "there is no such file or directory",
    "DIR_OR_GLOB": "no file matches, and no directory has that name",
}
_PATTERN = "*?["


def check_code(
    items: Iterable[dataclasses.Field],
    arguments: Sequence[str],
    *,
    names: Sequence[str] | None = None,
) -> None:
    """Checks that the modules, files and objects that the flags name as code are there."""
    for item in items:
        if _is_code(item) and (names is None or item.name in names):
            for name in (find_flag(arguments, item.name) or "").split(","):
                if ":" in name:
                    check_named(item.name, name)


def _is_code(item: dataclasses.Field) -> bool:
    """Returns whether an option may name code; --task=worker:0 of a cluster names none."""
    form = item.metadata.get("metavar") or ""
    return bool(item.metadata.get("is_open")) or ":Class" in form or ":function" in form


def check_inputs(options: CommandOptions) -> None:
    """Checks that the files and directories of this machine that a command reads are there."""
    if not options.reads_inputs():
        return
    for item in dataclasses.fields(options):
        check_paths(getattr(options, item.name))


def check_paths(group: OptionGroup) -> None:
    """Checks that the local files and directories that a group's options name are there."""
    for item in dataclasses.fields(group):  # type: ignore[arg-type]
        holds, value = item.metadata.get("must_exist"), getattr(group, item.name)
        name, wanted = item.metadata.get("must_exist_if", (item.name, value))
        if holds and value and getattr(group, name) == wanted:
            kind = item.metadata["metavar"]
            if not _may_exist(value, kind):
                raise TfdistError(f"Cannot read `{item.name}={value}`: {_MISSING[kind]}. {holds}")


def _may_exist(path: str, kind: str) -> bool:
    if "://" in path:  # in a bucket, which TensorFlow reads
        return True
    if kind == "DIR_OR_GLOB" and any(sign in path for sign in _PATTERN):
        # Brackets and backslashes mean other things to TensorFlow.
        return os.path.exists(path) or bool(glob.glob(path)) or "[" in path or "\\" in path
    return os.path.isdir(path) if kind == "DIR" else os.path.exists(path)
