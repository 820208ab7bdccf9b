"""Signs of life of tasks that train: each says in a file what it is doing, whenever that changes.

The launcher makes the files if it is to notice steps that do not come. `PulseWatch` reads them.
What a task does decides what counts as a sign of life:

    own    callbacks, and what else is the user's in `fit`: the file must change
    step   a step, or waiting for other tasks: the file must change
    busy   the first step, which is compiled, the guard, a checkpoint: it must compute or transfer
    out    outside of `fit`, `evaluate` and `predict`: as above, if another task waits in a step
    serve  a worker of parameter servers, which waits for the chief: it must compute or transfer,
           while the chief is busy
"""

import contextlib
import dataclasses
import faulthandler
import functools
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tfdist.cluster import find_launch_dir, find_tf_config

OWN, STEP, BUSY, OUT, SERVE = "own", "step", "busy", "out", "serve"
STACK_SIGNAL = getattr(signal, "SIGQUIT", None)

_WORKS = (BUSY, OUT, SERVE)
_SAMPLE_S = 0.5
_LEAST_CPU = 0.05  # of a core
_LEAST_BYTES = 1 << 17
_TICKS_PER_S = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


class Pulse:
    """What a task is doing, in the file that the launcher has made for it, if it has."""

    def __init__(self, file: int | None = None):
        self._file = file
        self._now = OUT

    @contextlib.contextmanager
    def at(self, what: str) -> Iterator[None]:
        """Says that the task does something else within the context."""
        if self._file is None:
            yield
            return
        before = self._now
        self.show(what)
        try:
            yield
        finally:
            self.show(before)

    def show(self, what: str) -> None:
        """Says what the task does from now on."""
        self._now = what
        if self._file is not None:
            with contextlib.suppress(OSError):  # a full disk must not end a run
                text = f"{what:<5} {os.getpid():010d} {time.monotonic_ns():020d}\n"
                os.pwrite(self._file, text.encode(), 0)


@functools.cache
def open_pulse() -> Pulse:
    """Returns this task's pulse; if the launcher asks for it, its signal prints all stacks."""
    directory = find_launch_dir()
    config = find_tf_config() if directory else None
    if directory is None or config is None or STACK_SIGNAL is None:
        return Pulse()
    try:
        file = os.open(find_path(directory, config.task_name), os.O_WRONLY)
    except OSError:  # the launcher wants none
        return Pulse()
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        faulthandler.register(STACK_SIGNAL, file=sys.__stderr__ or 2, all_threads=True)
    pulse = Pulse(file)
    pulse.show(OUT)
    return pulse


def find_path(directory: str | os.PathLike[str], task: str) -> Path:
    """Returns the path of a task's file in the launcher's directory."""
    return Path(directory) / f"{task}.pulse"


@dataclasses.dataclass
class Sign:
    """The last sign of life of a task.

    Attributes:
      since: when it was seen, in the time of `time.monotonic`.
      work: what the process had computed and transferred by then; see `_measure_work`.
    """

    what: str
    pid: int
    since: float
    text: bytes
    work: tuple[float, int]


class PulseWatch:
    """Reads the pulses of tasks in the launcher's directory."""

    def __init__(self, directory: str | os.PathLike[str], tasks: Sequence[str]):
        self._paths = {name: find_path(directory, name) for name in tasks}
        self._sampled_at = float("-inf")
        self.signs: dict[str, Sign] = {}
        for name in self._paths:
            self.forget(name)

    def forget(self, name: str) -> None:
        """Empties the file of a task that starts again."""
        self.signs.pop(name, None)
        with contextlib.suppress(OSError):
            self._paths[name].write_bytes(b"")

    def remove(self) -> None:
        """Removes the files."""
        for path in self._paths.values():
            with contextlib.suppress(OSError):
                path.unlink()

    def measure(self, pids: Mapping[str, int]) -> dict[str, float]:
        """Returns task -> seconds without a sign of life of its session, of those that give any."""
        now = time.monotonic()
        if now - self._sampled_at >= _SAMPLE_S:
            self._sampled_at = now
            for name in set(self.signs) - set(pids):
                del self.signs[name]
            for name in pids:
                self._look(name, pids[name], now)
        return {name: now - sign.since for name, sign in self.signs.items()}

    def _look(self, name: str, session: int, now: float) -> None:
        try:
            text = self._paths[name].read_bytes()
            what, pid, _ = text.decode().split()
            # Not another process, if the task's pids are those of a container.
            if os.getsid(int(pid)) != session:
                return
        except (OSError, ValueError):  # it has given no sign yet
            return
        before = self.signs.get(name)
        if before is None or before.text != text:
            work = _measure_work(int(pid)) if what in _WORKS else (0.0, 0)
            self.signs[name] = Sign(what, int(pid), now, text, work)
        elif what in _WORKS:
            work = _measure_work(before.pid)
            cpu_s, num_bytes = work[0] - before.work[0], work[1] - before.work[1]
            if cpu_s >= _LEAST_CPU * (now - before.since) or num_bytes >= _LEAST_BYTES:
                before.since, before.work = now, work


def _measure_work(pid: int) -> tuple[float, int]:
    """Returns the seconds that a process has computed, and the bytes that it has transferred."""
    seconds, num_bytes = 0.0, 0
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        seconds = (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
    with contextlib.suppress(OSError, ValueError, IndexError):
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()[:2]
        num_bytes = sum(int(line.split()[1]) for line in lines)
    return seconds, num_bytes
