"""Measures time: of the steps of a training, and of the calls of a function."""

import itertools
import statistics
import time
from collections.abc import Callable

import keras

from tfdist.launch.machine import count_cores


class Clock(keras.callbacks.Callback):
    """Records when each step ends."""

    async_safe = True

    def __init__(self):
        super().__init__()
        self._began = time.perf_counter()
        self._ends: list[float] = []
        self._cpu_s: list[float] = []

    @property
    def steps(self) -> int:
        """The number of steps that have ended."""
        return len(self._ends)

    @property
    def first_step_s(self) -> float:
        """The seconds from the clock's creation to the end of the first step."""
        return self._ends[0] - self._began

    def on_train_batch_end(self, batch, logs=None):
        self._ends.append(time.perf_counter())
        self._cpu_s.append(time.process_time())

    def list_windows(self, first: int, length: int) -> list[tuple[int, int]]:
        """Returns the steps between whose ends there are `length` steps, one pair after another."""
        ends = range(first, len(self._ends) + 1, length)
        return list(itertools.pairwise(ends))

    def measure_seconds(self, first: int, last: int) -> float:
        """Returns the seconds from the end of one step to the end of another."""
        return self._ends[last - 1] - self._ends[first - 1]

    def measure_rate(self, first: int, last: int) -> float:
        """Returns the steps per second in the same time."""
        return (last - first) / self.measure_seconds(first, last)

    def measure_busy(self, first: int, last: int) -> float:
        """Returns the share of this process's cores that it kept busy in the same time."""
        busy_s = self._cpu_s[last - 1] - self._cpu_s[first - 1]
        return busy_s / self.measure_seconds(first, last) / count_cores()


def time_call(run: Callable[[], object], *, rounds: int = 9) -> float:
    """Returns the median seconds of some calls of a function."""
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return statistics.median(times)
