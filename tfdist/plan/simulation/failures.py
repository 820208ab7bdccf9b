"""Training with failures: how much of the time is progress, and how often to write checkpoints."""

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Failures:
    """Machines that fail at random, any of which stops all.

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


def estimate_goodput(failures: Failures, interval_s: float) -> float:
    """Returns the share of the time that is progress, for exponential times between failures.

    Source: Daly 2006, equation 20.
    """
    between = failures.between_s
    tries = math.exp(failures.restart_s / between) * math.expm1(
        min(600.0, (interval_s + failures.checkpoint_s) / between)
    )
    return interval_s / (between * tries)


def run_failures(
    failures: Failures, interval_s: float, *, segments: int = 10000, seed: int = 0
) -> float:
    """Returns the share of the time that is progress, with failures drawn at random.

    A segment is the work between two checkpoints, and its checkpoint. A failure in it, or during a
    restart, repeats it.

    Args:
      interval_s: the seconds of work between two checkpoints.
    """
    random = np.random.default_rng(seed)
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
