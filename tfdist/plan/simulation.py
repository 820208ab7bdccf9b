"""What stragglers, staleness and failures cost: discrete-event simulations, and their results."""

import collections
import dataclasses
import heapq
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from tfdist.plan.estimate import Estimate
from tfdist.plan.hardware import Hardware
from tfdist.plan.options import SimulationOptions
from tfdist.plan.workload import Workload

STRAGGLER_SHARE = 0.01
STRAGGLER_FACTOR = 2.0
_STEPS = 512


def simulate(
    options: SimulationOptions, best: Estimate, workload: Workload, hardware: Hardware
) -> dict[str, Any]:
    """Returns what stragglers and failures do to the recommended setup, and to other strategies.

    Returns:
      `stragglers`, `staleness`, `failures`: dictionaries of numbers; and `text`, title -> line.
    """
    devices = best.setup.devices
    busy = best.step_s - best.wait_s - best.input_s
    jitter = options.jitter or hardware.jitter
    steady = Workers(count=devices, step_s=busy, jitter=jitter)
    uneven = dataclasses.replace(
        steady,
        straggler_share=STRAGGLER_SHARE,
        slowness=(1.0,) * (devices - 1) + (options.slow_worker,),
    )
    every = workload.sync_every
    rates = {
        "even": run_synchronous(steady, steps=_STEPS) / busy,
        "stragglers": run_synchronous(uneven, steps=_STEPS) / busy,
        "local_sgd": run_synchronous(uneven, steps=_STEPS // every * every, sync_every=every)
        / busy,
    }
    steps = max(_STEPS, 8 * devices)
    served = run_asynchronous(uneven, steps=steps)
    ahead = run_asynchronous(uneven, steps=steps, in_flight=2 * devices)
    rates["asynchronous"] = devices / (served.steps_per_s * busy)
    rates["asynchronous, twice in flight"] = devices / (ahead.steps_per_s * busy)
    staleness = {"mean": float(served.staleness.mean()), "highest": int(served.staleness.max())}
    failures = Failures(
        machines=best.setup.workers + best.setup.servers,
        mtbf_s=options.mtbf_h * 3600,
        checkpoint_s=options.checkpoint_s,
        restart_s=options.restart_s,
    )
    interval, goodput = find_best_interval(failures)
    young, daly = find_interval_of_young(failures), find_interval_of_daly(failures)
    found = {
        "interval_s": interval,
        "goodput": goodput,
        "young_s": young,
        "daly_s": daly,
        "goodput_daly": run_failures(failures, daly),
    }
    always = (
        f" and one worker always {options.slow_worker:g} times" if options.slow_worker > 1 else ""
    )
    text = {
        "Stragglers": (
            f"a synchronous step takes {rates['even']:.3f} times a single worker's if steps vary "
            f"by {jitter:.0%}, and {rates['stragglers']:.2f} times if 1 of "
            f"{1 / STRAGGLER_SHARE:.0f} takes {STRAGGLER_FACTOR:g} times{always} as long; "
            f"{rates['local_sgd']:.2f} times with local SGD of {every} steps, "
            f"{rates['asynchronous']:.2f} times with parameter servers, whose gradients are "
            f"{staleness['mean']:.1f} updates old, at most {staleness['highest']}; "
            f"{rates['asynchronous, twice in flight']:.2f} times with "
            f"--max_in_flight={2 * devices}."
        ),
        "Failures": (
            f"with one in {options.mtbf_h:g} hours for each machine and checkpoints of "
            f"{options.checkpoint_s:g} s, {found['goodput_daly']:.2%} of the time is progress "
            f"with --checkpoint_every={daly:.0f}s (Daly's interval; Young's: {young:.0f} s). The "
            f"best of 17 simulated intervals, {interval:.0f} s, reaches {goodput:.2%}."
        ),
    }
    return {"stragglers": rates, "staleness": staleness, "failures": found, "text": text}


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


def run_synchronous(workers: Workers, *, steps: int, sync_every: int = 1) -> float:
    """Returns the mean seconds of a step whose workers wait for each other.

    Args:
      steps: the steps to simulate, a multiple of `sync_every`.
      sync_every: the steps between two syncs, as for local SGD; 1 for synchronous training.
    """
    random = np.random.default_rng(0)
    factors = workers.factors
    total = 0.0
    for _ in range(steps // sync_every):
        times = workers.draw(random, (sync_every, workers.count)) * factors
        total += float(times.sum(axis=0).max())
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
    workers: Workers, *, steps: int, serve_s: float = 0.0, in_flight: int = 0
) -> Asynchronous:
    """Returns what workers reach that do not wait for each other.

    As in tfdist, updates are applied in the order in which their steps were handed out, so a slow
    step delays those after it, and at most `in_flight` steps are ahead of the one applied.

    Args:
      serve_s: the seconds for which the servers are busy with a step.
      in_flight: the steps that are handed out at a time; 0 for one per worker.
    """
    random = np.random.default_rng(0)
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


@dataclass(frozen=True, kw_only=True)
class Failures:
    """Machines that fail at random; a failure of one stops the training.

    Attributes:
      mtbf_s: the mean seconds between two failures of a machine.
      checkpoint_s: the seconds for which a checkpoint stops training.
      restart_s: the seconds from a failure until training goes on from the last checkpoint.
    """

    machines: int
    mtbf_s: float
    checkpoint_s: float
    restart_s: float

    @property
    def between_s(self) -> float:
        """The mean seconds between two failures of any machine."""
        return self.mtbf_s / self.machines


def find_interval_of_young(failures: Failures) -> float:
    """Returns the best seconds between checkpoints, to first order.

    Source: Young 1974, "A first order approximation to the optimum checkpoint interval".
    """
    return math.sqrt(2 * failures.checkpoint_s * failures.between_s)


def find_interval_of_daly(failures: Failures) -> float:
    """Returns the best seconds between checkpoints, to a higher order.

    Source: Daly 2006, "A higher order estimate of the optimum checkpoint interval for restart
    dumps", equation 37.
    """
    cost, between = failures.checkpoint_s, failures.between_s
    if cost >= 2 * between:
        return between
    ratio = math.sqrt(cost / (2 * between))
    return math.sqrt(2 * cost * between) * (1 + ratio / 3 + ratio**2 / 9) - cost


def run_failures(failures: Failures, interval_s: float, *, segments: int = 10000) -> float:
    """Returns the share of the time that is progress, with failures drawn at random.

    A segment is the work between two checkpoints, and its checkpoint. A failure in it, or during a
    restart, repeats it.

    Args:
      interval_s: the seconds of work between two checkpoints.
    """
    random = np.random.default_rng(0)
    need = interval_s + failures.checkpoint_s
    spent = 0.0
    for _ in range(segments):
        left = need
        while (until := float(random.exponential(failures.between_s))) < left:
            spent += until
            left = need + failures.restart_s
        spent += left
    return segments * interval_s / spent


def find_best_interval(failures: Failures) -> tuple[float, float]:
    """Returns the seconds between checkpoints with the highest simulated goodput, and the goodput.

    All intervals meet the same failures, as far as they can.
    """
    middle = find_interval_of_young(failures)
    tried = {
        middle * 2.0**power: run_failures(failures, middle * 2.0**power)
        for power in np.arange(-2, 2.25, 0.25)
    }
    best = max(tried, key=lambda interval: tried[interval])
    return best, tried[best]
