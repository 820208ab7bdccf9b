"""Checks which names of this server a request may use.

A page of a stranger can give its own name this server's address, and then its scripts may read what
the server answers (DNS rebinding). Their requests have the stranger's name in the `Host` header.
"""

import fnmatch
import ipaddress
import re
from collections.abc import Callable, Sequence

from tfdist.errors import TfdistError

_LOCAL_NAMES = ("localhost", "*.localhost", "127.0.0.1", "::1")


def make_host_check(
    host: str, address: str, allowed: Sequence[str]
) -> Callable[[str, str | None], bool]:
    """Returns a function that tells whether a request's `Host` is a name of this server.

    Without `allowed`, a server that listens on all addresses accepts every name, because it cannot
    know by which names it is reached.

    Args:
      host: where the server listens, as the user has written it.

    Returns:
      A function of the header's value, and of the address that the request has reached, if any.

    >>> is_own = make_host_check("127.0.0.1", "127.0.0.1", ["*.example.com"])
    >>> [is_own(name, None) for name in ("localhost:8501", "a.example.com", "evil.example", "a b")]
    [True, True, False, False]
    """
    names = [name.lower() for name in (*_LOCAL_NAMES, host, address, *allowed)]
    is_open = ipaddress.ip_address(address.partition("%")[0]).is_unspecified and not allowed

    def is_own(value: str, reached: str | None) -> bool:
        name = find_name(value)
        # Probes of Kubernetes use the address of the pod.
        own = (*names, reached) if reached else names
        return is_open or any(fnmatch.fnmatchcase(name, pattern) for pattern in own)

    return is_own


def find_name(value: str) -> str:
    """Returns the name in a `Host` header, without the port; empty if it has none.

    >>> find_name("Model.example.com:8501"), find_name("[::1]:80"), find_name("a b")
    ('model.example.com', '::1', '')
    """
    match = re.fullmatch(r"(?:\[([0-9a-f:.]+)\]|([\w.-]+))(?::\d*)?", value.lower())
    return (match[1] or match[2]).removesuffix(".") if match else ""


def check_names(names: Sequence[str]) -> None:
    """Checks that names for `make_host_check` are names, rather than URLs."""
    for name in names:
        if not re.fullmatch(r"[\w.*:-]+", name) or re.search(r"^[^:]*:[^:]*$", name):
            raise TfdistError(
                f"`allowed_hosts={','.join(names)}`: {name!r} is no name of a host. Write a name "
                "without scheme and port, such as model.example.com, or a pattern, such as "
                "*.example.com."
            )
