"""Detects tasks that hang: none of their threads has run for a while.

A process that is stopped, frozen, or stuck in the kernel looks alive, because its connections stay
open. But a process that only waits for its peers still wakes up now and then: TensorFlow's servers
and the waits of this package do so several times a second. So the kernel's count of context
switches tells the two apart, whatever the task runs.
"""

import contextlib
import os
import time
from collections.abc import Mapping

_SAMPLE_S = 1.0


class HangWatch:
    """Measures how long each task has hung. Without /proc, it reports no task."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[int, float]] = {}
        self._sampled_at = float("-inf")
        self._still: dict[str, float] = {}

    def measure(self, pids: Mapping[str, int]) -> dict[str, float]:
        """Returns task -> seconds without activity in its session, at most a second old."""
        now = time.monotonic()
        if now - self._sampled_at >= _SAMPLE_S:
            self._sampled_at = now
            self._still = self._sample(pids, now)
        return {name: self._still[name] for name in pids if name in self._still}

    def _sample(self, pids: Mapping[str, int], now: float) -> dict[str, float]:
        switches = _count_switches(set(pids.values()))
        before, self._seen = self._seen, {}
        for pid, count in switches.items():
            old = before.get(pid)
            self._seen[pid] = old if old is not None and old[0] == count else (count, now)
        return {name: now - self._seen[pid][1] for name, pid in pids.items() if pid in self._seen}


def _count_switches(sessions: set[int]) -> dict[int, int]:
    """Returns session -> number of context switches of all threads of its processes."""
    counts: dict[int, int] = {}
    with contextlib.suppress(OSError):
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                session = os.getsid(int(pid))
                if session in sessions:
                    counts[session] = counts.get(session, 0) + _count_of_process(pid)
    return counts


def _count_of_process(pid: str) -> int:
    count = 0
    for thread in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/status") as file:
            for line in file:
                if "ctxt_switches" in line:
                    count += int(line.split()[1])
    return count
