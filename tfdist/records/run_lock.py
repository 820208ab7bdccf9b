"""A lock on the directory of a run, which is released when the process that holds it ends."""

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
    """Holds the lock of a directory, which must exist, within the context.

    The kernel releases the lock when the process ends, for whatever reason. Such locks work on
    local directories, and on NFS under Linux. No lock is taken on gs:// and the like, or where the
    file system does not support locks.

    Args:
      option: the name of the option that gives the directory.

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
                f"{option}={directory} is in use by {owner}. Wait for it to end, or give another "
                f"{option}."
            ) from error
        except OSError as error:
            logging.warning("Cannot lock %s=%s: %s.", option, directory, shorten_error(error))
        with contextlib.suppress(OSError):  # The lock works on a full disk as well.
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
            f"Cannot write to {place}: {error.strerror}. Check its permissions, or give another "
            f"{option}."
        ) from error
