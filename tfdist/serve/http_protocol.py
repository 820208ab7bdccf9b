"""Limits the time of a connection, which uvicorn does not do, and reads requests strictly.

uvicorn 0.54 limits only the time between two requests, and every received byte resets that limit:
https://github.com/Kludex/uvicorn/issues/157
"""

import asyncio
import http
import json
import re
from collections.abc import Callable
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

# How long connections and requests that were sent before a stop may be on their way.
LAST_LOOK_S = 0.5

_MAX_HEAD_BYTES = 2**16
# A line that ends without CR, or one that continues the line before.
_BAD_LINE = re.compile(rb"(?<!\r)\n|\n[ \t]")
# A target that names the host, too, as to a proxy.
_ABSOLUTE = re.compile(rb"https?://([^/?#]*)(.*)", re.IGNORECASE)


def make_protocol(
    *, receive_timeout_s: float, answer_timeout_s: float, max_connections: int
) -> type[asyncio.Protocol]:
    """Returns a class of protocols for `uvicorn.Config`.

    Args:
      receive_timeout_s: seconds from the first byte of a request, or from the connection, until
        the request is complete. Then it is refused with status 408.
      answer_timeout_s: seconds from there until the client has read the answer.
      max_connections: connections above this number are cut at once.
    """
    limits = {
        "receive_timeout_s": receive_timeout_s,
        "answer_timeout_s": answer_timeout_s,
        "max_connections": max_connections,
    }
    return type("TimedProtocol", (_TimedProtocol,), limits)


class _TimedProtocol(H11Protocol):
    """A connection whose requests must arrive in time."""

    receive_timeout_s: float
    answer_timeout_s: float
    max_connections: int
    conn: "StrictConnection"
    _timer: asyncio.TimerHandle | None = None
    _is_receiving = True
    _has_ended = False  # The client sends no more, but may still read.

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.conn = StrictConnection(h11.SERVER, _MAX_HEAD_BYTES)

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._limit(self.receive_timeout_s, self._refuse_slow)
        if len(self.connections) > self.max_connections:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        if not self._is_receiving and self.cycle.response_complete:
            self._is_receiving = True
            self._limit(self.receive_timeout_s, self._refuse_slow)
        super().data_received(data)
        if self._is_receiving and self._is_answering():
            self._is_receiving = False
            self._limit(self.answer_timeout_s, self.transport.abort)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Returns whether the connection stays open: until the last answer."""
        self._has_ended = True
        return self._is_answering()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._has_ended and not self._is_answering():
            self.transport.close()

    def _is_answering(self) -> bool:
        """Returns whether there is a complete request without a complete answer."""
        cycle = self.cycle
        return cycle is not None and not (cycle.response_complete or cycle.more_body)

    def send_400_response(self, msg: str) -> None:
        self._refuse(self.conn.refusal, msg)

    def _refuse_slow(self) -> None:
        if self.conn.trailing_data[0] or self.conn.their_state is not h11.IDLE:
            self._refuse(408, "The request took too long to arrive.")
        else:
            self.transport.abort()

    def _refuse(self, status: int, text: str) -> None:
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):  # the answer has not begun
            content = b"" if self.conn.is_head else json.dumps({"error": text}).encode()
            headers = [("content-type", "application/json"), ("connection", "close")]
            reason = http.HTTPStatus(status).phrase.encode()
            for event in (
                h11.Response(status_code=status, headers=headers, reason=reason),
                h11.Data(data=content),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event))
            if self.cycle is not None:  # its answer would be a second one
                self.cycle.disconnected = True
        self.transport.close()
        self._limit(self.receive_timeout_s, self.transport.abort)  # if the client reads nothing

    def shutdown(self) -> None:
        # The client may have sent a request that is not read yet; closing would lose it.
        self.loop.call_later(LAST_LOOK_S, self._shut_down)

    def _shut_down(self) -> None:
        if not self.transport.is_closing():
            super().shutdown()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def _limit(self, seconds: float, end: Callable[[], None]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_later(seconds, end)


class StrictConnection(h11.Connection):
    """The server's side of a connection, whose requests can be read in one way only.

    A proxy in front of the server that sees another end takes the rest for a request of the next
    client (request smuggling). h11 refuses much of that: two lengths, unknown or repeated transfer
    codings, spaces before colons. RFC 9112 allows servers to read what is refused here, and
    recommends to refuse it: sections 2.2 (lines), 5.2 (folded lines) and 6.1 (transfer codings).
    """

    refusal = 400  # the status for a request that cannot be read
    is_head = False  # whether the request wants no body

    def next_event(self) -> Any:
        """Returns the next event, as `h11.Connection` does, of a valid request."""
        before, _ = self.trailing_data
        try:
            event = super().next_event()
            if isinstance(event, h11.Request):
                self.is_head = event.method == b"HEAD"
            if isinstance(event, (h11.Request, h11.EndOfMessage)):
                after, _ = self.trailing_data
                if _BAD_LINE.search(before[: len(before) - len(after)]):
                    raise h11.RemoteProtocolError("a line ends without CR LF or is continued")
            return _check_request(event) if isinstance(event, h11.Request) else event
        except h11.RemoteProtocolError as error:
            self.refusal = error.error_status_hint
            raise

    def send(self, event: Any) -> Any:
        """Returns the bytes of an event, as `h11.Connection` does.

        Who waits for leave to send a body may leave it out when the answer comes first, so the
        next request could be taken for the body.
        """
        if isinstance(event, h11.Response) and self.they_are_waiting_for_100_continue:
            event = _replace(event, headers=[*event.headers, ("connection", "close")])
        return super().send(event)


def _check_request(request: h11.Request) -> h11.Request:
    """Returns a request whose target is a path, and whose host is that of its target."""
    names = {name for name, _ in request.headers}
    is_old = request.http_version < b"1.1"
    if b"transfer-encoding" in names and (b"content-length" in names or is_old):
        raise h11.RemoteProtocolError("the length of the body is ambiguous")
    if request.http_version >= b"2":
        raise h11.RemoteProtocolError("not HTTP/1", error_status_hint=505)
    absolute = _ABSOLUTE.fullmatch(request.target)
    if absolute is None:
        return request
    host, path = absolute.groups()
    others = [(name, value) for name, value in request.headers if name != b"host"]
    if not path.startswith(b"/"):
        path = b"*" if request.method == b"OPTIONS" and not path else b"/" + path
    return _replace(request, headers=[(b"host", host), *others], target=path)


def _replace(event: Any, **changes: Any) -> Any:
    """Returns a request or a response of h11 with other values of some attributes."""
    names = ("method", "target", "status_code", "reason", "headers", "http_version")
    values = {name: getattr(event, name) for name in names if hasattr(event, name)}
    return type(event)(**{**values, **changes})
