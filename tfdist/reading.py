"""Reads files that others have written: users, other programs, earlier runs that were cut off."""

import json
import os
import stat
from typing import Any

_MOST_BYTES = 2**20
# Of a run's record of its options, all other members are groups of values by name.
_NO_GROUPS = ("commit", "devices")


def read_text(path: str, *, max_bytes: int = _MOST_BYTES) -> str:
    """Returns the text of a small file that a user has named.

    Raises:
      OSError: it cannot be read, is too large, or is no regular file: opening a FIFO would wait.
      UnicodeDecodeError: it is not UTF-8.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError("it is no regular file")
    with open(path, "rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(f"it is larger than {max_bytes} bytes")
    return content.decode()


def parse_object(content: bytes | str | None) -> dict[str, Any] | None:
    """Returns the object that a JSON text holds; None if it is damaged or holds something else.

    >>> [parse_object(text) for text in ('{"step": 3}', '{"step"', "[3]", None)]
    [{'step': 3}, None, None, None]
    """
    try:
        found = json.loads(content or b"null")
    except (ValueError, RecursionError):  # not UTF-8, cut short, or nested without end
        return None
    return found if isinstance(found, dict) else None


def parse_options(content: bytes | str | None) -> dict[str, Any] | None:
    """Returns the options that a run has recorded, as group -> option -> value; None if damaged.

    Groups that are null are left out.

    >>> parse_options('{"task": {"task": "segmentation"}, "cluster": null}')
    {'task': {'task': 'segmentation'}}
    >>> parse_options('{"task": "segmentation"}') is None
    True
    """
    found = parse_object(content)
    if found is None:
        return None
    groups = {name: value for name, value in found.items() if value is not None}
    is_whole = all(isinstance(v, dict) for name, v in groups.items() if name not in _NO_GROUPS)
    return groups if is_whole else None
