"""Waits for the other tasks of a cluster, and names those that do not come.

TensorFlow's collectives wait for ever for a worker that was never started, without a word.
"""

import errno
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tfdist.cluster import ClusterConfig, split_address
from tfdist.errors import TfdistError, TrainingError

_CONNECT_TIMEOUT_S = 2.0
_RETRY_S = 0.1


def wait_for_peers(config: ClusterConfig, *, timeout_s: float) -> None:
    """Returns once every other task that trains answers at its address.

    Meanwhile this task answers at its own, which is free again on return. A peer that tries
    in the moment between that and the start of TensorFlow's server tries again.

    Args:
      config: the cluster and this process's task in it.
      timeout_s: how long to wait for the last of them.

    Raises:
      TfdistError: this task's own address cannot be listened on.
      TrainingError: a task did not come in time; it is named.
    """
    peers = {
        f"{role} {index}": address
        for role in ("chief", "worker")
        for index, address in enumerate(config.tasks.get(role, ()))
        if (role, index) != (config.role, config.index)
    }
    if not peers or config.address is None:
        return
    with _answering(config.address):
        _reach_all(peers, timeout_s=timeout_s)


def wait_for_servers(config: ClusterConfig, *, timeout_s: float) -> None:
    """Returns once every worker and parameter server of a chief answers at its address.

    Args:
      config: the chief's cluster.
      timeout_s: how long to wait for the last of them.

    Raises:
      TrainingError: a task did not come in time; it is named.
    """
    servers = {
        f"{role} {index}": address
        for role in ("worker", "ps")
        for index, address in enumerate(config.tasks.get(role, ()))
    }
    _reach_all(servers, timeout_s=timeout_s)


def _reach_all(tasks: dict[str, str], *, timeout_s: float) -> None:
    """Returns once all tasks, name -> address, answer."""
    tasks = dict(tasks)
    deadline = time.monotonic() + timeout_s
    problems: dict[str, str] = {}
    while tasks:
        for name, address in list(tasks.items()):
            problem = _try_to_reach(address)
            if problem is None:
                del tasks[name]
            else:
                problems[name] = problem
        if not tasks:
            break
        if time.monotonic() > deadline:
            missing = ", ".join(
                f"{name} at {address} ({problems[name]})" for name, address in tasks.items()
            )
            raise TrainingError(
                f"Waited {timeout_s:g} s in vain for {missing}. Start every task of the "
                "cluster; python -m tfdist.launch --check says what is wrong with an address."
            )
        time.sleep(_RETRY_S)


@contextmanager
def _answering(address: str) -> Iterator[None]:
    """Listens at an address; whoever connects is let in and shut out again."""
    host, port = split_address(address)
    try:
        family, _, _, _, resolved = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise TfdistError(
            f"This task's address {address} is not resolved ({error.strerror or error}). Check "
            "the name and DNS."
        ) from error
    stop = threading.Event()

    def answer() -> None:
        while not stop.is_set():
            try:
                listener.accept()[0].close()
            except OSError:
                continue  # timed out: look whether to stop

    with listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.settimeout(_RETRY_S)
        try:
            # On every interface, as TensorFlow's server: behind a NAT or a Service, the name
            # by which others know this machine may not be one of its addresses.
            listener.bind(("" if family == socket.AF_INET else "::", resolved[1]))
            listener.listen()
        except OSError as error:
            used = error.errno == errno.EADDRINUSE
            raise TfdistError(
                f"Cannot listen on port {port} of this task's address {address}: "
                f"{'it is in use' if used else error.strerror}. "
                f"{'End what listens on it, or take' if used else 'Take'} another port."
            ) from error
        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()


def _try_to_reach(address: str) -> str | None:
    """Returns None if something answers at an address, else what is wrong."""
    try:
        with socket.create_connection(split_address(address), _CONNECT_TIMEOUT_S):
            return None
    except TimeoutError:
        return "no answer"
    except OSError as error:
        return error.strerror or str(error)
