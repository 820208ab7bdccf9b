"""Checks the memory that is left, the swap, and the memory that processes share."""

from collections.abc import Iterator

from tfdist.doctor.checks.gpus import count_gpus
from tfdist.doctor.findings import Finding, ok, slow, wrong
from tfdist.doctor.machine import Machine
from tfdist.doctor.space import find_space
from tfdist.memory import find_free_memory

_GIB = 2**30
_LEAST = _GIB  # a small model's training takes about as much
_MOST_SWAPPED = _GIB
# NCCL exchanges data between the GPUs of a machine there; containers of Docker have 64 MiB.
# Source: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html
_LEAST_SHARED = 16 * 2**20
_LEAST_SHARED_WITH_GPUS = 512 * 2**20


def check_memory(machine: Machine) -> Iterator[Finding]:
    """Looks for too little free memory and for memory that has been swapped out."""
    try:
        free = find_free_memory(machine.root)
    except (OSError, StopIteration):
        yield ok("unknown: the system does not say")
        return
    if free.bytes < _LEAST:
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
    space = find_space(machine.root / "dev/shm")
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
