"""What checks the formulas of a plan: collectives message by message, and Daly's goodput.

Participants start at different times. The messages of a step of a collective are one NumPy
operation. With a process for each participant, as in SimPy, one all-reduce of 256 of them takes
0.8 s and grows with their square; this takes 0.03 s for 1024.
"""

import math

import numpy as np

from tfdist.plan.collectives import Path
from tfdist.plan.simulation import Failures

Times = np.ndarray
"""Seconds at which each participant begins or ends."""

SERVER_ROUNDS = 20


def run_ring(starts: Times, num_bytes: float, path: Path) -> Times:
    """Returns when each participant has the sum, by a ring.

    At each of its steps, a participant sends a part to its neighbor once it has the one before.
    """
    n, ends = len(starts), np.asarray(starts, np.float64)
    cost = path.alpha + num_bytes / n * path.beta
    for _ in range(2 * (n - 1)):
        ends = np.maximum(ends, np.roll(ends, 1)) + cost
    return ends


def run_tree(starts: Times, num_bytes: float, path: Path, *, pieces: int = 64) -> Times:
    """Returns when each participant has the sum, by two binary trees, up and then down, in pieces.

    The trees have half of the bytes each, and an inner participant of one is a leaf of the other.
    So its link receives all bytes once upwards, and once downwards.
    """
    n = len(starts)
    cost = path.alpha + num_bytes / pieces * path.beta
    ready = np.repeat(np.asarray(starts, np.float64)[:, None], pieces, axis=1)
    for child in range(n - 1, 0, -1):
        parent = (child - 1) // 2
        ready[parent] = np.maximum(ready[parent], _send(ready[child], cost))
    ready[0] = ready[0, -1]
    for child in range(1, n):
        ready[child] = _send(ready[(child - 1) // 2], cost)
    return ready[:, -1]


def run_reduction_to_one(starts: Times, num_bytes: float, path: Path) -> Times:
    """Returns when each participant has the sum, by the first, through whose link all pass."""
    cost = path.alpha + num_bytes * path.beta
    free = float(starts[0])
    for start in sorted(starts[1:]):
        free = max(free, float(start)) + cost
    return np.concatenate([[free], free + cost * np.arange(1, len(starts))])


def run_servers(workers: int, servers: int, num_bytes: float, path: Path) -> float:
    """Returns the seconds between two steps of a worker if all of them wait for servers only.

    Each server has an equal part of the bytes and serves the workers one after the other.
    """
    cost = path.alpha + num_bytes / servers * path.beta
    free = np.zeros(servers)
    done = np.zeros(workers)
    for _ in range(SERVER_ROUNDS):
        for worker in range(workers):
            free = np.maximum(free, done[worker]) + cost
            done[worker] = free.max()
    return float(done.mean() / SERVER_ROUNDS)


def estimate_goodput(failures: Failures, interval_s: float) -> float:
    """Returns the share of the time that is progress, for exponential times between failures.

    Source: Daly 2006, equation 20.
    """
    between = failures.between_s
    tries = math.exp(failures.restart_s / between) * math.expm1(
        min(600.0, (interval_s + failures.checkpoint_s) / between)
    )
    return interval_s / (between * tries)


def _send(ready: Times, cost: float) -> Times:
    """Returns when pieces arrive that are sent one after the other, each once it is ready."""
    steps = cost * np.arange(1, len(ready) + 1)
    return np.maximum.accumulate(ready - steps + cost) + steps
