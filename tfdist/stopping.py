"""Stops a run on Ctrl-C, on SIGTERM, or when a cloud takes its machine away."""

import contextlib
import os
import signal
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from types import FrameType
from typing import ClassVar, Self

from tfdist import cluster
from tfdist.announcing import print_message

EXIT_INTERRUPTED = 128 + signal.SIGINT
EXIT_TERMINATED = 128 + signal.SIGTERM

_ASK_EVERY_S = 5.0
_ASK_TIMEOUT_S = 5.0


class StopSignals:
    """Requests a stop at the first Ctrl-C or SIGTERM; a context manager.

    SIGHUP, the end of a terminal, counts as SIGTERM, unless it is ignored as by nohup. A second
    Ctrl-C interrupts at once. After SIGTERM, the process exits when the grace period is
    over, whatever it is doing; the last complete checkpoint remains.

    Args:
      grace_period_s: seconds from SIGTERM to the end of the process.
    """

    def __init__(self, request_stop: Callable[[], None], *, grace_period_s: float):
        self._request_stop = request_stop
        self._grace_period_s = grace_period_s
        self._interrupted = False
        self._deadline: threading.Timer | None = None

    def __enter__(self) -> Self:
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as by nohup
            numbers.append(signal.SIGHUP)
        self._handlers = {number: signal.signal(number, self._handle) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    @property
    def exit_status(self) -> int:
        """130 after Ctrl-C; 143 after SIGTERM, or if another worker was told to stop."""
        return EXIT_INTERRUPTED if self._interrupted else EXIT_TERMINATED

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            self._interrupted = True
            signal.signal(signal.SIGINT, signal.default_int_handler)
            _say("Stopping after this step (press Ctrl-C again to stop at once) ...")
        elif self._deadline is None:
            self._deadline = threading.Timer(self._grace_period_s, self._end)
            self._deadline.daemon = True
            self._deadline.start()
            _say(f"Stopping within {self._grace_period_s:g} s, after a checkpoint ...")
        self._request_stop()

    def _end(self) -> None:
        _say(
            f"tfdist: The grace period of {self._grace_period_s:g} s ended before the "
            "checkpoint was written. The same command continues from the previous checkpoint."
        )
        os._exit(EXIT_TERMINATED)


class ScriptStop:
    """Ends a script with status 143 at SIGTERM; a context manager.

    The script ends at once, or after the checkpoint if it is in a `stoppable` call.
    """

    _open: ClassVar["list[ScriptStop]"] = []

    def __init__(self) -> None:
        self._requests: list[Callable[[], None]] = []

    def __enter__(self) -> Self:
        self._handler = signal.signal(signal.SIGTERM, self._handle)
        self._open.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._open.remove(self)
        signal.signal(signal.SIGTERM, self._handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._requests:
            sys.exit(EXIT_TERMINATED)
        _say("Stopping after a checkpoint ...")
        for request_stop in self._requests:
            request_stop()

    @classmethod
    @contextlib.contextmanager
    def stoppable(
        cls, request_stop: Callable[[], None], was_stopped: Callable[[], bool]
    ) -> Iterator[None]:
        """Lets a call that writes checkpoints end by itself, and then ends the script, if any."""
        for script in cls._open:
            script._requests.append(request_stop)
        try:
            yield
        finally:
            for script in cls._open:
                script._requests.remove(request_stop)
        if cls._open and was_stopped():
            sys.exit(EXIT_TERMINATED)


def watch_for_maintenance() -> threading.Thread | None:
    """Sends this process SIGTERM when Google Cloud announces that it will stop the machine.

    A daemon thread asks the machine's metadata server every 5 s. On other machines, this does
    nothing. A live migration is not a reason to stop.

    Source: https://cloud.google.com/compute/docs/metadata/getting-live-migration-notice and
      https://cloud.google.com/compute/docs/instances/create-use-spot
    """
    host = cluster.find_metadata_host()
    if host is None:
        return None
    thread = threading.Thread(target=_watch, args=(host,), name="maintenance", daemon=True)
    thread.start()
    return thread


def _watch(host: str) -> None:
    pause = threading.Event()
    while not pause.wait(_ASK_EVERY_S):
        if _ask(host, "preempted") == "TRUE":
            _say("Google Cloud is preempting this machine.")
        elif _ask(host, "maintenance-event") == "TERMINATE_ON_HOST_MAINTENANCE":
            _say("Google Cloud will shut this machine down for maintenance.")
        else:
            continue
        os.kill(os.getpid(), signal.SIGTERM)
        return


def _ask(host: str, key: str) -> str:
    request = urllib.request.Request(
        f"http://{host}/computeMetadata/v1/instance/{key}", headers={"Metadata-Flavor": "Google"}
    )
    try:
        with urllib.request.urlopen(request, timeout=_ASK_TIMEOUT_S) as answer:
            return answer.read().decode().strip()
    except (OSError, ValueError):
        return ""


def _say(text: str) -> None:
    print_message(f"\n{text}")
