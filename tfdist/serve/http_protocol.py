"""Limits the time of a connection, which uvicorn does not do, and reads requests strictly.

uvicorn 0.54 limits only the time between two requests, and every received byte resets that limit:
https://github.com/Kludex/uvicorn/issues/157
"""

import asyncio
import re
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

# How long connections and requests that were sent before a stop may be on their way.
LAST_LOOK_S = 0.5

_MAX_HEAD_BYTES = 2**16
# A line that ends without CR, or one that continues the line before.
_BAD_LINE = re.compile(rb"(?<!\r)\n|\n[ \t]")


def make_protocol(
    *, receive_timeout_s: float, answer_timeout_s: float, max_connections: int
) -> type[asyncio.Protocol]:
    """Returns a class of protocols for `uvicorn.Config`.

    Args:
      receive_timeout_s: seconds from the first byte of a request, or from the connection, until
        the request is complete. Then the connection is cut.
      answer_timeout_s: seconds from there until the client has read the answer.
      max_connections: connections above this number are cut at once.
    """

    class TimedProtocol(H11Protocol):
        _timer: asyncio.TimerHandle | None = None
        _is_receiving = True

        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__(*args, **kwargs)
            self.conn = StrictConnection(h11.SERVER, _MAX_HEAD_BYTES)

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._limit(receive_timeout_s)
            if len(self.connections) > max_connections:
                transport.abort()

        def data_received(self, data: bytes) -> None:
            if not self._is_receiving and self.cycle.response_complete:
                self._is_receiving = True
                self._limit(receive_timeout_s)
            super().data_received(data)
            is_answered = self.cycle is None or self.cycle.response_complete
            if self._is_receiving and not is_answered and not self.cycle.more_body:
                self._is_receiving = False
                self._limit(answer_timeout_s)

        def send_400_response(self, msg: str) -> None:
            if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
                super().send_400_response(msg)
            else:  # The answer to the first part of the request has begun.
                self.transport.close()

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

        def _limit(self, seconds: float) -> None:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self.loop.call_later(seconds, self.transport.abort)

    return TimedProtocol


class StrictConnection(h11.Connection):
    """The server's side of a connection, whose requests can be read in one way only.

    A proxy in front of the server that sees another end takes the rest for a request of the next
    client (request smuggling). h11 refuses much of that: two lengths, unknown or repeated transfer
    codings, spaces before colons. RFC 9112 allows servers to read what is refused here, and
    recommends to refuse it: sections 2.2 (lines), 5.2 (folded lines) and 6.1 (transfer codings).
    """

    def next_event(self) -> Any:
        """Returns the next event, as `h11.Connection` does, of a valid request."""
        before, _ = self.trailing_data
        event = super().next_event()
        if isinstance(event, (h11.Request, h11.EndOfMessage)):
            after, _ = self.trailing_data
            if _BAD_LINE.search(before[: len(before) - len(after)]):
                raise h11.RemoteProtocolError("a line ends without CR LF or is continued")
        if isinstance(event, h11.Request):
            names = {name for name, _ in event.headers}
            is_old = event.http_version < b"1.1"
            if b"transfer-encoding" in names and (b"content-length" in names or is_old):
                raise h11.RemoteProtocolError("the length of the body is ambiguous")
        return event
