"""How long collectives take, by the alpha-beta model.

Each function takes the number of participants, the bytes of the tensor that each of them has, and
what a link costs: seconds per message and seconds per byte.

Sources: Thakur, Rabenseifner and Gropp 2005, "Optimization of collective communication operations
in MPICH"; Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms"; Sanders, Speck and
Träff 2009, "Two-tree algorithms for full bandwidth broadcast, reduction and scan".
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tfdist.plan.hardware import Hardware, Link

Transfer = Callable[[float], float]
"""Bytes -> seconds of their all-reduce."""


@dataclass(frozen=True)
class Path:
    """What a link costs to a collective."""

    alpha: float
    beta: float


def make_path(hardware: Hardware, link: Link) -> Path:
    """Returns what a link of some hardware costs."""
    return Path(link.latency_s, 1 / (link.bytes_per_s * hardware.link_share))


def time_ring(n: int, num_bytes: float, path: Path) -> float:
    """Returns the seconds of an all-reduce by a ring: reduce-scatter, then all-gather."""
    return 2 * (n - 1) * (path.alpha + num_bytes / n * path.beta)


def time_tree(n: int, num_bytes: float, path: Path) -> float:
    """Returns the seconds of an all-reduce by two trees, up and down, in many small pieces."""
    return 2 * math.ceil(math.log2(n)) * path.alpha + (2 * num_bytes * path.beta if n > 1 else 0.0)


def time_reduction_to_one(n: int, num_bytes: float, path: Path) -> float:
    """Returns the seconds of a sum on one device, through whose link everything passes twice."""
    return 2 * (n - 1) * (path.alpha + num_bytes * path.beta)


def time_all_reduce(n: int, num_bytes: float, path: Path) -> float:
    """Returns the seconds of a ring or two trees, whichever is faster, as libraries choose."""
    return min(time_ring(n, num_bytes, path), time_tree(n, num_bytes, path))


def time_hierarchical(
    devices: int, machines: int, num_bytes: float, inside: Path, between: Path
) -> float:
    """Returns the seconds of an all-reduce inside of machines and between them.

    The devices of a machine sum their tensors, the machines all-reduce the sums, and the devices
    get the result. All devices of a machine share its link.
    """
    if machines == 1:
        return time_all_reduce(devices, num_bytes, inside)
    network = time_all_reduce(machines, num_bytes, between)
    return time_all_reduce(devices, num_bytes, inside) + network


def time_servers(workers: int, servers: int, num_bytes: float, path: Path) -> float:
    """Returns the seconds between two steps that servers can serve, for all of their workers.

    For each worker, the servers send the weights and receive a gradient, in both directions at the
    same time, and each worker has a message for each server. A worker cannot be faster than its
    own link either.
    """
    messages = max(workers, servers)
    return messages * path.alpha + messages / servers * num_bytes * path.beta


def find_exposed(
    ready: Sequence[tuple[float, float]], transfer: Transfer, *, bytes_per_pack: float
) -> float:
    """Returns the seconds of communication that the backward pass does not hide.

    Gradients are summed in packs, each as soon as it is full and the pack before it is done.

    Args:
      ready: for each layer, in the order of the backward pass, the time at which its gradient is
        known, and its bytes.
      transfer: bytes -> seconds.
      bytes_per_pack: the least size of a pack; 0 for one pack with everything.
    """
    free, pack, known = 0.0, 0.0, 0.0
    for known, num_bytes in ready:
        pack += num_bytes
        if bytes_per_pack and pack >= bytes_per_pack:
            free, pack = max(free, known) + transfer(pack), 0.0
    if pack:
        free = max(free, known) + transfer(pack)
    return max(0.0, free - known)


def expect_slowest(n: int) -> float:
    """Returns how far the slowest of n is expected from the mean, in standard deviations.

    Source: Blom 1958, "Statistical estimates and transformed beta-variables", for normal variables.

    >>> round(expect_slowest(1)), round(expect_slowest(512), 1)
    (0, 3.0)
    """
    return statistics.NormalDist().inv_cdf((n - 0.375) / (n + 0.25))
