"""Writing files so that neither a crash nor a power cut leaves a part of one.

A file system may keep what was written in memory for a while, and may put a rename on the disk
before the content of the renamed file. On local file systems every function here waits until the
disk has both. The other file systems of `tf.io.gfile`, such as `gs://`, store a file when it is
closed.
"""

import contextlib
import errno
import os

import tensorflow as tf

# What a file system says that cannot sync a file or a directory.
_CANNOT_SYNC = (errno.EBADF, errno.EINVAL, errno.ENOTSUP)


def write_atomically(path: str, content: str | bytes) -> None:
    """Writes a file so that a reader sees the old one or the new one, never a part.

    Raises:
      OSError, tf.errors.OpError: it could not be written; the old file is untouched.
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
    """Adds to the end of a file. A crash meanwhile may leave a part of what is added.

    Raises:
      OSError, tf.errors.OpError: it could not be written.
    """
    is_new = not tf.io.gfile.exists(path)
    with tf.io.gfile.GFile(path, "a") as file:
        file.write(content)
    sync_to_disk(path)
    if is_new:
        sync_to_disk(_find_parent(path))


def make_directories(path: str) -> None:
    """Creates a directory and those above it, where they are missing.

    Raises:
      OSError, tf.errors.OpError: it could not be created.
    """
    missing = []
    parent = path.rstrip("/")
    while "://" not in path and parent and not tf.io.gfile.exists(parent):
        missing.append(parent)
        parent = os.path.dirname(parent)
    tf.io.gfile.makedirs(path)
    for made in missing:
        sync_to_disk(_find_parent(made))


def sync_to_disk(path: str) -> None:
    """Returns once the disk has a file's content or a directory's list of files.

    Does nothing for a file system that is not local, or that cannot sync.

    Raises:
      OSError: the disk could not take it.
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
