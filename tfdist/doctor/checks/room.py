"""Checks that memory, disks and limits leave room for a run."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tfdist.doctor.checks.gpus import count_gpus
from tfdist.doctor.findings import Finding, ok, slow, wrong
from tfdist.doctor.machine import Machine
from tfdist.memory import find_free_memory

_GIB = 2**30
_LEAST_MEMORY = _GIB  # a small model's training takes about as much
_MOST_SWAPPED = _GIB
# NCCL exchanges data between the GPUs of a machine there; containers of Docker have 64 MiB.
# Source: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html
_LEAST_SHARED = 16 * 2**20
_LEAST_SHARED_WITH_GPUS = 512 * 2**20
_LEAST_ON_DISK = _GIB  # a few checkpoints
_LEAST_FILES = 1000
_LEAST_OPEN = 1024  # Linux's usual limit, which tfdist's tests run under


def check_memory(machine: Machine) -> Iterator[Finding]:
    """Looks for too little free memory and for memory that has been swapped out."""
    try:
        free = find_free_memory(machine.root)
    except (OSError, StopIteration):
        yield ok("unknown: the system does not say")
        return
    if free.bytes < _LEAST_MEMORY:
        yield wrong(
            f"only {free.bytes / _GIB:.1f} GiB of memory are free {free.where}. End other "
            "processes, or raise the limit."
        )
    lines = machine.read("proc/meminfo").splitlines()
    kib = {line.partition(":")[0]: line.split()[1] for line in lines if len(line.split()) > 1}
    swapped = (int(kib.get("SwapTotal", 0)) - int(kib.get("SwapFree", 0))) * 1024
    if swapped > _MOST_SWAPPED:
        yield slow(
            f"{swapped / _GIB:.1f} GiB of memory are swapped out to a disk, which is far slower. "
            "End other processes, or use a smaller batch."
        )
    yield ok(f"{free.bytes / _GIB:.1f} GiB are free {free.where}")


def check_shared_memory(machine: Machine) -> Iterator[Finding]:
    """Looks for a /dev/shm that is full, or too small for several GPUs."""
    space = _find_space(machine.root / "dev/shm")
    if space is None:
        yield ok("no /dev/shm")
        return
    least = _LEAST_SHARED_WITH_GPUS if count_gpus(machine) > 1 else _LEAST_SHARED
    if space.free < least:
        yield wrong(
            f"{space.free / 2**20:.0f} of {space.total / 2**20:.0f} MiB are free in /dev/shm. "
            "Delete old files there, or start the container with --shm-size=2g."
        )
    yield ok(f"{space.free / 2**20:.0f} MiB are free in /dev/shm")


def check_disk(machine: Machine) -> Iterator[Finding]:
    """Measures the space and the inodes that are left where a run writes."""
    temporary = machine.environ.get("TMPDIR") or tempfile.gettempdir()
    seen = []
    for purpose, path in (("the run", machine.directory), ("temporary files", temporary)):
        if not path or "://" in path:
            continue
        existing = _find_existing(Path(path))
        space = _find_space(existing)
        if space is None or not os.access(existing, os.W_OK | os.X_OK):
            yield wrong(f"{path}, for {purpose}, cannot be written. Choose another directory.")
            continue
        if space.free < _LEAST_ON_DISK:
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


def check_open_files(machine: Machine) -> Iterator[Finding]:
    """Compares the limit of open files with what TensorFlow, its data and its servers open."""
    if 0 <= machine.open_files < _LEAST_OPEN:
        yield wrong(
            f"a process may open only {machine.open_files} files, sockets included. Run "
            f"ulimit -n {_LEAST_OPEN} or more before."
        )
    yield ok(f"{machine.open_files} at a time")


def _find_existing(path: Path) -> Path:
    """Returns the path, or its nearest parent that exists."""
    path = path.absolute()
    return next((place for place in (path, *path.parents) if place.exists()), Path("/"))


@dataclass(frozen=True)
class _Space:
    """A file system's bytes, free and in all, and how many files it still takes, if limited."""

    free: int
    total: int
    free_files: int | None


def _find_space(path: Path) -> _Space | None:
    """Returns the room in a directory, None if it does not exist."""
    with contextlib.suppress(OSError):
        found = os.statvfs(path)
        return _Space(
            free=found.f_bavail * found.f_frsize,
            total=found.f_blocks * found.f_frsize,
            free_files=found.f_favail if found.f_files else None,
        )
    return None
