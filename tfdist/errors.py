"""Errors with one-line messages for the user."""

import difflib
import errno
import os
import re
import unicodedata
from collections.abc import Iterable
from typing import ClassVar

_MAX_LISTED = 20


class TfdistError(ValueError):
    """Bad input. The message says in one line what failed, what was found and what to do.

    Commands print it without a traceback.
    """

    exit_status: ClassVar[int] = 2


def make_unknown_name_error(
    kind: str, name: str, valid: Iterable[str], *, where_all: str = ""
) -> TfdistError:
    """Returns the error for an unknown name, which lists the valid or the closest names.

    Args:
      kind: what the name stands for, such as a flag.
      valid: the valid names; if there are many, only the closest are listed.
      where_all: a sentence that says where to find all names, if there are many.

    >>> str(make_unknown_name_error("--strategy", "miror", ["one_device", "mirrored"]))
    "Unknown --strategy 'miror'. Valid: mirrored, one_device."
    """
    names = sorted(valid)
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.4)
    if len(names) > _MAX_LISTED:
        meant = f" Did you mean {', '.join(close)}?" if close else ""
        return TfdistError(f"Unknown {kind} {name!r}.{meant} {where_all}".rstrip())
    ordered = close + [other for other in names if other not in close]
    return TfdistError(f"Unknown {kind} {name!r}. Valid: {', '.join(ordered)}.")


# Control characters, separators of lines and paragraphs, and bytes that are not UTF-8.
NOT_TEXT = frozenset({"Cc", "Zl", "Zp", "Cs"})
_DIRECTIONS = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def make_printable(text: str, *, limit: int = 10_000) -> str:
    r"""Returns a text from elsewhere as a line that no terminal obeys: control characters escaped.

    Args:
      limit: the most characters; of a longer text, the rest is left out.

    >>> make_printable("a\x1b[2Jb größer")
    'a\\x1b[2Jb größer'
    """
    shown = text if len(text) <= limit else f"{text[:limit]}..."
    return "".join(
        character.encode("unicode_escape").decode()
        if character in _DIRECTIONS or unicodedata.category(character) in NOT_TEXT
        else character
        for character in shown
    )


_FILE_ERROR = re.compile(r"^(?P<path>[^\n]+?); (?P<problem>[^;\n]+)$")
_PROBLEMS = frozenset(os.strerror(number) for number in errno.errorcode)


def describe_file_error(error: BaseException) -> str | None:
    """Returns one line about an error of TensorFlow's file systems, None for another error.

    >>> describe_file_error(RuntimeError("/disk/a.json; No space left on device"))
    'Cannot use /disk/a.json: No space left on device. Free space there, or choose another place.'
    """
    match = _FILE_ERROR.match(getattr(error, "message", "") or str(error))
    if match is None or match["problem"] not in _PROBLEMS:
        return None
    is_full = match["problem"] in (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT))
    advice = "Free space there, or choose another place." if is_full else "Check the path."
    return f"Cannot use {match['path']}: {match['problem']}. {advice}"


# Keras colors the messages of its layers, and TensorFlow names the operation.
_NOISE = re.compile(r"\x1b\[[0-9;]*m|\{\{function_node [^}]*\}\} *| *\[Op:\w+\](?: name: ?\S*)?")
# TensorFlow lists the errors of a graph.
_ROOT = re.compile(r"root error\(s\) found\.\n\s*\(0\) (?:[A-Z_]+: +)?(.*)")
# In errors from a graph, Keras puts these around the line that says what is wrong.
_OF_GRAPHS = ("Graph execution error", "Detected at node", "Original stack trace")


def shorten_error(error: BaseException) -> str:
    """Returns the line of an error that says what is wrong, or its class if it has no message.

    >>> shorten_error(ValueError("no such thing\\n  at this place"))
    'no such thing'
    >>> shorten_error(ValueError("Graph execution error:\\n  File a.py\\nNot so.\\n\\t [[a]]"))
    'Not so.'
    >>> shorten_error(ValueError("2 root error(s) found.\\n  (0) INVALID: No.\\n  (1) Late."))
    'No.'
    >>> shorten_error(ValueError("{{function_node __wrapped__SaveV2}} a; Full [Op:SaveV2] name: "))
    'a; Full'
    >>> shorten_error(KeyError())
    'KeyError'
    >>> shorten_error(KeyError("name"))
    "KeyError: 'name'"
    """
    text = getattr(error, "message", "") or str(error)  # TensorFlow's errors have a message
    if text and isinstance(error, KeyError):
        return f"KeyError: {text}"
    text = _NOISE.sub("", text)
    root = _ROOT.search(text)
    if root is not None:
        return root[1]
    lines = [line for line in text.splitlines() if line.strip()]
    if lines and lines[0].startswith(_OF_GRAPHS[0]):
        plain = [line for line in lines if not line.startswith((" ", "\t", *_OF_GRAPHS))]
        lines = plain[-1:] or lines
    return lines[0] if lines else type(error).__name__


class TrainingError(TfdistError, RuntimeError):
    """Training cannot continue."""

    exit_status: ClassVar[int] = 1
