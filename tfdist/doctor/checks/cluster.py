"""Checks the description of the cluster, its names and ports, and that its tasks agree."""

import re
from collections.abc import Iterator

from tfdist.cluster import split_address
from tfdist.doctor.exchange import exchange
from tfdist.doctor.findings import Finding, ok, wrong
from tfdist.doctor.machine import Machine
from tfdist.errors import TfdistError

_LISTENS = "0A"  # the state of a listening socket, in /proc/net/tcp


def check_cluster(machine: Machine) -> Iterator[Finding]:
    """Reads the cluster that the flags or the environment describe."""
    try:
        config = machine.cluster
    except TfdistError as error:
        yield wrong(str(error))
        return
    if config is None:
        yield ok("none: a single process")
        return
    yield ok(config.describe().partition("\n")[0])


def check_addresses(machine: Machine) -> Iterator[Finding]:
    """Resolves the names of all tasks and probes their ports, as `launch --check` does."""
    try:
        checks = machine.addresses
    except TfdistError:  # another check reports it
        return
    for check in checks:
        if check.ok:
            continue
        text = f"{check.task} ({check.address}): {check.found}"
        if "in use" in check.found:
            text += find_listener(machine, split_address(check.address)[1])
        yield wrong(text)
    if checks:
        yield ok(f"all {len(checks)} tasks answer")


def find_listener(machine: Machine, port: int) -> str:
    """Returns a sentence that names the process that listens on a port, empty if unknown."""
    sockets = set()
    for name in ("tcp", "tcp6"):
        for line in machine.read(f"proc/net/{name}").splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENS and int(fields[1].rpartition(":")[2], 16) == port:
                sockets.add(fields[9])
    for pid, file in machine.list_open_files():
        inode = re.fullmatch(r"socket:\[(\d+)\]", file)
        if inode and inode[1] in sockets:
            return f" It is {machine.name_process(pid)}."
    return ""


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
