"""What the tasks of a cluster tell one another while the doctor runs on all of them.

The first task listens at its address. Each other task sends a line of JSON with its versions. The
first task answers with its own, its clock and the name of a file that it has written to the shared
directory. The other task compares, and sends what it finds, so that both report it.
"""

import contextlib
import dataclasses
import json
import socket
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tfdist.cluster import ClusterConfig, split_address
from tfdist.doctor.findings import Finding, wrong
from tfdist.doctor.machine import Machine

_TIMEOUT_S = 10.0  # of one message, and of a task that takes longer to get here
_RETRY_S = 0.1
_FILE_S = 3.0  # NFS shows a new file after some seconds at most
_MOST_APART_S = 2.0
_VERSIONS = ("tfdist", "tensorflow", "keras", "nvidia-cudnn-cu12", "nvidia-nccl-cu12")
_NONE = "none"


def exchange(machine: Machine, config: ClusterConfig) -> list[Finding]:
    """Returns how the tasks differ.

    Args:
      machine: this machine.
      config: the cluster, of which this machine is a task with an address.
    """
    first, *others = [
        (f"{role} {index}", address)
        for role, addresses in config.tasks.items()
        for index, address in enumerate(addresses)
    ]
    own = f"{config.role} {config.index}"
    deadline = time.monotonic() + machine.wait_s + _TIMEOUT_S
    if own == first[0]:
        return _Host(machine, first[1], deadline).hear([name for name, _ in others])
    return _tell(machine, own, first, deadline)


class _Host:
    """The first task's side."""

    def __init__(self, machine: Machine, address: str, deadline: float):
        self._machine, self._address, self._deadline = machine, address, deadline
        self._found: list[Finding] = []

    def hear(self, others: list[str]) -> list[Finding]:
        """Answers every other task once, and returns what they have found."""
        missing = set(others)
        with _shared_file(self._machine) as file, self._listen() as listener:
            while missing and (left := self._deadline - time.monotonic()) > 0:
                listener.settimeout(left)
                with contextlib.suppress(OSError, ValueError, KeyError):
                    connection, _ = listener.accept()
                    with connection:
                        missing.discard(self._answer(connection, file))
        missing_text = "did not compare itself. Run the doctor on all machines at the same time."
        return self._found + [wrong(f"{name} {missing_text}") for name in sorted(missing)]

    def _listen(self) -> socket.socket:
        host, port = split_address(self._address)
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)

    def _answer(self, connection: socket.socket, file: str) -> str:
        connection.settimeout(_TIMEOUT_S)
        lines = connection.makefile("rw", encoding="utf-8")
        name = json.loads(lines.readline())["task"]
        answer = {"versions": _list_versions(self._machine), "file": file}
        _send(lines, {**answer, "time": self._machine.clock()})
        for finding in json.loads(lines.readline())["found"]:
            self._found.append(Finding(**finding))
        return name


def _tell(machine: Machine, own: str, first: tuple[str, str], deadline: float) -> list[Finding]:
    """The side of the other tasks."""
    name, address = first
    while True:
        try:
            with socket.create_connection(split_address(address), _TIMEOUT_S) as connection:
                lines = connection.makefile("rw", encoding="utf-8")
                sent = machine.clock()
                _send(lines, {"task": own})
                answer = json.loads(lines.readline())
                received = machine.clock()
                found = list(_compare(machine, own, name, answer, sent=sent, received=received))
                _send(lines, {"found": [dataclasses.asdict(finding) for finding in found]})
                return found
        except (OSError, ValueError) as error:
            if time.monotonic() > deadline:
                return [wrong(f"{name} does not compare itself ({error}). Run the doctor there.")]
            time.sleep(_RETRY_S)


def _compare(
    machine: Machine, own: str, first: str, answer: Any, *, sent: float, received: float
) -> Iterator[Finding]:
    """Yields how this task differs from the first one.

    Args:
      machine: this machine.
      own, first: the names of the tasks.
      answer: what the first task has sent.
      sent, received: this machine's time before and after.
    """
    versions = _list_versions(machine)
    for package, theirs in answer["versions"].items():
        if versions[package] != theirs:
            yield wrong(
                f"{own} has {package} {versions[package]}, {first} has {theirs}. Install the same "
                "version everywhere."
            )
    # The answer was written between the two, so the difference is certain beyond half of them.
    apart = (sent + received) / 2 - answer["time"]
    if abs(apart) - (received - sent) / 2 > _MOST_APART_S:
        side = "ahead of" if apart > 0 else "behind"
        yield wrong(
            f"the clock of {own} is {abs(apart):.1f} s {side} that of {first}. Let NTP (chrony, "
            "systemd-timesyncd) set both."
        )
    if answer["file"] and machine.directory and not _find_file(machine.directory, answer["file"]):
        yield wrong(
            f"{own} does not see in {machine.directory} what {first} writes to its run directory. "
            "Mount the same shared directory on all machines, and name it alike."
        )


def _find_file(directory: str, name: str) -> bool:
    until = time.monotonic() + _FILE_S
    while not (Path(directory) / name).exists():
        if time.monotonic() > until:
            return False
        with contextlib.suppress(OSError):
            list(Path(directory).iterdir())  # lets NFS look again
        time.sleep(_RETRY_S)
    return True


@contextlib.contextmanager
def _shared_file(machine: Machine) -> Iterator[str]:
    """Yields the name of a file in the run's directory; empty if there is no directory."""
    if not machine.directory or not Path(machine.directory).is_dir():
        yield ""
        return
    name = f".tfdist-doctor-{uuid.uuid4().hex}"
    path = Path(machine.directory) / name
    try:
        path.write_text(name)
        yield name
    except OSError:  # another check reports it
        yield ""
    finally:
        path.unlink(missing_ok=True)


def _list_versions(machine: Machine) -> dict[str, str]:
    return {name: machine.versions.get(name, _NONE) for name in _VERSIONS}


def _send(lines: Any, message: Any) -> None:
    lines.write(json.dumps(message) + "\n")
    lines.flush()
