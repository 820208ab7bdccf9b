"""The table of checks; a new check is a function and a row."""

import dataclasses
from collections.abc import Callable, Iterator

from tfdist.doctor.checks.cluster import check_addresses, check_cluster, check_peers, check_proxies
from tfdist.doctor.checks.cores import check_cores
from tfdist.doctor.checks.gpus import check_gpus
from tfdist.doctor.checks.room import (
    check_disk,
    check_memory,
    check_open_files,
    check_shared_memory,
)
from tfdist.doctor.checks.versions import check_tensorflow, check_versions
from tfdist.doctor.findings import Finding
from tfdist.doctor.machine import Machine

Check = Callable[[Machine], Iterator[Finding]]

CHECKS: dict[str, Check] = {
    "cluster": check_cluster,
    "addresses": check_addresses,
    "peers": check_peers,
    "proxies": check_proxies,
    "versions": check_versions,
    "tensorflow": check_tensorflow,
    "gpus": check_gpus,
    "cores": check_cores,
    "memory": check_memory,
    "shared memory": check_shared_memory,
    "disk": check_disk,
    "open files": check_open_files,
}


def examine(
    machine: Machine, *, say: Callable[[str], None] = lambda name: None
) -> Iterator[Finding]:
    """Yields what all checks find, `ok` only if one finds nothing else; says their names."""
    for name, check in CHECKS.items():
        say(name)
        found = list(check(machine))
        problems = [finding for finding in found if finding.severity != "ok"]
        for finding in problems or found:
            yield dataclasses.replace(finding, check=name)
