"""Refuses requests whose end another program may see elsewhere.

A proxy in front of the server that sees another end takes the rest for a request of the next
client (request smuggling). h11 refuses much of that: two lengths, unknown or repeated transfer
codings, spaces before colons. RFC 9112 allows servers to read what is refused here, and recommends
to refuse it: sections 2.2 (lines), 5.2 (folded lines) and 6.1 (transfer codings).
"""

import re
from typing import Any

import h11

# A line that ends without CR, or one that continues the line before.
_BAD_LINE = re.compile(rb"(?<!\r)\n|\n[ \t]")


class StrictConnection(h11.Connection):
    """The server's side of a connection, whose requests can be read in one way only."""

    def next_event(self) -> Any:
        """Returns the next event, as `h11.Connection` does.

        Raises:
          h11.RemoteProtocolError: the request is invalid.
        """
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
