"""Finds the task for which the others wait if a step does not come, and where its code is."""

import contextlib
import os
import time
from collections.abc import Mapping, Sequence

from tfdist.launch.logs import Logs
from tfdist.launch.pulse import BUSY, OUT, OWN, SERVE, STACK_SIGNAL, STEP, PulseWatch
from tfdist.launch.stacks import Place, find_place

_ANSWER_S = 1.0  # for printing the stacks
_MAX_STACKS = 1 << 18


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
