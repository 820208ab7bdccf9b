"""Processes that prepare together and are measured in turns, so that nothing runs beside them.

A process prepares up to its first step, and then waits. Each line that it is sent lets it run one
turn: some steps that are not measured, some that are, and an answer of one line with the seconds
of the latter. The first turn, in which it compiles, is not counted. Does not import TensorFlow.
"""

import contextlib
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

_ANSWER = "seconds of a turn:"
WARMUP, STEPS = 8, 56


class Turns:
    """The side of the process that is measured.

    Args:
      synchronize: returns when the device has done all that it was told.
      warmup, steps: the steps of a turn that are not measured, and those that are.
    """

    def __init__(
        self, synchronize: Callable[[], object], *, warmup: int = WARMUP, steps: int = STEPS
    ):
        self._synchronize = synchronize
        self._warmup, self._steps = warmup, steps
        self._done, self._began = 0, 0.0

    def begin(self) -> None:
        """Waits for the first turn. Call it before the first step."""
        _await_turn()

    def end_steps(self, count: int = 1) -> None:
        """Counts steps that were just asked for; ends the process after the last turn."""
        before, self._done = self._done, self._done + count
        if before < self._warmup <= self._done:
            self._synchronize()
            self._began, self._warmup_done = time.perf_counter(), self._done
        elif self._done >= self._warmup + self._steps:
            self._synchronize()
            seconds = time.perf_counter() - self._began
            print(_ANSWER, seconds / (self._done - self._warmup_done), flush=True)
            self._done = 0
            _await_turn()


def _await_turn() -> None:
    if not sys.stdin.readline():
        os._exit(0)  # the last turn was over; nothing is left to be written


def make_callback(**chosen: int) -> Any:
    """Returns a Keras callback that takes turns; `chosen` are arguments of `Turns`.

    It counts whole epochs: to a callback that sees every batch, the results of each are sent.
    """
    import keras

    class Callback(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            self._turns = Turns(lambda: self.model.trainable_variables[-1].numpy(), **chosen)
            self._turns.begin()

        def on_epoch_end(self, epoch, logs=None):
            self._turns.end_steps(self.params["steps"])

    return Callback()


class Contestant(NamedTuple):
    """A process to measure.

    Attributes:
      command: its command.
      compiles: whether its first turn may run beside those of others: it takes long on the CPU.
    """

    command: Sequence[str]
    compiles: bool = False


def hold_contest(
    contestants: Mapping[str, Contestant], *, rounds: int, limit_s: float
) -> dict[str, dict[str, Any]]:
    """Measures processes in turns, in reverse order in every other round; prints who is ready.

    Args:
      contestants: name -> a process.
      rounds: the number of measured turns of each.
      limit_s: the seconds that a turn may take; those that compile share them in the first.

    Returns:
      For each name `ms_per_step`, the median of its turns, `turns`, and `first_turn_s`, or
      `error`, the end of its output.
    """
    running = {name: _Process(c.command) for name, c in contestants.items()}
    found: dict[str, dict[str, Any]] = {name: {} for name in contestants}

    def prepare(name: str) -> None:
        began = time.monotonic()
        if running[name].take_turn(limit_s) is None:
            found[name] = {"error": running.pop(name).end() or f"not ready in {limit_s:g} s"}
        else:
            found[name]["first_turn_s"] = round(time.monotonic() - began, 1)
        print("prepared", name, found[name], flush=True)

    try:
        for name in [name for name, c in contestants.items() if not c.compiles]:
            prepare(name)
        with ThreadPoolExecutor(len(contestants)) as pool:
            list(pool.map(prepare, [name for name, c in contestants.items() if c.compiles]))
        turns: dict[str, list[float]] = {name: [] for name in running}
        for number in range(rounds):
            for name in list(running)[:: 1 if number % 2 == 0 else -1]:
                seconds = running[name].take_turn(limit_s)
                if seconds is None:
                    found[name] = {"error": running.pop(name).end()}
                else:
                    turns[name].append(1000 * seconds)
        for name in running:
            found[name] |= {"ms_per_step": statistics.median(turns[name]), "turns": turns[name]}
    finally:
        for process in running.values():
            process.end()
    return found


class _Process:
    """The side of the one that measures."""

    def __init__(self, command: Sequence[str]):
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        self._said: list[str] = []
        self._answered = threading.Event()
        self._seconds: float | None = None
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout
        for line in self._process.stdout:
            if line.startswith(_ANSWER):
                self._seconds = float(line.removeprefix(_ANSWER))
                self._answered.set()
            else:
                self._said.append(line)
        self._seconds = None
        self._answered.set()

    def take_turn(self, limit_s: float) -> float | None:
        """Returns the seconds per step of a turn; None if the process did not answer."""
        assert self._process.stdin
        self._answered.clear()
        try:
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return None
        return self._seconds if self._answered.wait(max(0.0, limit_s)) else None

    def end(self) -> str:
        """Ends the process, and returns the end of what it printed."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.kill()
        self._process.wait()
        self._reader.join()
        self._process.stdout.close()
        with contextlib.suppress(BrokenPipeError):  # a line that it never read
            self._process.stdin.close()
        return "".join(self._said)[-2000:]
