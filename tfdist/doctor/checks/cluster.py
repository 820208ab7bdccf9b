"""Checks the description of the cluster, its names and ports, and that its tasks agree."""

import contextlib
import ipaddress
import re
from collections.abc import Iterator, Sequence

from tfdist.cluster import split_address
from tfdist.doctor.exchange import exchange
from tfdist.doctor.findings import Finding, ok, wrong
from tfdist.doctor.machine import Machine
from tfdist.errors import TfdistError

_LISTENS = "0A"  # the state of a listening socket, in /proc/net/tcp
# gRPC uses the first of each that is set.
# Source: https://grpc.github.io/grpc/core/md_doc_core_default_http_proxy_mapper.html
_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")
_EXCEPTIONS = ("no_grpc_proxy", "no_proxy")


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


def check_proxies(machine: Machine) -> Iterator[Finding]:
    """Looks for a proxy that TensorFlow's servers would use among themselves."""
    hosts: list[str] = []
    with contextlib.suppress(TfdistError):  # another check reports it
        tasks = machine.cluster.tasks if machine.cluster else {}
        addresses = [address for found in tasks.values() for address in found]
        hosts = sorted({split_address(address)[0] for address in addresses})
    name = next((name for name in _PROXIES if machine.environ.get(name)), None)
    if name is None or not hosts:
        yield ok("no proxy between the tasks")
        return
    values = (machine.environ.get(exception) for exception in _EXCEPTIONS)
    exceptions = [part.strip() for part in (next(filter(None, values), "")).split(",")]
    proxied = [host for host in hosts if not _is_exception(host, exceptions)]
    if proxied:
        yield wrong(
            f"{name} is set, so TensorFlow sends what is for {', '.join(proxied)} to that proxy. "
            f"Unset it, or set no_grpc_proxy={','.join(hosts)}."
        )
        return
    yield ok(f"{name} is set, but not for the tasks")


def _is_exception(host: str, exceptions: Sequence[str]) -> bool:
    for part in filter(None, exceptions):
        if host.endswith(part):
            return True
        with contextlib.suppress(ValueError):
            if ipaddress.ip_address(host) in ipaddress.ip_network(part, strict=False):
                return True
    return False
