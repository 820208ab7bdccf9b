"""Measures the memory that this process uses and may still use, without TensorFlow."""

import contextlib
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_UNLIMITED = 2**60  # cgroup v1 writes "no limit" as the highest number of pages


@dataclass(frozen=True, order=True)
class FreeMemory:
    """Memory that may still be used.

    Attributes:
      bytes: the amount.
      where: what limits it, as in "on the machine".
    """

    bytes: int
    where: str


def measure_peak_memory() -> int:
    """Returns the peak resident memory of this process, in bytes.

    `getrusage` is only the fallback: its value includes what the process used before it started
    this program, which after a fork is all the memory of the parent.
    """
    with contextlib.suppress(OSError, StopIteration):
        return _read_status("self", "VmHWM")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def read_resident_memory(pid: int) -> int:
    """Returns the resident memory of a process, in bytes; 0 if it is gone."""
    with contextlib.suppress(OSError, StopIteration):
        return _read_status(str(pid), "VmRSS")
    return 0


def find_free_memory(root: Path = Path("/")) -> FreeMemory:
    """Returns how much memory this process may still use, under the tightest limit.

    The limits are the machine's available memory, those of this process's control groups
    (containers, Slurm, systemd), and `ulimit -m`, which Linux itself does not enforce.

    Args:
      root: the directory of /proc and /sys.

    Raises:
      OSError: the system does not say.
    """
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
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                tops = [root / "sys/fs/cgroup", root / "sys/fs/cgroup/unified"]
                names = ("memory.max", "memory.current", "inactive_file")
            elif "memory" in controllers.split(","):
                tops = [root / "sys/fs/cgroup/memory"]
                names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            else:
                continue
            # In a container, the path may be the host's, of which only the root is visible.
            inner = Path(path.lstrip("/"))
            for top in tops:
                for group in {top / part for part in (inner, *inner.parents)}:
                    yield from _read_cgroup(group, *names)


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
