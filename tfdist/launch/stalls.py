"""Finds the task that all others wait for when no step ends, and the line where it is."""

import contextlib
import dataclasses
import os
import re
import sysconfig
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tfdist.launch.logs import Logs
from tfdist.launch.pulse import BUSY, OUT, OWN, SERVE, STACK_SIGNAL, STEP, PulseWatch

_ANSWER_S = 1.0  # for printing the stacks
_MAX_STACKS = 1 << 18
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+.*\(most recent call first\):$")
# The outermost functions of the main thread: of a script, and of `python -m`.
_MAIN = {"<module>", "_run_module_as_main"}
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')
_TFDIST = str(Path(__file__).resolve().parents[1])
_LIBRARIES = ("/site-packages/", "/dist-packages/", "<frozen ")
# TensorFlow calls Python functions, such as a generator's, from here.
_CALLED_BY_TENSORFLOW = "/tensorflow/python/ops/script_ops.py"


@dataclasses.dataclass(frozen=True)
class Frame:
    """A function that is running."""

    path: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.function} ({self.path}:{self.line})"

    @property
    def is_users(self) -> bool:
        """Whether it belongs neither to Python, nor to an installed package, nor to tfdist."""
        standard = sysconfig.get_paths()["stdlib"]
        if self.path.startswith((f"{_TFDIST}{os.sep}", f"{standard}{os.sep}")):
            return False
        return not any(part in self.path for part in _LIBRARIES)


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a task is.

    Attributes:
      frame: the innermost frame of the code that it waits for; None if nothing is known.
      is_called: whether a step, or tracing it, runs Python code there.
    """

    frame: Frame | None
    is_called: bool


class StallWatch:
    """Watches the signs of life of the tasks that train.

    A task whose callbacks, or other code of its own, give none for the time-out hangs. If all tasks
    give none, and at least one waits in a step, then that one hangs whose code a step has called,
    or which does not train at all. The stacks, which each task prints into its log, tell.

    Args:
      kills: whether a task that hangs is to be killed; otherwise, it is only named.
    """

    def __init__(
        self, logs: Logs, tasks: Sequence[str], *, timeout_s: float, is_whole: bool, kills: bool
    ):
        self.kills = kills
        self._logs = logs
        self._timeout_s = timeout_s
        self._is_whole = is_whole
        self._watch = PulseWatch(logs.directory, tasks)
        self._asked: tuple[float, dict[str, int]] | None = None
        self._quiet_until = 0.0
        self.forget = self._watch.forget
        self.remove = self._watch.remove

    def find(self, pids: Mapping[str, int]) -> tuple[str, str] | None:
        """Returns a task that hangs, and how, as in "hung for 60 s in load (data.py:7)"."""
        idle = self._watch.measure(pids)
        suspects = self._list_suspects(idle)
        now = time.monotonic()
        if self._asked is None:
            if suspects and now >= self._quiet_until:
                self._asked = now, {name: self._ask(name) for name in suspects}
            return None
        asked_at, offsets = self._asked
        if now - asked_at < _ANSWER_S:
            return None
        self._asked = None
        places = {name: self._read(name, offsets[name]) for name in suspects if name in offsets}
        found = self._judge(places, idle) if places else None
        if found is None or not self.kills:
            self._quiet_until = now + self._timeout_s
        return found

    def _list_suspects(self, idle: Mapping[str, float]) -> list[str]:
        doing = {name: sign.what for name, sign in self._watch.signs.items()}
        late = [name for name in idle if idle[name] >= self._timeout_s]
        own = [name for name in late if doing[name] == OWN]
        if own:
            return sorted(own, key=lambda name: -idle[name])
        if not any(doing[name] in (STEP, BUSY) for name in late):
            return []
        # What the chief of parameter servers compiles, a worker compiles, too.
        is_compiling = any(doing[name] == BUSY for name in late)
        if any(name not in late and (is_compiling or doing[name] != SERVE) for name in idle):
            return []
        return list(idle)

    def _judge(
        self, places: Mapping[str, Place], idle: Mapping[str, float]
    ) -> tuple[str, str] | None:
        def rank(name: str) -> int:
            own = self._watch.signs[name].what in (OWN, OUT)
            return 2 if own else int(places[name].is_called)

        name = max(places, key=rank)
        if not rank(name) and not self._is_whole:
            return None  # the launcher of another machine knows more
        how = f"hung for {idle[name]:.0f} s"
        if not rank(name):
            return name, f"{how} in a step, as all tasks: none of them runs code of its own"
        frame = places[name].frame
        return name, f"{how} in {frame}" if frame else how

    def _ask(self, name: str) -> int:
        """Makes a task print its stacks; returns the size of its log before."""
        size = 0
        with contextlib.suppress(OSError):
            size = self._logs.path(name).stat().st_size
            if STACK_SIGNAL is not None:
                os.kill(self._watch.signs[name].pid, STACK_SIGNAL)
        return size

    def _read(self, name: str, offset: int) -> Place:
        text = b""
        with contextlib.suppress(OSError), self._logs.path(name).open("rb") as file:
            file.seek(offset)
            text = file.read(_MAX_STACKS)
        return find_place(text.decode("utf-8", "replace"))


def find_place(text: str) -> Place:
    """Returns where a task is, from the last stacks in its log."""
    threads = _parse(text)
    called = [frames for frames in map(_find_called, threads) if frames]
    if called:
        # Of a function that waits for threads of its own, such as a data loader's, their code.
        frames = called[0]
        others = [f for frames in threads if frames[-1].function not in _MAIN for f in frames]
        user = next((frame for frame in [*frames, *others] if frame.is_users), None)
        return Place(user or frames[0], is_called=True)
    main = next((frames for frames in threads if frames[-1].function in _MAIN), None)
    if main is None:
        return Place(None, is_called=False)
    return Place(next((frame for frame in main if frame.is_users), main[0]), is_called=False)


def _find_called(frames: list[Frame]) -> list[Frame]:
    """Returns the frames of a function that a step has called, or that its trace has."""
    for position, frame in enumerate(frames):
        if _CALLED_BY_TENSORFLOW in frame.path:
            return frames[:position]
        if frame.path.startswith(os.path.join(_TFDIST, "training", "")):
            inner = frames[:position]
            if any(one.is_users for one in inner):
                return inner
    return []


def _parse(text: str) -> list[list[Frame]]:
    """Returns the frames of each thread, the innermost first."""
    threads: list[list[Frame]] = []
    is_open = False
    for line in text.splitlines():
        if _THREAD.match(line):
            threads.append([])
            is_open = True
        elif is_open and (match := _FRAME.match(line)):
            threads[-1].append(Frame(match[1], int(match[2]), match[3]))
        else:
            is_open = False
    return [frames for frames in threads if frames]
