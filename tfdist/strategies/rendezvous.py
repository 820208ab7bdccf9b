"""Waits for the other tasks of a cluster, compares their options, and names missing tasks.

By themselves, TensorFlow's collectives hang forever, without a message, if a worker was never
started or runs another number of steps.

The first peer, the chief, listens at its address. The others connect, and each sends its name and
the values it was started with, as `tfdist.cluster.messages` describes. When all have connected, the
chief tells them all to continue. Neither side believes one that does not know the cluster's token.
A TensorFlow server left from an earlier start is not mistaken for a peer.
"""

import contextlib
import errno
import socket
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from tfdist.cluster import TOKEN, ClusterConfig, find_token, split_address
from tfdist.cluster.messages import CONNECT_TIMEOUT_S, RETRY_S, Peer, Visitor, Visitors
from tfdist.errors import TfdistError, TrainingError, make_printable

# The others wait longer than the chief, which then tells them who is missing.
_VERDICT_S = 5.0
_connected: list[tuple[Any, Any]] = []  # of this process: the options of its strategy, and that
_LAST_S = 1.0  # for an attempt that begins just before the deadline


def wait_for_peers(
    config: ClusterConfig, *, timeout_s: float, alike: Mapping[str, str] | None = None
) -> None:
    """Waits until all tasks that train have met, and checks that they are `alike`.

    Meanwhile this task listens at its address, which is free again on return.

    Args:
      alike: name -> value on which all tasks must agree.

    Raises:
      TfdistError: this task cannot listen at its own address, or a task differs; the
        difference is named.
      TrainingError: a task did not start in time; it is named.
    """
    tasks = {
        f"{role} {index}": address
        for role in ("chief", "worker")
        for index, address in enumerate(config.tasks.get(role, ()))
    }
    own = f"{config.role} {config.index}"
    if len(tasks) < 2 or own not in tasks:
        return
    chief = next(iter(tasks))
    with _listen(tasks[own]) as listener:
        if own == chief:
            tasks.pop(chief)
            _Meeting(chief, tasks, alike or {}).hold(listener, timeout_s=timeout_s)
        else:
            _attend(chief, tasks[chief], own, alike or {}, timeout_s=timeout_s)


def connect_once(options: Any, connect: Callable[[], Any]) -> Any:
    """Returns the strategy of this process in its cluster, to which TensorFlow connects it once.

    Args:
      options: what it is built from.
      connect: builds it, unless it was built before.

    Raises:
      TfdistError: it was built from other options.
    """
    if not _connected:
        _connected.append((options, connect()))
    known, strategy = _connected[0]
    if known != options:
        name = type(strategy).__name__
        raise TfdistError(
            f"Cannot connect this process to its cluster again: it has built a {name} of other "
            "options. Build one strategy, and give it to every trainer."
        )
    return strategy


def wait_for_servers(config: ClusterConfig, *, timeout_s: float) -> None:
    """Waits until every worker and parameter server answers; names one that does not."""
    missing = {
        f"{role} {index}": address
        for role in ("worker", "ps")
        for index, address in enumerate(config.tasks.get(role, ()))
    }
    deadline = time.monotonic() + timeout_s
    while True:
        problems = {name: find_problem(address) for name, address in missing.items()}
        missing = {name: missing[name] for name, problem in problems.items() if problem}
        if not missing:
            return
        if time.monotonic() > deadline:
            raise _make_missing_error(missing, timeout_s)
        time.sleep(RETRY_S)


def check_own_address(config: ClusterConfig) -> None:
    """Checks that this task can listen at its address; TensorFlow's server has no clear error."""
    if config.address is not None:
        with _listen(config.address):
            pass


def find_problem(address: str) -> str | None:
    """Returns None if something answers at an address, else what is wrong."""
    try:
        with socket.create_connection(split_address(address), CONNECT_TIMEOUT_S):
            return None
    except TimeoutError:
        return "no answer"
    except OSError as error:
        return error.strerror or str(error)


class _Meeting:
    """The chief's side: it waits for the others, compares them and tells them to continue."""

    def __init__(self, name: str, others: Mapping[str, str], must_match: Mapping[str, str]):
        self._name = name
        self._others = others
        self._must_match = must_match
        self._present: dict[str, Visitor] = {}
        self._values: dict[str, Mapping[str, str]] = {}

    def hold(self, listener: socket.socket, *, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        with Visitors(listener, find_token()) as visitors:
            while missing := self._find_missing():
                if time.monotonic() > deadline:
                    error = _make_missing_error(missing, timeout_s, distrusted=visitors.distrusted)
                    self._tell_all(failed=str(error))
                    raise error
                for visitor, message in visitors.poll():
                    self._let_in(visitors, visitor, message)
            if problem := self._describe_difference():
                self._tell_all(refused=problem)
                raise TfdistError(problem)
            self._tell_all(go=True)

    def _find_missing(self) -> dict[str, str]:
        self._present = {name: one for name, one in self._present.items() if one.is_open}
        return {n: a for n, a in self._others.items() if n not in self._present}

    def _let_in(self, visitors: Visitors, visitor: Visitor, message: Mapping[str, Any]) -> None:
        name, values = message.get("name"), message.get("must_match")
        if not isinstance(name, str) or name not in self._others or not isinstance(values, dict):
            visitors.refuse(visitor, "is no task of this cluster")
            return
        before = self._present.pop(name, None)
        if before is not None:
            visitors.close(before)
        self._present[name] = visitor
        self._values[name] = {key: str(value) for key, value in values.items()}

    def _describe_difference(self) -> str | None:
        for name, values in self._values.items():
            differences = [
                f"{_shorten(key)} {_shorten(values.get(key, 'missing'))} ({self._name}: "
                f"{self._must_match.get(key, 'missing')})"
                for key in sorted({*values, *self._must_match})
                if values.get(key) != self._must_match.get(key)
            ]
            if differences:
                more = " and more" if len(differences) > 3 else ""
                return (
                    f"{name} was started with different flags or versions than {self._name}: "
                    f"{', '.join(differences[:3])}{more}. Start all workers with the same command "
                    "and versions."
                )
        return None

    def _tell_all(self, **message: Any) -> None:
        for visitor in self._present.values():
            visitor.send(message)


def _attend(
    chief: str, address: str, own: str, must_match: Mapping[str, str], *, timeout_s: float
) -> None:
    """Waits until the chief says that all tasks have connected."""
    deadline = time.monotonic() + timeout_s
    token = find_token()
    while True:
        problem = "it answers, but does not accept workers yet"
        reply = None
        try:
            with Peer(address, token, until=deadline + _LAST_S) as peer:
                peer.send({"name": own, "must_match": dict(must_match)})
                reply = peer.receive(until=deadline + _VERDICT_S)
        except TimeoutError:
            problem = "no answer"
        except OSError as error:
            problem = error.strerror or str(error)
        if reply and "refused" in reply:
            raise TfdistError(_shorten(reply["refused"], 2000))
        if reply and "failed" in reply:
            raise TrainingError(_shorten(reply["failed"], 2000))
        if reply and "go" in reply:
            return
        if time.monotonic() > deadline:
            raise _make_missing_error({chief: address}, timeout_s, problem)
        time.sleep(RETRY_S)


def _shorten(value: object, limit: int = 200) -> str:
    """Returns what another task has sent as a text to print."""
    return make_printable(str(value), limit=limit)


def _make_missing_error(
    missing: Mapping[str, str],
    timeout_s: float,
    problem: str = "",
    *,
    distrusted: Collection[str] = (),
) -> TrainingError:
    named = ", ".join(
        f"{name} at {address} ({problem or find_problem(address) or 'it cannot reach this task'})"
        for name, address in missing.items()
    )
    hint = ""
    if distrusted:
        hint = (
            f" Something at {', '.join(list(distrusted)[:3])} connected with another "
            f"{TOKEN}: give all tasks the same."
        )
    return TrainingError(
        f"Timed out after {timeout_s:g} s waiting for {named}. Start every task of the cluster; "
        "python -m tfdist.launch --check says what is wrong with an address."
        f"{hint}"
    )


@contextlib.contextmanager
def _listen(address: str) -> Iterator[socket.socket]:
    """Listens at an address, so that no other process can take its port meanwhile."""
    host, port = split_address(address)
    try:
        family, _, _, _, resolved = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise TfdistError(
            f"Cannot resolve this task's address {address} ({error.strerror or error}). Check "
            "the name and DNS."
        ) from error
    with listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            # Listen on every interface, as TensorFlow's server does: behind a NAT or a Service,
            # the name that others use for this machine may not be one of its own addresses.
            listener.bind(("" if family == socket.AF_INET else "::", resolved[1]))
            listener.listen()
        except OSError as error:
            used = error.errno == errno.EADDRINUSE
            raise TfdistError(
                f"Cannot listen on port {port} of this task's address {address}: "
                f"{'it is in use' if used else error.strerror}. "
                f"{'End the process that uses it, or use' if used else 'Use'} another port."
            ) from error
        yield listener
