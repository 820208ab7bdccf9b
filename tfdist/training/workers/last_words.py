"""What a worker's program says to the others when it fails or ends."""

import atexit
import contextlib
import functools
import sys
import threading
from collections.abc import Iterator

import tensorflow as tf

from tfdist.errors import TfdistError, shorten_error
from tfdist.internals import context

# In TensorFlow's coordination service.
_ENDED, _FAILED = "tfdist/ended", "tfdist/failed"
_ANSWER_MS, _ALIKE_MS = 2000, 15_000  # workers fail at about the same step if they fail alike
# The errors that TensorFlow raises when a peer is lost.
LOST_PEER = (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.CancelledError)


class LastWords:
    """Tells the other workers how this process's program ends, unless it is killed."""

    def __init__(self, worker: int):
        self._worker, self._key = worker, f"{_ENDED}/{worker}"
        self._reason: str | None = None
        self._in_use = threading.Lock()
        self._thread: int | None = None
        self._calls = 0

    @classmethod
    @functools.cache
    def of(cls, worker: int) -> "LastWords":
        """Returns those of this process."""
        return cls(worker)

    def keep(self, reason: str | None) -> None:
        """Takes the error that a method has raised; "" to tell nothing, None if there is none."""
        self._reason = reason

    def speak_first(self) -> None:
        """Makes the process tell before all else at its exit, which may forget the last error."""
        atexit.unregister(self._tell)
        atexit.register(self._tell)

    @contextlib.contextmanager
    def waking_others(self, count: int) -> Iterator[None]:
        """Lets no other worker wait for ever if a method fails here alone, and the script goes on.

        A second thread that would use the workers at the same time fails, too: its steps could meet
        those of another thread elsewhere.
        """
        if self._thread == threading.get_ident():  # `fit` evaluates
            yield
            return
        if not self._in_use.acquire(blocking=False):
            reason = (
                "Two threads train, evaluate or predict on several workers at the same time, and "
                "their steps would get mixed. Let one begin when the other has ended."
            )
            self._abandon(reason)
            raise TfdistError(reason)
        self._thread = threading.get_ident()
        self._calls += 1
        try:
            yield
        except Exception as error:
            if not isinstance(error, LOST_PEER) and not self._have_failed(count):
                self._abandon(describe(error))
            raise
        finally:
            self._thread = None
            self._in_use.release()

    def _have_failed(self, count: int) -> bool:
        """Returns whether all other workers fail in the same call, too, or soon do."""
        keys = [f"{_FAILED}/{self._calls}/{worker}" for worker in range(count)]
        service = context.context()
        try:
            service.set_config_key_value(keys[self._worker], "failed")
            for key in keys:
                service.get_config_key_value(key, _ALIKE_MS)
        except tf.errors.OpError:
            return False
        return True

    def _abandon(self, reason: str) -> None:
        """Makes what the workers compute together fail for all of them, now and later."""
        with contextlib.suppress(tf.errors.OpError):
            context.context().set_config_key_value(self._key, f"ended {reason}")
        context.context().abort_collective_ops(tf.errors.UNAVAILABLE, reason)

    def _tell(self) -> None:
        error = getattr(sys, "last_value", None)
        reason = self._reason
        if reason is None and error is not None:
            reason = describe(error)
        if reason != "":
            with contextlib.suppress(tf.errors.OpError):
                context.context().set_config_key_value(self._key, f"ended {reason or ''}")


def describe(error: BaseException) -> str:
    """Returns an error's class and message; TensorFlow's classes hide those of Python's errors."""
    text = shorten_error(error)
    return text if isinstance(error, tf.errors.OpError) else f"{type(error).__name__}: {text}"


def hear(worker: int, num_workers: int) -> str | None:
    """Returns why the program of a worker ended, "" without an error, None if nothing is known."""
    told = read_key(f"{_ENDED}/{worker}", num_workers)
    return None if told is None else told.partition(" ")[2]


def read_key(key: str, num_workers: int) -> str | None:
    """Returns what a worker has told the others; None if it does not do so soon."""
    try:
        timeout_ms = max(_ANSWER_MS // num_workers, 10)
        return str(context.context().get_config_key_value(key, timeout_ms))
    except tf.errors.OpError:
        return None
