"""Measures the memory that this process uses and may still use, without TensorFlow."""

import contextlib
import os
import re
import resource
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tfdist.cgroups import list_cgroups

_UNLIMITED = 2**60  # cgroup v1 writes "no limit" as the highest number of pages
_LACKS = (
    re.compile(r"OOM when allocating tensor with (?P<what>shape\[.*?\]).*?(?P<where>[CGT]PU:\d+)"),
    re.compile(r"[Oo]ut of memory while trying to allocate (?P<what>[\d.]+ ?\w+)"),
    re.compile(r"Unable to allocate (?P<what>[\d.]+ \w+)"),  # NumPy
    re.compile(r"[Ff]ailed to allocate memory|[Oo]ut of memory|^$"),
)


@dataclass(frozen=True, order=True)
class FreeMemory:
    """Memory that may still be used, and what limits it, as in "on the machine"."""

    bytes: int
    where: str


def measure_peak_memory() -> int:
    """Returns the peak resident memory of this process, in bytes.

    `getrusage` is only the fallback: its value includes what the process used before it started
    this program, which after a fork is all the memory of the parent.
    """
    with contextlib.suppress(OSError, StopIteration):
        return _read_status("self", "VmHWM")
    # Linux counts KiB; macOS, bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def read_resident_memory(pid: int) -> int:
    """Returns the resident memory of a process, in bytes; 0 if it is gone."""
    with contextlib.suppress(OSError, StopIteration):
        return _read_status(str(pid), "VmRSS")
    return 0


def describe_lack(error: BaseException) -> str | None:
    """Returns what did not fit in memory, or on a full disk; None for any other error."""
    names = {kind.__name__ for kind in type(error).__mro__}
    if not names & {"ResourceExhaustedError", "MemoryError"}:
        return None
    text = getattr(error, "message", None) or str(error)
    found = next(filter(None, (lack.search(text) for lack in _LACKS)), None)
    if found is None:
        return None
    parts = found.groupdict()
    where = f" on {parts['where']}" if parts.get("where") else ""
    what = f" for {parts['what']}" if parts.get("what") else ""
    return (
        f"Out of memory{where}{what}. Use a smaller `global_batch_size`; to train, more "
        "`micro_batches`, `rematerialize`, or more devices with `placement`."
    )


def find_free_memory(root: Path = Path("/")) -> FreeMemory:
    """Returns how much memory this process may still use, under the tightest limit.

    The limits are the machine's available memory, those of this process's control groups
    (containers, Slurm, systemd), and `ulimit -m`, which Linux itself does not enforce. Where
    there is no /proc, as on macOS, all memory of the machine counts as available.
    """
    if not (root / "proc").exists():
        pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return FreeMemory(pages, "on the machine, used or not, because it has no /proc")
    meminfo = (root / "proc/meminfo").read_text()
    available = next(line for line in meminfo.splitlines() if line.startswith("MemAvailable:"))
    found = [FreeMemory(int(available.split()[1]) * 1024, "on the machine")]
    found += _list_cgroups(root)
    limit = resource.getrlimit(resource.RLIMIT_RSS)[0]
    if limit != resource.RLIM_INFINITY:
        used = _read_status("self", "VmRSS")
        found.append(FreeMemory(max(0, limit - used), "below `ulimit -m`"))
    return min(found)


def _list_cgroups(root: Path) -> Iterator[FreeMemory]:
    """Yields the memory left in each of this process's control groups (cgroup v1 and v2)."""
    names = {
        1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        2: ("memory.max", "memory.current", "inactive_file"),
    }
    for group in list_cgroups("memory", root):
        yield from _read_cgroup(group.path, *names[group.version])


def _read_cgroup(group: Path, limit: str, usage: str, cache: str) -> Iterator[FreeMemory]:
    with contextlib.suppress(OSError, ValueError):  # no such group, or its limit is "max"
        most = int((group / limit).read_text())
        if most >= _UNLIMITED:
            return
        used = int((group / usage).read_text())
        # Usage includes the page cache, which the kernel frees when memory is needed.
        for line in (group / "memory.stat").read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == cache:
                used -= int(value)
        yield FreeMemory(max(0, most - used), "in the container or control group")


def _read_status(pid: str, name: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{name}:")).split()[1]) * 1024
