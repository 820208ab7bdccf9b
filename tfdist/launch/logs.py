"""The logs of a cluster's tasks: where they are, what is new in them, their last lines."""

import codecs
import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from tfdist.errors import TfdistError

_LAST_LINES = 20
_LAST_BYTES = 1 << 16


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
            raise TfdistError(
                f"Cannot write logs to {error.filename}: {error.strerror}. Choose another "
                "--run_dir."
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
        """Yields what was added to a log since the last time, possibly nothing."""
        with path.open("rb") as file:
            file.seek(self._offsets[path])
            while True:
                data = file.read()
                self.shown = (self.shown + data)[-(_LAST_BYTES):]
                yield data

    def remove_new(self) -> None:
        """Removes the files and directories that these logs created."""
        for path in self._new:
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # not empty
            for path in self._parents:
                path.rmdir()


class Output:
    """Writes bytes to a text stream, unchanged (carriage returns included) if it has a buffer."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._binary: IO[bytes] | None = getattr(stream, "buffer", None)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def write(self, data: bytes, *, last: bool = False) -> None:
        """Writes and flushes; a reader that closes the pipe must not stop the training."""
        if not data and not last:
            return
        try:
            if self._binary is not None:
                self._stream.flush()
                self._binary.write(data)
                self._binary.flush()
            else:
                self._stream.write(self._decoder.decode(data, last))
                self._stream.flush()
        except BrokenPipeError:
            # Otherwise the buffered data would fail again when the interpreter exits.
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), self._stream.fileno())


def last_lines(data: bytes) -> list[str]:
    """Returns the last lines as a terminal would show them, without overwritten ones."""
    lines = data.decode("utf-8", "replace").replace("\b", "").splitlines(keepends=True)
    text = "".join(line for line in lines if not line.endswith("\r"))
    return [line for line in text.splitlines() if line.strip()][-_LAST_LINES:]
