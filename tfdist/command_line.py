"""What all command lines have in common: arguments that are text."""

import unicodedata
from collections.abc import Iterable

from tfdist.errors import TfdistError

# Control characters, line and paragraph separators, and bytes that are no UTF-8.
_NOT_TEXT = frozenset({"Cc", "Zl", "Zp", "Cs"})


def check_arguments(arguments: Iterable[str]) -> None:
    """Refuses arguments that are more than one line of text, before they get into files.

    Raises:
      TfdistError: an argument holds a control character, such as a line break, or bytes that are
        not UTF-8.

    >>> check_arguments(["--run_dir=a run", "--name=größer"])
    """
    for argument in arguments:
        for character in argument:
            if unicodedata.category(character) in _NOT_TEXT:
                raise TfdistError(
                    f"Cannot take the argument {argument!r}: it holds {character!r}, which is no "
                    "printable text. Remove that character."
                )
