"""Paths that TensorFlow would take for patterns.

TensorFlow looks for the files of a checkpoint, and so for the variables of a SavedModel, with the
path as a pattern, in which `[` and a backslash do not stand for themselves. There is no way to
escape them, because it also opens the files under the name that it was given.
"""

import contextlib
import os
import re
import tempfile
from collections.abc import Iterator

import tensorflow as tf

from tfdist.errors import TfdistError

# `*` and `?` are patterns too, but they match themselves.
_SPECIAL = re.compile(r"[\[\\]")


@contextlib.contextmanager
def name_literally(directory: str) -> Iterator[str]:
    """Yields a path of a directory's files that TensorFlow takes literally.

    It is the path itself, if possible, else that of a link or, on other file systems, of a copy.
    """
    if not _SPECIAL.search(directory):
        yield directory
        return
    with tempfile.TemporaryDirectory() as temporary:
        path = f"{temporary}/files"
        if "://" not in directory:
            os.symlink(os.path.abspath(directory), path)
        else:
            os.mkdir(path)
            for name in tf.io.gfile.listdir(directory):
                tf.io.gfile.copy(f"{directory}/{name}", f"{path}/{name}")
        yield path


def check_saved_model_path(option: str, path: str) -> None:
    """Refuses a path with a character of a pattern, from which no SavedModel can be loaded."""
    whole = path if "://" in path else os.path.abspath(path)
    if found := _SPECIAL.search(whole):
        raise TfdistError(
            f"Cannot use `{option}={path}`: TensorFlow cannot load a SavedModel from a path that "
            f"holds {found[0]!r}, which it takes for a pattern. Give another path."
        )
