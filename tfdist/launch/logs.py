"""The logs of a cluster's tasks: where they are, what is new in them, their last lines."""

import codecs
import contextlib
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tfdist.cli.output import discard
from tfdist.errors import TfdistError, make_printable

_LAST_LINES = 20
_LAST_BYTES = 1 << 16
_PART_BYTES = 1 << 20

_COLOR = re.compile(r"\x1b\[[0-9;]*m")
# Colors, the first group, and what a terminal must not see; bars use \b and \r.
_OBEYED = re.compile(r"(\x1b\[[0-9;]{0,32}m)|[\x00-\x07\x0b\x0c\x0e-\x1f\x7f-\x9f]")
_UNFINISHED = re.compile(r"\x1b(\[[0-9;]{0,32})?$")


class Logs:
    """The tasks' logs, and what this start of the cluster has added to them."""

    def __init__(self, run_dir: str | os.PathLike[str] | None) -> None:
        self._parents: list[Path] = []
        self._offsets: dict[Path, int] = {}
        self._new: list[Path] = []
        self.shown: bytes = b""
        try:
            # Only TensorFlow's file system can write to a bucket (gs://...); the logs stay local.
            if run_dir and "://" not in str(run_dir):
                root = Path(run_dir).absolute()
            else:
                root = Path(tempfile.mkdtemp(prefix="tfdist-"))
            self.directory = root / "logs"
            parents = (self.directory, *self.directory.parents)
            self._parents = [path for path in parents if not path.exists()]
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            where = error.filename or "a temporary directory"
            raise TfdistError(
                f"Cannot write logs to {where}: {error.strerror or error}. Choose another "
                f"--run_dir{'' if run_dir else ', or another directory in TMPDIR'}."
            ) from None

    def path(self, name: str) -> Path:
        """Returns the path of a task's log."""
        return self.directory / f"{name}.log"

    def open(self, name: str) -> Path:
        """Creates a task's log if needed and returns its path; it is read from its current end."""
        path = self.path(name)
        try:
            if not path.exists():
                self._new.append(path)
            path.touch()
            self._offsets[path] = path.stat().st_size
        except OSError as error:
            raise TfdistError(
                f"Cannot write {path}: {error.strerror}. Choose another --run_dir."
            ) from None
        return path

    def read(self, path: Path, *, last_bytes: int = _LAST_BYTES) -> bytes:
        """Returns the end of what a task has written since `open`."""
        try:
            with path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(self._offsets.get(path, 0), size - last_bytes))
                return file.read()
        except OSError:
            return b""

    def follow(self, path: Path) -> Iterator[bytes]:
        """Yields the next part of what was added to a log, empty if there is nothing new."""
        position = self._offsets[path]
        while True:
            data = b""
            with contextlib.suppress(OSError), path.open("rb") as file:
                file.seek(position)
                data = file.read(_PART_BYTES)
            position += len(data)
            self.shown = (self.shown + data)[-(_LAST_BYTES):]
            yield data

    def find_problem(self) -> str | None:
        """Returns why nothing can be written beside the logs, which then lack the last lines."""
        try:
            with tempfile.TemporaryFile(dir=self.directory, buffering=0) as file:
                file.write(bytes(_LAST_BYTES))
        except OSError as error:
            return error.strerror or str(error)
        return None

    def remove_new(self) -> None:
        """Removes the files and directories that these logs created."""
        for path in self._new:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # not empty
            for path in self._parents:
                path.rmdir()


class Output:
    """Shows a log in a text stream; carriage returns and colors have their effect, as for bars.

    Other sequences that terminals obey are escaped: whoever chose a name that a task prints, such
    as a file's, could otherwise write what the user believes to be from this program.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""

    def write(self, data: bytes, *, last: bool = False) -> None:
        """Writes and flushes. If that fails, the training goes on and no more is written."""
        if self._stream is None or not (data or last):
            return
        text = self._held + self._decoder.decode(data, last)
        start = None if last else _UNFINISHED.search(text)
        text, self._held = (text[: start.start()], start[0]) if start else (text, "")
        shown = _OBEYED.sub(_escape, text)
        binary = getattr(self._stream, "buffer", None)
        try:
            if binary is None:
                self._stream.write(shown)
            else:  # whatever the encoding of the stream
                self._stream.flush()
                binary.write(shown.encode())
            self._stream.flush()
        except (OSError, ValueError):
            discard(self._stream)
            self._stream = None


def _escape(match: re.Match[str]) -> str:
    return match[0] if match[1] else make_printable(match[0])


def last_lines(data: bytes) -> list[str]:
    """Returns the last lines as a terminal would show them, without overwritten ones."""
    plain = _COLOR.sub("", data.decode("utf-8", "replace"))
    lines = plain.replace("\b", "").splitlines(keepends=True)
    text = "".join(line for line in lines if not line.endswith("\r"))
    return [line for line in text.splitlines() if line.strip()][-_LAST_LINES:]
