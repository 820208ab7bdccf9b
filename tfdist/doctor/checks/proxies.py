"""Checks that the tasks of a cluster reach each other without a proxy."""

import contextlib
import ipaddress
from collections.abc import Iterator, Sequence

from tfdist.cluster import split_address
from tfdist.doctor.findings import Finding, ok, wrong
from tfdist.doctor.machine import Machine
from tfdist.errors import TfdistError

# gRPC uses the first of each that is set.
# Source: https://grpc.github.io/grpc/core/md_doc_core_default_http_proxy_mapper.html
_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")
_EXCEPTIONS = ("no_grpc_proxy", "no_proxy")


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
