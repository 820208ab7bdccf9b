"""A lock on a directory that a run fills. It dies with the process that holds it."""

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from absl import logging

from tfdist.errors import TfdistError, shorten_error


@contextlib.contextmanager
def hold_run_lock(directory: str, *, option: str = "`run_dir`") -> Iterator[None]:
    """Holds the lock of a directory, which must exist, while the context lasts.

    The kernel releases it when the process ends, however that ends. Local directories have such
    locks, and NFS under Linux. No lock is taken on gs:// and the like, nor where the file system
    says that it has none.

    Args:
      directory: what to lock.
      option: what the user calls the directory.

    Raises:
      TfdistError: another process or another trainer holds it, or the directory cannot be
        written.
    """
    if "://" in directory:
        yield
        return
    with _open(Path(directory) / ".lock", f"{option}={directory}", option) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            owner = file.read().strip() or "another process"
            if owner == _describe_process():
                owner += ", which is this process"
            raise TfdistError(
                f"{option}={directory} is in use by {owner}. Wait for it to end, or take another "
                f"{option}."
            ) from error
        except OSError as error:
            logging.warning("Cannot lock %s=%s: %s.", option, directory, shorten_error(error))
        with contextlib.suppress(OSError):  # A full disk can still be locked.
            os.ftruncate(file.fileno(), 0)
            os.write(file.fileno(), _describe_process().encode())
        yield


def _describe_process() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


def _open(path: Path, place: str, option: str) -> IO[str]:
    try:
        return path.open("a+")
    except OSError as error:
        raise TfdistError(
            f"Cannot write to {place}: {error.strerror}. Check its permissions, or take another "
            f"{option}."
        ) from error
