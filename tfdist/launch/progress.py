"""The files that tell the launcher the step of a run and record its restarts.

They are beside the tasks' logs, so that they outlive the tasks and the launcher. The chief writes
the step after every step. The launcher adds a line to the record for every failure; the chief adds
one whenever it continues a run, with the number of steps that it must repeat.
"""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tfdist.reading import parse_object


class StepFile:
    """The number of steps done, in a file of the launcher that is written at every step."""

    def __init__(self, directory: str | os.PathLike[str]):
        self._path = Path(directory) / "step"
        self._file: int | None = None

    def read(self) -> int:
        """Returns the last step written, 0 if there is none."""
        try:
            return int(self._path.read_bytes())
        except (OSError, ValueError):
            return 0

    def read_stamp(self) -> int:
        """Returns when the step was last written, in the file system's nanoseconds; 0 if never."""
        try:
            return self._path.stat().st_mtime_ns
        except OSError:
            return 0

    def write(self, step: int) -> None:
        """Writes a step in place, which takes microseconds but may not survive a system crash."""
        with contextlib.suppress(OSError):  # a full disk must not end a run
            if self._file is None:
                self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o666)
            os.pwrite(self._file, b"%020d\n" % step, 0)


def append_record(directory: str | os.PathLike[str], line: Mapping[str, Any]) -> None:
    """Adds a line to the record of restarts. Errors are ignored: a full disk must not end a run."""
    with contextlib.suppress(OSError), open(_record(directory), "a") as file:
        file.write(json.dumps(line) + "\n")


def summarize_record(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns the entries of a run's summary about its failures and restarts.

    Returns:
      `restarts`, the number of restarts of a task or the cluster; `restart_causes`, one line per
      failure; `lost_steps`, the number of steps that were repeated.
    """
    lines = list(_read_record(directory))
    failures = [line for line in lines if "cause" in line]
    lost = [line.get("lost_steps", 0) for line in lines]
    return {
        "restarts": sum(line.get("then") in ("restarted", "replaced") for line in failures),
        "restart_causes": [
            f"{line.get('time')} {line.get('task')} {line['cause']} after step "
            f"{line.get('step')}, {line.get('then')}"
            for line in failures
        ],
        "lost_steps": sum(steps for steps in lost if isinstance(steps, int)),
    }


def _read_record(directory: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    with contextlib.suppress(OSError), open(_record(directory), "rb") as file:
        yield from filter(None, map(parse_object, file))


def _record(directory: str | os.PathLike[str]) -> Path:
    return Path(directory) / "restarts.jsonl"
