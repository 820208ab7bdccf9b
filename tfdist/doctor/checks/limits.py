"""Checks the limits of processes."""

from collections.abc import Iterator

from tfdist.doctor.findings import Finding, ok, wrong
from tfdist.doctor.machine import Machine

_LEAST = 1024  # Linux's usual limit, which tfdist's tests run under


def check_open_files(machine: Machine) -> Iterator[Finding]:
    """Compares the limit of open files with what TensorFlow, its data and its servers open."""
    if 0 <= machine.open_files < _LEAST:
        yield wrong(
            f"a process may open only {machine.open_files} files, sockets included. Run "
            f"ulimit -n {_LEAST} or more before."
        )
    yield ok(f"{machine.open_files} at a time")
