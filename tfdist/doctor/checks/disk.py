"""Checks that the run's directory and temporary files have room."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tfdist.doctor.findings import Finding, ok, wrong
from tfdist.doctor.machine import Machine
from tfdist.doctor.space import find_space

_LEAST = 2**30  # a few checkpoints
_LEAST_FILES = 1000


def check_disk(machine: Machine) -> Iterator[Finding]:
    """Measures the space and the inodes that are left where a run writes."""
    temporary = machine.environ.get("TMPDIR") or tempfile.gettempdir()
    seen = []
    for purpose, path in (("the run", machine.directory), ("temporary files", temporary)):
        if not path or "://" in path:
            continue
        existing = _find_existing(Path(path))
        space = find_space(existing)
        if space is None or not os.access(existing, os.W_OK | os.X_OK):
            yield wrong(f"{path}, for {purpose}, cannot be written. Choose another directory.")
            continue
        if space.free < _LEAST:
            yield wrong(
                f"only {space.free / 2**20:.0f} MiB are free in {path}, for {purpose}. Delete "
                "files there, or choose another directory."
            )
        if space.free_files is not None and space.free_files < _LEAST_FILES:
            yield wrong(
                f"only {space.free_files} files can still be created in {path} (no inodes are "
                "left). Delete small files there, or choose another directory."
            )
        seen.append(f"{space.free / 2**30:.1f} GiB for {purpose}")
    yield ok(", ".join(seen) or "nothing on a disk")


def _find_existing(path: Path) -> Path:
    """Returns the path, or its nearest parent that exists."""
    path = path.absolute()
    return next((place for place in (path, *path.parents) if place.exists()), Path("/"))
