"""Messages between the tasks of a cluster, before TensorFlow connects them.

Anyone who can reach a task's port can write to it. So lines have a limited length, connections a
limited time and number, and no connection waits for another one. Both sides prove that they know
the cluster's token, which is never sent: each chooses a nonce, and signs its messages with a key
made of the token and both nonces. Without a token, the key is made of the nonces alone.

    task:   tfdist NONCE
    server: tfdist NONCE SIGNATURE
    then, in both directions:  SIGNATURE JSON
"""

import contextlib
import hmac
import json
import re
import secrets
import selectors
import socket
import sys
import time
from collections.abc import Mapping
from typing import Any

from tfdist.cluster.config import split_address
from tfdist.errors import make_printable

CONNECT_TIMEOUT_S = 2.0
# The launcher treats a task whose threads all sleep as hanging, so tasks wait in short intervals.
RETRY_S = 0.1

_MAX_LINE = 1 << 16
_HANDSHAKE_S = 5.0  # from the connection to the first signed message
_MAX_UNKNOWN = 64  # connections that have not sent one yet
_MAX_WARNINGS = 5
_HELLO = re.compile(rb"tfdist ([0-9a-f]{32})")
_ANSWER = re.compile(rb"tfdist ([0-9a-f]{32}) ([0-9a-f]{64})")
_SIGNED = re.compile(rb"([0-9a-f]{64}) (.*)", re.DOTALL)


class DistrustError(OSError):
    """The other side of a connection does not know the token, or is no task of tfdist at all."""


class Peer:
    """A task's connection to the one that listens.

    Args:
      token: the cluster's token; empty for none.
      until: when to give up, in the time of `time.monotonic`.

    Raises:
      DistrustError: something else answers, or a task with another token.
      OSError: there is no connection.
    """

    def __init__(self, address: str, token: str, *, until: float):
        self._socket = socket.create_connection(split_address(address), CONNECT_TIMEOUT_S)
        self._buffer = b""
        try:
            nonce = secrets.token_hex(16)
            self._socket.sendall(f"tfdist {nonce}\n".encode())
            line = self._read_line(min(until, time.monotonic() + _HANDSHAKE_S))
            answer = _ANSWER.fullmatch(line or b"")
            if answer is None:
                raise DistrustError("it answers, but does not accept workers yet")
            self._signatures = _Signatures(token, nonce, answer[1].decode(), "task")
            if not self._signatures.check_hello(answer[2]):
                raise DistrustError("it answers, but has another TFDIST_TOKEN than this task")
        except BaseException:
            self._socket.close()
            raise

    def __enter__(self) -> "Peer":
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def send(self, message: Mapping[str, Any]) -> None:
        """Sends a message."""
        self._socket.sendall(self._signatures.sign(message))

    def receive(self, *, until: float) -> dict[str, Any] | None:
        """Returns the next message; None if there is none in time, or if the other side is gone."""
        line = self._read_line(until)
        return None if line is None else self._signatures.read(line)

    def _read_line(self, until: float) -> bytes | None:
        self._socket.settimeout(RETRY_S)
        while b"\n" not in self._buffer:
            if time.monotonic() > until or len(self._buffer) > _MAX_LINE:
                return None
            try:
                data = self._socket.recv(4096)
            except TimeoutError:
                continue
            if not data:
                return None
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line


class Visitor:
    """A connection to a task that listens."""

    def __init__(self, connection: socket.socket, host: str):
        self.is_open = True
        self.is_known = False  # it has sent a signed message
        self.signatures: _Signatures | None = None
        self.host = host
        self.socket = connection
        self.buffer = b""
        self.until = time.monotonic() + _HANDSHAKE_S

    def send(self, message: Mapping[str, Any]) -> None:
        """Sends a message, unless the other side is gone."""
        assert self.signatures is not None
        with contextlib.suppress(OSError):
            self.socket.sendall(self.signatures.sign(message))


class Visitors:
    """The connections to a task that listens, and what they send.

    Args:
      listener: the listening socket; its owner closes it.
      most: how many messages a connection may send.

    Attributes:
      distrusted: the hosts from which something came that has another token.
    """

    def __init__(self, listener: socket.socket, token: str, *, most: int = 1):
        self.distrusted: dict[str, None] = {}
        self._token = token
        self._most = most
        self._open: dict[Visitor, None] = {}
        self._warned: set[str] = set()
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    def __enter__(self) -> "Visitors":
        return self

    def __exit__(self, *_: object) -> None:
        for visitor in list(self._open):
            self.close(visitor)
        self._selector.close()

    def poll(self, timeout_s: float = RETRY_S) -> list[tuple[Visitor, dict[str, Any]]]:
        """Waits until something happens, or for the time-out; returns the messages that came."""
        found = []
        for key, _ in self._selector.select(timeout_s):
            visitor = key.data
            if visitor is None:
                self._accept()
            elif visitor.is_open:
                found += [(visitor, message) for message in self._read(visitor)]
        now = time.monotonic()
        for visitor in [v for v in self._open if not v.is_known and now > v.until]:
            self.close(visitor)
        return [(visitor, message) for visitor, message in found if visitor.is_open]

    def close(self, visitor: Visitor) -> None:
        """Closes a connection."""
        if visitor.is_open:
            visitor.is_open = False
            del self._open[visitor]
            self._selector.unregister(visitor.socket)
            visitor.socket.close()

    def refuse(self, visitor: Visitor, what: str) -> None:
        """Closes a connection over which nonsense came, and says so, once for each host."""
        self.close(visitor)
        if visitor.host in self._warned or len(self._warned) >= _MAX_WARNINGS:
            return
        self._warned.add(visitor.host)
        print(
            f"tfdist: closed a connection from {make_printable(visitor.host)}, which {what}. Keep "
            "the ports of a cluster behind a firewall.",
            file=sys.stderr,
            flush=True,
        )

    def _accept(self) -> None:
        try:
            connection, address = self._listener.accept()
        except OSError:  # it is gone already, or this process has too many files open
            time.sleep(RETRY_S / 10)
            return
        connection.setblocking(False)
        visitor = Visitor(connection, str(address[0]))
        unknown = [other for other in self._open if not other.is_known]
        if len(unknown) >= _MAX_UNKNOWN:
            self.close(unknown[0])
        self._open[visitor] = None
        self._selector.register(connection, selectors.EVENT_READ, visitor)

    def _read(self, visitor: Visitor) -> list[dict[str, Any]]:
        """Reads what has come; returns the messages in it."""
        try:
            data = visitor.socket.recv(_MAX_LINE)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data:
            if visitor.signatures is not None and not visitor.is_known:
                self.distrusted[visitor.host] = None  # it did not like the signature
            self.close(visitor)
            return []
        *lines, visitor.buffer = (visitor.buffer + data).split(b"\n")
        if len(visitor.buffer) > _MAX_LINE:
            self.refuse(visitor, "sent a line without an end")
            return []
        found = []
        for line in lines:
            message = self._take(visitor, line) if visitor.is_open else None
            if message is not None:
                found.append(message)
        return found

    def _take(self, visitor: Visitor, line: bytes) -> dict[str, Any] | None:
        if visitor.signatures is None:
            hello = _HELLO.fullmatch(line)
            if hello is None:
                self.refuse(visitor, "is no task of this version of tfdist")
                return None
            nonce = secrets.token_hex(16)
            visitor.signatures = _Signatures(self._token, hello[1].decode(), nonce, "server")
            with contextlib.suppress(OSError):
                visitor.socket.sendall(f"tfdist {nonce} {visitor.signatures.hello}\n".encode())
            return None
        message = visitor.signatures.read(line)
        if message is None or visitor.signatures.count_read > self._most:
            self.distrusted[visitor.host] = None
            self.refuse(visitor, "has another TFDIST_TOKEN, or is no task of this cluster")
            return None
        visitor.is_known = True
        return message


class _Signatures:
    """Signs and checks the messages of one connection."""

    def __init__(self, token: str, task_nonce: str, server_nonce: str, side: str):
        nonces = f"{task_nonce} {server_nonce}".encode()
        self._key = hmac.digest(token.encode(errors="surrogateescape"), nonces, "sha256")
        self._own, self._other = side, {"task": "server", "server": "task"}[side]
        self._count_signed = 0
        self.count_read = 0
        self.hello = self._make("hello", 0, b"")

    def check_hello(self, signature: bytes) -> bool:
        return hmac.compare_digest(signature, self.hello.encode())

    def sign(self, message: Mapping[str, Any]) -> bytes:
        self._count_signed += 1
        text = json.dumps(message).encode()
        return f"{self._make(self._own, self._count_signed, text)} ".encode() + text + b"\n"

    def read(self, line: bytes) -> dict[str, Any] | None:
        """Returns the message in a line, or None if the other side has not signed it."""
        self.count_read += 1
        signed = _SIGNED.fullmatch(line)
        if signed is None:
            return None
        wanted = self._make(self._other, self.count_read, signed[2]).encode()
        if not hmac.compare_digest(signed[1], wanted):
            return None
        try:
            message = json.loads(signed[2])
        except (ValueError, RecursionError):
            return None
        return message if isinstance(message, dict) else None

    def _make(self, sender: str, number: int, text: bytes) -> str:
        return hmac.digest(self._key, f"{sender} {number} ".encode() + text, "sha256").hex()
