"""What the tasks of a cluster tell one another while the doctor runs on all of them.

The first task listens at its address. Each other task sends its name, as `tfdist.cluster.messages`
describes. The first task answers with its versions, its clock and the name of a file that it has
written to the shared directory. The other task compares, and sends what it finds, so that both
report it.
"""

import contextlib
import socket
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tfdist.cluster import ClusterConfig, find_token, split_address
from tfdist.cluster.messages import RETRY_S, Peer, Visitor, Visitors
from tfdist.doctor.findings import Finding, wrong
from tfdist.doctor.machine import Machine
from tfdist.errors import make_printable

_TIMEOUT_S = 10.0  # of one message, and of a task that takes longer to get here
_FILE_S = 3.0  # NFS shows a new file after some seconds at most
_MOST_APART_S = 2.0
_VERSIONS = ("tfdist", "tensorflow", "keras", "nvidia-cudnn-cu12", "nvidia-nccl-cu12")
_NONE = "none"


def exchange(machine: Machine, config: ClusterConfig) -> list[Finding]:
    """Returns how the tasks differ."""
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
        with _shared_file(self._machine) as file, self._listen() as visitors:
            asking: dict[Visitor, str] = {}
            while missing and time.monotonic() < self._deadline:
                for visitor, message in visitors.poll():
                    if visitor not in asking and str(message.get("task")) in missing:
                        asking[visitor] = str(message["task"])
                        answer = {"versions": _list_versions(self._machine), "file": file}
                        visitor.send({**answer, "time": self._machine.clock()})
                    elif visitor in asking and isinstance(message.get("found"), list):
                        self._found += [wrong(make_printable(str(x))) for x in message["found"]]
                        missing.discard(asking[visitor])
                        visitors.close(visitor)
                    else:
                        visitors.refuse(visitor, "is no task of this cluster")
        missing_text = "did not compare itself. Run the doctor on all machines at the same time."
        return self._found + [wrong(f"{name} {missing_text}") for name in sorted(missing)]

    @contextlib.contextmanager
    def _listen(self) -> Iterator[Visitors]:
        host, port = split_address(self._address)
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        with (
            socket.create_server((host, port), family=family) as listener,
            Visitors(listener, find_token(), most=2) as visitors,
        ):
            yield visitors


def _tell(machine: Machine, own: str, first: tuple[str, str], deadline: float) -> list[Finding]:
    """The side of the other tasks."""
    name, address = first
    while True:
        try:
            with Peer(address, find_token(), until=deadline) as peer:
                sent = machine.clock()
                peer.send({"task": own})
                answer = peer.receive(until=time.monotonic() + _TIMEOUT_S)
                received = machine.clock()
                if answer is None:
                    raise ConnectionError("it does not answer")
                found = list(_compare(machine, own, name, answer, sent=sent, received=received))
                peer.send({"found": [finding.text for finding in found]})
                return found
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            if time.monotonic() > deadline:
                return [wrong(f"{name} does not compare itself ({error}). Run the doctor there.")]
            time.sleep(RETRY_S)


def _compare(
    machine: Machine, own: str, first: str, answer: Any, *, sent: float, received: float
) -> Iterator[Finding]:
    """Yields how this task differs from the first, whose answer came between two times."""
    versions = _list_versions(machine)
    for package, theirs in answer["versions"].items():
        if versions[package] != theirs:
            yield wrong(
                f"{own} has {package} {versions[package]}, {first} has "
                f"{make_printable(str(theirs))}. Install the same version everywhere."
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
        time.sleep(RETRY_S)
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
