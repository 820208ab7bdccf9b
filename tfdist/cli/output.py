"""Standard output and error of a command that goes on without them."""

import contextlib
import errno
import io
import os
import select
import sys
from collections.abc import Callable, Iterator
from typing import Any, TextIO


@contextlib.contextmanager
def lenient_output() -> Iterator[Callable[[], bool]]:
    """Lets a run go on when nobody can read what it prints; sets `sys.stdout` and `sys.stderr`.

    A terminal is closed, the reader of a pipe ends, the disk of a log is full: none of that is a
    reason to end hours of training. What cannot be written is lost, and standard error says so.

    Yields:
      A function that returns whether standard output was lost, other than by its reader's choice.
    """
    _open_closed_descriptors()
    before = sys.stdout, sys.stderr
    made = [_make_lenient(stream, number) for number, stream in enumerate(before, start=1)]
    sys.stdout, sys.stderr = (new or old for new, old in zip(made, before, strict=True))
    try:
        yield lambda: made[0] is not None and _has_lost(made[0])
    finally:
        sys.stdout, sys.stderr = before
        for stream in filter(None, made):
            stream.flush()
            if _find_file(stream).has_failed:
                discard(stream)


@contextlib.contextmanager
def ordinary_output() -> Iterator[None]:
    """Takes `lenient_output` back meanwhile, for a user's program, which may rely on errors."""
    lenient = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = map(_find_replaced, lenient)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = lenient


def discard(stream: TextIO) -> None:
    """Discards what is written to a stream's descriptor from now on.

    Otherwise, buffered data that could not be written would fail again when the interpreter exits,
    which then exits with status 120.
    """
    with contextlib.suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())


class _LenientFile(io.FileIO):
    """A file that loses what it cannot write.

    Args:
      replaced: the stream instead of which it is used.

    Attributes:
      has_failed: whether something was lost.
      is_unread: whether that was the choice of the reader.
    """

    def __init__(self, descriptor: int, replaced: Any):
        super().__init__(descriptor, "wb", closefd=False)
        self.replaced = replaced
        self.has_failed = self.is_unread = False

    def write(self, data: Any) -> int:
        """Writes all of the data, and returns their size."""
        left = memoryview(data).cast("B")
        size = left.nbytes
        try:
            while left.nbytes:
                count = super().write(left)
                if count is None:  # another process made it non-blocking
                    select.select([], [self.fileno()], [])
                left = left[count or 0 :]
        except OSError as error:
            self.is_unread = error.errno == errno.EPIPE  # as in `| head`
            if not (self.has_failed or self.is_unread) and self.fileno() == 1:
                text = f"tfdist: cannot write to standard output: {error.strerror}. Going on.\n"
                with contextlib.suppress(OSError):
                    os.write(2, text.encode())
            self.has_failed = True
        return size


def _find_file(stream: Any) -> Any:
    buffer = getattr(stream, "buffer", None)
    return getattr(buffer, "raw", buffer)


def _has_lost(stream: Any) -> bool:
    stream.flush()
    file = _find_file(stream)
    return file.has_failed and not file.is_unread


def _find_replaced(stream: Any) -> Any:
    file = _find_file(stream)
    return file.replaced if isinstance(file, _LenientFile) else stream


def _make_lenient(stream: Any, number: int) -> Any:
    """Returns a lenient stream in place of one of the process's own; None for another."""
    if stream is None:  # its descriptor was closed
        file = io.BufferedWriter(_LenientFile(number, stream))
        return io.TextIOWrapper(file, encoding="utf-8")
    try:
        if type(stream) is not io.TextIOWrapper or stream.fileno() != number:
            return None
        if _find_replaced(stream) is not stream:
            return None
        with contextlib.suppress(OSError):
            stream.flush()
    except (OSError, ValueError):
        return None
    raw = _LenientFile(number, stream)
    is_unbuffered = isinstance(stream.buffer, io.RawIOBase)  # by `python -u` or PYTHONUNBUFFERED
    return io.TextIOWrapper(
        raw if is_unbuffered else io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def _open_closed_descriptors() -> None:
    """Opens the standard descriptors that are closed, or a file of the run would get their numbers.

    Libraries that print would then write into that file, such as a checkpoint.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
