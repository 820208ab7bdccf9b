"""Opens and closes the port of a server, and accepts connections as far as descriptors last."""

import asyncio
import contextlib
import ctypes
import errno
import socket
import struct
import sys
import time
from collections.abc import Callable
from typing import Any

from tfdist.errors import TfdistError

BACKLOG = 1024
# asyncio goes on after an accept that fails for lack of descriptors, for as many times as its
# backlog, and reports each: https://github.com/python/cpython/issues/151615
ACCEPTS_AT_ONCE = 1

_LACKS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_REPORT_EVERY_S = 60

# Linux's <asm/socket.h>, <linux/filter.h> and <linux/tcp.h>. A filter of a listening socket sees a
# packet from its TCP header on.
_SO_ATTACH_FILTER = 26
_FLAGS_OFFSET, _SYN, _ACK = 13, 0x02, 0x10
_DROP_NEW_CONNECTIONS = [
    (0x30, 0, 0, _FLAGS_OFFSET),  # load the byte of the flags
    (0x54, 0, 0, _SYN | _ACK),  # and
    (0x15, 0, 1, _SYN),  # go on if equal, else leave out one
    (0x06, 0, 0, 0),  # drop
    (0x06, 0, 0, 0xFFFFFFFF),  # accept
]


def listen(host: str, port: int) -> socket.socket:
    """Returns a socket that listens at a free address of this machine."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise TfdistError(
            f"Cannot listen on `host={host}`, `port={port}`: {error.strerror}. Give another "
            "address or port."
        ) from error
    # asyncio sets it only for sockets that name their protocol. Without it, the end of an answer
    # waits until the client has acknowledged its beginning, for 40 ms.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def make_lack_handler(
    report: Callable[[str], None],
) -> Callable[[asyncio.AbstractEventLoop, dict[str, Any]], None]:
    """Returns an event loop's exception handler that reports a lack of descriptors once a minute.

    asyncio tries again to accept after a second, so a server that has run out of descriptors would
    fill its log.
    """
    last = -float(_REPORT_EVERY_S)

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        nonlocal last
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in _LACKS:
            loop.default_exception_handler(context)
        elif time.monotonic() - last >= _REPORT_EVERY_S:
            last = time.monotonic()
            report(
                f"tfdist: cannot accept a connection: {error.strerror}. New connections wait until "
                "others end. Raise the limit (ulimit -n), or lower --max_connections."
            )

    return handle


def drop_new_connections(listener: socket.socket) -> None:
    """Lets no new connection begin; those that wait to be accepted stay.

    Closing a socket resets the connections that wait to be accepted, so nothing may arrive between
    the last accept and the close. Where the system has no socket filters, nothing changes.
    """
    if sys.platform != "linux":
        return
    program = b"".join(struct.pack("HBBI", *line) for line in _DROP_NEW_CONNECTIONS)
    buffer = ctypes.create_string_buffer(program, len(program))
    value = struct.pack("HP", len(_DROP_NEW_CONNECTIONS), ctypes.addressof(buffer))
    with contextlib.suppress(OSError):
        listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, value)
