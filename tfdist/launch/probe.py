"""Checks the addresses of a cluster, host by host: `python -m tfdist.launch --check`."""

import dataclasses
import errno
import ipaddress
import socket
import threading
import time
from collections.abc import Mapping

from tfdist.cluster import ClusterConfig, parse_host_list, resolve_cluster, split_address
from tfdist.strategies.registry import validate_cluster

_CONNECT_TIMEOUT_S = 2.0
_RETRY_S = 0.2


@dataclasses.dataclass(frozen=True)
class AddressCheck:
    """The result of checking one task's address.

    Attributes:
      task: role and index, as in "worker 0".
      found: what was found and, if something is wrong, what to do.
      resolved: its IP address, empty if it has none.
    """

    task: str
    address: str
    ok: bool
    found: str
    resolved: str = ""


def find_cluster(
    hosts: str, task: str, *, environ: Mapping[str, str] | None = None
) -> tuple[ClusterConfig | None, tuple[str, int] | None]:
    """Returns the cluster to check and this process's task in it, each None if unknown.

    Args:
      hosts, task: the flags of `tfdist.launch`; `task` may be empty even if `hosts` is not.
      environ: the environment to read; this process's own by default.
    """
    if hosts and not task:
        tasks = parse_host_list(hosts)
        config = ClusterConfig(tasks, next(iter(tasks)), 0, "--hosts")
        validate_cluster(config, "")
        return config, None
    found = resolve_cluster(hosts=hosts, task=task, environ=environ)
    return found, (found.role, found.index) if found else None


def run_check(
    config: ClusterConfig | None, own: tuple[str, int] | None, *, wait_s: float = 5.0
) -> int:
    """Prints the cluster and what `check_cluster` finds; returns 0 if nothing is wrong, else 1."""
    if config is None:
        print("No cluster in the flags or the environment: this is a single process.")
        return 0
    print(config.describe() if own else config.describe().replace("  <- this process", ""))
    checks = check_cluster(config, own=own, wait_s=wait_s)
    width = max((len(check.address) for check in checks), default=0)
    print("\nProbed:")
    for check in checks:
        verdict = "ok   " if check.ok else "WRONG"
        print(f"  {verdict} {check.task:<11} {check.address:<{width}}  {check.found}")
    return 0 if all(check.ok for check in checks) else 1


def check_cluster(
    config: ClusterConfig, *, own: tuple[str, int] | None, wait_s: float = 5.0
) -> list[AddressCheck]:
    """Resolves and probes every task's address, and returns the results.

    This process connects to the other tasks' ports until they answer or the time is up. Meanwhile
    it listens on its own port, so that checks that run on all machines at the same time find one
    another before any training starts.

    Args:
      own: this process's role and index, None if it is not one of the tasks.
    """
    deadline = time.monotonic() + wait_s
    tasks = [
        (role, index, address)
        for role, addresses in config.tasks.items()
        for index, address in enumerate(addresses)
    ]
    found: dict[int, tuple[bool, str, str]] = {}

    def probe(position: int, address: str, is_own: bool) -> None:
        found[position] = _probe(address, is_own, len(tasks) > 1, deadline)

    # Daemon threads, because a name service that does not answer must not delay the exit.
    threads = [
        threading.Thread(target=probe, args=(position, address, (role, index) == own), daemon=True)
        for position, (role, index, address) in enumerate(tasks)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline + _CONNECT_TIMEOUT_S + 1 - time.monotonic()))
    unknown = (False, "no name service answers. Check /etc/resolv.conf, or use IP addresses.", "")
    checks = [
        AddressCheck(f"{role} {index}", address, *found.get(position, unknown))
        for position, (role, index, address) in enumerate(tasks)
    ]
    return _mark_mixed_loopbacks(checks)


def _probe(address: str, is_own: bool, has_peers: bool, deadline: float) -> tuple[bool, str, str]:
    host, port = split_address(address)
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        problem = f"cannot resolve {host} ({error.strerror or error}). Check the name and DNS."
        return False, problem, ""
    resolved = str(infos[0][4][0])
    if is_own:
        return *_probe_own(infos[0][0], resolved, port, has_peers, deadline), resolved
    return *_probe_peer(resolved, port, deadline), resolved


def _probe_own(
    family: int, resolved: str, port: int, has_peers: bool, deadline: float
) -> tuple[bool, str]:
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((resolved, port))
            listener.listen()
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                return False, f"{resolved} is not an address of this machine. Check --task."
            if error.errno == errno.EADDRINUSE:
                return False, "the port is in use. End the process that uses it, or choose another."
            if error.errno == errno.EACCES:
                return False, "ports below 1024 are only for root. Choose another."
            return False, f"cannot listen on this port ({error.strerror}). Choose another."
        while has_peers and time.monotonic() < deadline:
            listener.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                listener.accept()[0].close()
            except OSError:
                break
    return True, "this machine; the port is free"


def _probe_peer(resolved: str, port: int, deadline: float) -> tuple[bool, str]:
    while True:
        try:
            with socket.create_connection((resolved, port), _CONNECT_TIMEOUT_S):
                return True, f"{resolved} answers"
        except TimeoutError:
            problem = "does not answer. Check that the machine is up and no firewall blocks it."
        except ConnectionRefusedError:
            problem = (
                "is reachable, but nothing listens on the port. Start that task, or run --check "
                "there at the same time."
            )
        except OSError as error:
            problem = f"is not reachable ({error.strerror or error}). Check the network."
        if time.monotonic() >= deadline:
            return False, f"{resolved} {problem}"
        time.sleep(min(_RETRY_S, max(0.0, deadline - time.monotonic())))


def _mark_mixed_loopbacks(checks: list[AddressCheck]) -> list[AddressCheck]:
    """Marks loopback addresses in a cluster that also has others."""
    loopbacks = [_is_loopback(check) for check in checks]
    if all(loopbacks) or not any(loopbacks):
        return checks
    return [
        dataclasses.replace(check, ok=False, found=_describe_loopback(check)) if loopback else check
        for check, loopback in zip(checks, loopbacks, strict=True)
    ]


def _is_loopback(check: AddressCheck) -> bool:
    host = check.resolved or split_address(check.address)[0]
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _describe_loopback(check: AddressCheck) -> str:
    host = split_address(check.address)[0]
    if host in (check.resolved, "localhost"):
        return "a loopback address, which other machines cannot reach. Use another address."
    return (
        f"{host} is {check.resolved} here, a loopback address, which other machines cannot reach. "
        "Correct /etc/hosts, or use IP addresses."
    )
