"""Writes files so that neither a crash nor a power cut leaves an incomplete one.

A file system may keep written data in memory for a while, and may write a rename to disk before
the content of the renamed file. On local file systems, every function here waits until both are
on disk. The other file systems of `tf.io.gfile`, such as `gs://`, store a file when it is
closed.
"""

import contextlib
import errno
import os
import tempfile
from collections.abc import Iterator

import tensorflow as tf

from tfdist.errors import TrainingError

# The errors of a file system that cannot sync a file or a directory.
_SMALL = 1 << 19
_CANNOT_SYNC = (errno.EBADF, errno.EINVAL, errno.ENOTSUP)


def write_atomically(path: str, content: str | bytes) -> None:
    """Writes a file so that a reader sees either the old one or the new one, never part of one.

    Raises:
      OSError, tf.errors.OpError: the file could not be written; the old one is untouched.
    """
    temporary = f"{path}.writing"
    try:
        with tf.io.gfile.GFile(temporary, "wb") as file:
            file.write(content)
        sync_to_disk(temporary)
        tf.io.gfile.rename(temporary, path, overwrite=True)
    except (OSError, tf.errors.OpError):
        with contextlib.suppress(OSError, tf.errors.OpError):
            tf.io.gfile.remove(temporary)
        raise
    sync_to_disk(_find_parent(path))


def append_durably(path: str, content: str) -> None:
    """Appends to a file. A crash in the meantime may leave part of the new content.

    Raises:
      OSError, tf.errors.OpError: the content could not be written.
    """
    is_new = not tf.io.gfile.exists(path)
    with tf.io.gfile.GFile(path, "a") as file:
        file.write(content)
    sync_to_disk(path)
    if is_new:
        sync_to_disk(_find_parent(path))


def make_directories(path: str) -> None:
    """Creates a directory and its missing parents.

    Raises:
      OSError, tf.errors.OpError: the directory could not be created.
    """
    missing = []
    parent = path.rstrip("/")
    while "://" not in path and parent and not tf.io.gfile.exists(parent):
        missing.append(parent)
        parent = os.path.dirname(parent)
    tf.io.gfile.makedirs(path)
    for made in missing:
        sync_to_disk(_find_parent(made))


class FullTemporaryError(TrainingError):
    """Temporary files cannot be written."""


@contextlib.contextmanager
def temporary_directory() -> Iterator[str]:
    """Makes a directory that is removed at the end; an error names TMPDIR if its disk is full.

    Libraries that write there raise whatever they like, and do not name the file.

    Raises:
      FullTemporaryError: the directory cannot be made, or an error occurs and no space is left.
    """
    try:
        made = tempfile.TemporaryDirectory(prefix="tfdist-")
    except OSError as error:
        raise _make_temporary_error(error.strerror or str(error)) from error
    with made as path:
        try:
            yield path
        except Exception as error:
            problem = _find_lack(path)
            if problem is None:
                raise
            raise _make_temporary_error(problem) from error


def _find_lack(directory: str) -> str | None:
    """Returns why a small file cannot be written to a directory, None if it can."""
    try:
        with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
            file.write(bytes(_SMALL))
            file.write(bytes(_SMALL))
    except OSError as error:
        return error.strerror or str(error)
    return None


def _make_temporary_error(problem: str) -> FullTemporaryError:
    try:
        where = tempfile.gettempdir()
    except OSError:
        where = "any temporary directory"
    return FullTemporaryError(
        f"Cannot write temporary files to {where}: {problem}. Free space there, or name another "
        "directory in the environment variable TMPDIR."
    )


def sync_to_disk(path: str) -> None:
    """Waits until the content of a file, or the list of files of a directory, is on disk.

    Does nothing for a file system that is not local, or that cannot sync.

    Raises:
      OSError: the data could not be written to disk.
    """
    if "://" in path:
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC:
            raise
    finally:
        os.close(descriptor)


def _find_parent(path: str) -> str:
    return os.path.dirname(path) or "."
