"""Measures how much room a directory has."""

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Space:
    """The room in a directory's file system.

    Attributes:
      free, total: bytes.
      free_files: how many files may still be created; None if there is no limit.
    """

    free: int
    total: int
    free_files: int | None


def find_space(path: Path) -> Space | None:
    """Returns the room in a directory, None if it does not exist."""
    with contextlib.suppress(OSError):
        found = os.statvfs(path)
        return Space(
            free=found.f_bavail * found.f_frsize,
            total=found.f_blocks * found.f_frsize,
            free_files=found.f_favail if found.f_files else None,
        )
    return None
