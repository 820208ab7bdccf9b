"""The errors a user can mend: one line, exit status 2."""

import difflib
from collections.abc import Iterable

_MAX_LISTED = 20


class TfdistError(ValueError):
    """Bad input, said in one line: what failed, what was found, what to do.

    Commands print it without a traceback and exit with status 2.
    """


def make_unknown_name_error(
    kind: str, name: str, valid: Iterable[str], *, where_all: str = ""
) -> TfdistError:
    """Returns the error for an unknown name: the valid ones, or of many the closest.

    Args:
      kind: of the name.
      name: what was given.
      valid: the valid ones.
      where_all: of many, a sentence that says where all are listed.

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


# What comes before and after the line that says what is wrong, where Keras runs a graph.
_OF_GRAPHS = ("Graph execution error", "Detected at node", "Original stack trace")


def shorten_error(error: BaseException) -> str:
    """Returns the line in which an error says what is wrong, or its class where it says nothing.

    >>> shorten_error(ValueError("no such thing\\n  at this place"))
    'no such thing'
    >>> shorten_error(ValueError("Graph execution error:\\n  File a.py\\nNot so.\\n\\t [[a]]"))
    'Not so.'
    >>> shorten_error(KeyError())
    'KeyError'
    """
    text = getattr(error, "message", "") or str(error)  # TensorFlow's errors have a message
    lines = [line for line in text.splitlines() if line.strip()]
    if lines and lines[0].startswith(_OF_GRAPHS[0]):
        plain = [line for line in lines if not line.startswith((" ", "\t", *_OF_GRAPHS))]
        lines = plain[-1:] or lines
    return lines[0] if lines else type(error).__name__


class TrainingError(RuntimeError):
    """Training cannot go on, said in one line; exit status 1."""
