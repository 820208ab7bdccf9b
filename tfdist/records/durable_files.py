"""Reads files, and writes them so that neither a crash nor a power cut leaves an incomplete one.

A file system may keep written data in memory for a while, and may write a rename to disk before
the content of the renamed file. On local file systems, every function here waits until both are
on disk. The other file systems of `tf.io.gfile`, such as `gs://`, store a file when it is
closed. Only for these is TensorFlow loaded, and their errors become an OSError.
"""

import contextlib
import errno
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from typing import Any

from tfdist.errors import TrainingError

# The errors of a file system that cannot sync a file or a directory.
_SMALL = 1 << 19
_CANNOT_SYNC = (errno.EBADF, errno.EINVAL, errno.ENOTSUP)


def exists(path: str) -> bool:
    """Returns whether there is a file or a directory."""
    if is_local(path):
        return os.path.exists(path)
    with _explaining(path):
        return bool(_find_gfile().exists(path))


def read_file(path: str) -> bytes | None:
    """Returns the content of a file of a run; None if there is none."""
    if not (os.path.isfile(path) if is_local(path) else exists(path)):
        return None
    with _explaining(path), _open(path, "rb") as file:
        content: bytes = file.read()
    return content


def write_atomically(path: str, content: str | bytes) -> None:
    """Writes a file so that a reader, or a failure, leaves the old one or the new one whole."""
    temporary = f"{path}.writing"
    try:
        with _explaining(temporary):
            with _open(temporary, "wb") as file:
                file.write(content.encode() if isinstance(content, str) else content)
            sync_to_disk(temporary)
            if is_local(path):
                os.replace(temporary, path)
            else:
                _find_gfile().rename(temporary, path, overwrite=True)
    except OSError:
        with contextlib.suppress(OSError):
            remove_file(temporary)
        raise
    sync_to_disk(_find_parent(path))


def write_output(path: str, content: str | bytes) -> None:
    """Writes a file that a user has named, in a directory that is made if it is missing.

    The file appears whole, as by `write_atomically`, which would put a file in the place of a
    device or a pipe, such as /dev/stdout; these are written to.
    """
    parent = _find_parent(path)
    make_directories(parent)
    if not (is_local(path) and _is_stream(path)):
        write_atomically(path, content)
        return
    with _explaining(path), open(path, "wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)


def append_durably(path: str, content: str) -> None:
    """Appends to a file. A crash in the meantime may leave part of the new content."""
    is_new = not exists(path)
    with _explaining(path), _open(path, "ab") as file:
        file.write(content.encode())
    sync_to_disk(path)
    if is_new:
        sync_to_disk(_find_parent(path))


def copy_file(source: str, target: str) -> None:
    """Copies a file, in place of one that is there."""
    with _explaining(target):
        if is_local(source) and is_local(target):
            shutil.copyfile(source, target)
        else:
            _find_gfile().copy(source, target, overwrite=True)


def remove_file(path: str) -> None:
    """Removes a file."""
    with _explaining(path):
        if is_local(path):
            os.remove(path)
        else:
            _find_gfile().remove(path)


def make_directories(path: str) -> None:
    """Creates a directory and its missing parents."""
    with _explaining(path):
        if not is_local(path):
            _find_gfile().makedirs(path)
            return
        missing = []
        parent = path.rstrip("/")
        while parent and not os.path.exists(parent):
            missing.append(parent)
            parent = os.path.dirname(parent)
        os.makedirs(path, exist_ok=True)
    for made in missing:
        sync_to_disk(_find_parent(made))


def is_local(path: str) -> bool:
    """Returns whether a path is on a file system of this machine, as Python sees it."""
    return "://" not in path


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
    if not is_local(path):
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC:
            raise
    finally:
        os.close(descriptor)


def _is_stream(path: str) -> bool:
    """Returns whether a path is a device or a pipe, or the name of an open file."""
    if re.fullmatch(r"/dev|/proc/\d+/fd", os.path.realpath(_find_parent(path))):
        return True
    mode = os.lstat(path).st_mode if os.path.lexists(path) else 0
    return stat.S_ISCHR(mode) or stat.S_ISFIFO(mode)


def _open(path: str, mode: str) -> Any:
    return open(path, mode) if is_local(path) else _find_gfile().GFile(path, mode)


def _find_gfile() -> Any:
    import tensorflow as tf

    return tf.io.gfile


@contextlib.contextmanager
def _explaining(path: str) -> Iterator[None]:
    """Raises an error of any file system as an OSError `path; problem`, in TensorFlow's words."""
    try:
        yield
    except OSError as error:
        if error.strerror is None:
            raise
        raise OSError(f"{error.filename or path}; {error.strerror}") from error
    except Exception as error:
        if not hasattr(error, "error_code"):  # not `tf.errors.OpError`
            raise
        problem = getattr(error, "message", "") or type(error).__name__.removesuffix("Error")
        raise OSError(problem if path in problem else f"{path}; {problem}") from error


def _find_parent(path: str) -> str:
    return os.path.dirname(path) or "."
