"""Compares the tasks of a cluster with one another."""

from collections.abc import Iterator

from tfdist.doctor.exchange import exchange
from tfdist.doctor.findings import Finding, ok
from tfdist.doctor.machine import Machine
from tfdist.errors import TfdistError


def check_peers(machine: Machine) -> Iterator[Finding]:
    """Compares versions, clocks and the shared directory with those of the first task."""
    try:
        config, own = machine.cluster, machine.own_task
        is_reachable = all(check.ok for check in machine.addresses)
    except TfdistError:  # another check reports it
        return
    if config is None or own is None or config.num_tasks < 2 or config.address is None:
        return
    if not is_reachable:
        yield ok("not compared, because not all tasks answer")
        return
    found = exchange(machine, config)
    yield from found
    if not found:
        directory = f", the directory {machine.directory}" if machine.directory else ""
        yield ok(f"all tasks agree: versions, clocks{directory}")
