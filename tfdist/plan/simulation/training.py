"""Training with workers of varying speed: synchronous, local and asynchronous."""

import collections
import heapq
from dataclasses import dataclass

import numpy as np

STRAGGLER_SHARE = 0.01
STRAGGLER_FACTOR = 2.0


@dataclass(frozen=True, kw_only=True)
class Workers:
    """Workers whose steps vary.

    Attributes:
      step_s: the mean of the time in which a worker computes a step.
      jitter: the standard deviation of this time, relative to its mean.
      straggler_share: the share of steps that take `straggler_factor` times as long.
      straggler_factor: see there.
      slowness: for each worker, how many times as long its steps take; empty for equal workers.
    """

    count: int
    step_s: float
    jitter: float = 0.0
    straggler_share: float = 0.0
    straggler_factor: float = STRAGGLER_FACTOR
    slowness: tuple[float, ...] = ()

    @property
    def factors(self) -> tuple[float, ...]:
        """The slowness of each worker."""
        return self.slowness or (1.0,) * self.count

    def draw(self, random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        """Returns the seconds of steps, of a worker without its slowness."""
        times = self.step_s * random.normal(1.0, self.jitter, shape)
        slow = random.random(shape) < self.straggler_share
        return np.where(slow, times * self.straggler_factor, np.maximum(times, 0.0))


def run_synchronous(
    workers: Workers, *, steps: int, sync_every: int = 1, sync_s: float = 0.0, seed: int = 0
) -> float:
    """Returns the mean seconds of a step whose workers wait for each other.

    Args:
      steps: the steps to simulate, a multiple of `sync_every`.
      sync_every: the steps between two syncs, as for local SGD; 1 for synchronous training.
    """
    random = np.random.default_rng(seed)
    factors = workers.factors
    total = 0.0
    for _ in range(steps // sync_every):
        times = workers.draw(random, (sync_every, workers.count)) * factors
        total += float(times.sum(axis=0).max()) + sync_s
    return total / (steps // sync_every * sync_every)


@dataclass(frozen=True)
class Asynchronous:
    """What asynchronous workers reach.

    Attributes:
      steps_per_s: updates per second, of all workers.
      staleness: for each update, the number of updates since its worker read the weights.
    """

    steps_per_s: float
    staleness: np.ndarray


def run_asynchronous(
    workers: Workers, *, steps: int, serve_s: float = 0.0, in_flight: int = 0, seed: int = 0
) -> Asynchronous:
    """Returns what workers reach that do not wait for each other.

    As in tfdist, updates are applied in the order in which their steps were handed out, so a slow
    step delays those after it, and at most `in_flight` steps are ahead of the one applied.

    Args:
      serve_s: the seconds for which the servers are busy with a step.
      in_flight: the steps that are handed out at a time; 0 for one per worker.
    """
    random = np.random.default_rng(seed)
    limit = in_flight or workers.count
    factors = workers.factors
    times = workers.draw(random, (steps,))
    staleness, done = [], {}
    free, now, applied, handed = 0.0, 0.0, 0, 0
    read: dict[int, int] = {}
    events: list[tuple[float, int, int]] = []
    idle = collections.deque(range(workers.count))
    while applied < steps:
        while handed < steps and idle and handed - applied < limit:
            read[handed] = applied
            worker = idle.popleft()
            seconds = float(times[handed]) * factors[worker]
            heapq.heappush(events, (now + seconds, handed, worker))
            handed += 1
        now, step, worker = heapq.heappop(events)
        idle.append(worker)
        free = max(free, now) + serve_s
        done[step] = now = max(now, free)
        while applied in done:
            staleness.append(applied - read.pop(applied))
            del done[applied]
            applied += 1
    return Asynchronous(steps / now, np.asarray(staleness))
