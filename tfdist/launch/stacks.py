"""The stacks that a task's Python prints on a signal: where the task is, and whose code it runs."""

import dataclasses
import os
import re
import sysconfig
from pathlib import Path

_THREAD = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+.*\(most recent call first\):$")
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


def find_place(text: str) -> Place:
    """Returns where a task is, from the last stacks in its log."""
    threads = _parse(text)
    called = [frames for frames in map(_find_called, threads) if frames]
    if called:
        # Of a function that waits for threads of its own, such as a data loader's, their code.
        frames = called[0]
        others = [f for frames in threads if frames[-1].function != "<module>" for f in frames]
        user = next((frame for frame in [*frames, *others] if frame.is_users), None)
        return Place(user or frames[0], is_called=True)
    main = next((frames for frames in threads if frames[-1].function == "<module>"), None)
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
