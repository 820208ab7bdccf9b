"""The tasks of a cluster on this machine: their addresses and roles."""

import contextlib
import socket
from collections.abc import Iterator, Mapping, Sequence

from tfdist.cluster import ClusterConfig


def make_configs(
    counts: Mapping[str, int], ports: Sequence[int], *, evaluator: bool = False
) -> list[ClusterConfig]:
    """Returns one configuration per task; the chief, or worker 0, comes first."""
    addresses = iter([f"127.0.0.1:{port}" for port in ports])
    tasks = {role: tuple(next(addresses) for _ in range(n)) for role, n in counts.items()}
    names = [(role, index) for role, number in counts.items() for index in range(number)]
    if evaluator:
        names.append(("evaluator", 0))
    return [ClusterConfig(tasks, role, index, "tfdist.launch") for role, index in names]


def computes(config: ClusterConfig) -> bool:
    """Returns whether a task trains: a worker, or a chief without parameter servers."""
    return config.role == "worker" or (config.role == "chief" and not config.num_ps)


def is_essential(config: ClusterConfig) -> bool:
    """Returns whether the cluster is done only after this task is."""
    if config.num_ps:
        return config.role == "chief"
    return config.role in ("chief", "worker")


def is_replaceable(config: ClusterConfig) -> bool:
    """Returns whether the others keep training when a task fails: a worker of parameter servers."""
    return config.role == "worker" and config.num_ps > 0


@contextlib.contextmanager
def hold_ports(number: int) -> Iterator[list[int]]:
    """Yields free ports that no other process is assigned while the context lasts.

    Linux lets a second socket bind and listen if both have SO_REUSEADDR and the first does not
    listen, but it never assigns a bound port, neither for listening nor for connecting.
    """
    with contextlib.ExitStack() as stack:
        ports = []
        for _ in range(number):
            try:
                holder = stack.enter_context(socket.socket(socket.AF_INET6))
                holder.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
                holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                holder.bind(("::", 0))
            except OSError:  # no IPv6 here
                holder = stack.enter_context(socket.socket(socket.AF_INET))
                holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                holder.bind(("0.0.0.0", 0))
            ports.append(holder.getsockname()[1])
        yield ports
