"""The commit of the git checkout that a run is started in."""

import contextlib
import subprocess

_LIMIT_S = 2


def find_commit() -> str | None:
    """Returns the commit of the working directory, with "-dirty" if tracked files are changed.

    Returns None outside of a git checkout, or if git is missing or takes too long.
    """
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        found = subprocess.run(
            command, capture_output=True, text=True, timeout=_LIMIT_S, check=True
        )
        return found.stdout.strip()
    return None
