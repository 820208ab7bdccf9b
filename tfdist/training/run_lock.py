"""A lock on a run's directory, that dies with the process that holds it."""

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from tfdist.errors import TfdistError


@contextlib.contextmanager
def hold_run_lock(directory: str) -> Iterator[None]:
    """Holds the lock of a directory, which must exist, while the context lasts.

    The kernel lets go of it when the process ends, however that ends. Local directories, and
    NFS under Linux; on gs:// and the like there is no such lock, and none is taken.

    Raises:
      TfdistError: another process holds it.
    """
    if "://" in directory:
        yield
        return
    with _open(Path(directory) / ".lock", directory) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.seek(0)
            owner = file.read().strip() or "another process"
            raise TfdistError(
                f"--run_dir={directory} is in use by {owner}. Wait for it to end, or take another "
                "--run_dir."
            ) from error
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield


def _open(path: Path, directory: str) -> IO[str]:
    try:
        return path.open("a+")
    except OSError as error:
        raise TfdistError(
            f"Cannot write to --run_dir={directory}: {error.strerror}. Check its permissions, or "
            "take another --run_dir."
        ) from error
