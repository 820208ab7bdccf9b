"""Signals that ask the launcher to stop, as exceptions."""

import contextlib
import signal
from collections.abc import Iterator
from typing import Any


class SignalError(KeyboardInterrupt):
    """A signal that asks the launcher to stop."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def signal_number(interrupt: KeyboardInterrupt) -> int:
    """Returns the number of the signal that caused an interrupt."""
    return interrupt.number if isinstance(interrupt, SignalError) else signal.SIGINT


@contextlib.contextmanager
def signals_as_exceptions() -> Iterator[None]:
    """Raises `SignalError` on SIGINT, SIGTERM and, unless it is ignored as by nohup, SIGHUP."""

    def stop(number: int, _: Any) -> None:
        raise SignalError(number)

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
