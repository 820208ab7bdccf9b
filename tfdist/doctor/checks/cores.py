"""Checks that TensorFlow's threads suit the cores that it may use."""

import contextlib
from collections.abc import Iterator

from tfdist.cgroups import list_cgroups
from tfdist.doctor.findings import Finding, ok, slow, wrong
from tfdist.doctor.machine import Machine
from tfdist.errors import TfdistError

_THREADS = ("TF_NUM_INTRAOP_THREADS", "OMP_NUM_THREADS")
_OFF = ("0", "false")


def check_cores(machine: Machine) -> Iterator[Finding]:
    """Compares the cores with the container's quota and the variables that set threads."""
    cores = machine.cores
    quota = find_quota(machine)
    if quota is not None and quota < cores:
        threads = max(1, round(quota))
        yield slow(
            f"the container may use {quota:g} of the {cores} cores that it sees, so the kernel "
            f"stops its threads again and again. Set TF_NUM_INTRAOP_THREADS={threads}, or raise "
            "the limit (docker run --cpus, resources.limits.cpu in Kubernetes)."
        )
    for name in _THREADS:
        text = machine.environ.get(name, "")
        if text and not text.isdigit():
            yield wrong(f"{name}={text} is not a number. Unset it, or set {name}={cores}.")
        elif text and 0 < cores < int(text):
            yield slow(f"{name}={text} for {cores} cores. Unset it, or set {name}={cores}.")
        elif text and name == _THREADS[0] and 0 < int(text) < min(cores, round(quota or cores)):
            yield slow(f"{name}={text} leaves some of {cores} cores idle. Unset it.")
    if _has_peers(machine) and _count_interop_threads(machine) == "1":
        yield wrong(
            "TensorFlow has a single inter-op thread, so an operation that waits for another task "
            "blocks all others. Set TF_NUM_INTEROP_THREADS=2."
        )
    onednn = machine.environ.get("TF_ENABLE_ONEDNN_OPTS", "")
    if onednn.lower() in _OFF:
        yield slow(f"TF_ENABLE_ONEDNN_OPTS={onednn} turns oneDNN's fast kernels off. Unset it.")
    elif onednn and onednn.lower() not in ("1", "true"):
        yield wrong(f"TF_ENABLE_ONEDNN_OPTS={onednn} is neither 0 nor 1. Unset it.")
    limit = f", at most {quota:g} at a time" if quota is not None else ""
    yield ok(f"{cores} core{'s' * (cores != 1)}{limit}")


def _has_peers(machine: Machine) -> bool:
    with contextlib.suppress(TfdistError):  # another check reports it
        return machine.cluster is not None and machine.cluster.num_tasks > 1
    return False


def _count_interop_threads(machine: Machine) -> str:
    """Returns the number of inter-op threads; empty if `tfdist.launch` chooses it."""
    default = "" if machine.hosts else str(machine.cores)
    return machine.environ.get("TF_NUM_INTEROP_THREADS", default)


def find_quota(machine: Machine) -> float | None:
    """Returns how many cores the control groups let this process use at a time, None for all."""
    quotas = []
    for group in list_cgroups("cpu", machine.root):
        with contextlib.suppress(OSError, ValueError):  # no such group, or its limit is "max"
            if group.version == 2:
                quota, period = map(int, (group.path / "cpu.max").read_text().split())
            else:
                quota = int((group.path / "cpu.cfs_quota_us").read_text())
                period = int((group.path / "cpu.cfs_period_us").read_text())
            if quota > 0:  # cgroup v1 writes -1 for no limit
                quotas.append(quota / period)
    return min(quotas, default=None)
