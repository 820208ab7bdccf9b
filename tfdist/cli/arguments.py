"""Functions for all command lines: checks and searches of arguments, and printing of help."""

import re
import sys
import unicodedata
from collections.abc import Callable, Iterable, Sequence

from tfdist.cli.output import discard
from tfdist.errors import NOT_TEXT, TfdistError


def check_arguments(arguments: Iterable[str]) -> None:
    """Refuses arguments that are not one line of text, before they get into files.

    Raises:
      TfdistError: an argument holds a control character, such as a line break, or bytes that are
        not UTF-8.

    >>> check_arguments(["--run_dir=a run", "--name=größer"])
    """
    for argument in arguments:
        for character in argument:
            if unicodedata.category(character) in NOT_TEXT:
                raise TfdistError(
                    f"Cannot use the argument {argument!r}: it contains {character!r}, which is "
                    "not printable text. Remove that character."
                )


def find_flag(arguments: Sequence[str], name: str) -> str | None:
    """Returns a flag's value, or None if it is not given; as in absl, the last one counts.

    >>> find_flag(["--epochs=3", "--epochs", "4"], "epochs")
    '4'
    """
    found = None
    for position, argument in enumerate(arguments):
        if argument == "--":
            break
        match = re.match(rf"--?{name}(?:=(.*))?$", argument, re.DOTALL)
        if match and match[1] is not None:
            found = match[1]
        elif match and position + 1 < len(arguments):
            found = arguments[position + 1]
    return found


def is_set(arguments: Sequence[str], name: str) -> bool:
    """Returns whether a boolean flag is true; as in absl, the last one counts.

    >>> is_set(["--tta"], "tta"), is_set(["--tta", "--notta"], "tta")
    (True, False)
    """
    found = False
    for argument in arguments:
        if argument == "--":
            break
        match = re.match(rf"--?(no)?{name}(?:=(.*))?$", argument, re.DOTALL)
        if match:
            found = not match[1] and (match[2] or "true").lower() in ("true", "t", "1")
    return found


def split_at_dashes(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the arguments before the first `--`, and those after it.

    >>> split_at_dashes(["--json", "--", "--epochs=3"])
    (['--json'], ['--epochs=3'])
    """
    place = [*arguments, "--"].index("--")
    return list(arguments[:place]), list(arguments[place + 1 :])


def count_flags(arguments: Sequence[str], is_alone: Callable[[str], bool]) -> int:
    """Returns how many arguments are flags and their values, before a program and its arguments.

    Args:
      is_alone: returns whether a flag that is written without `=` has no value.

    >>> count_flags(["--flip", "--epochs", "3", "a.py", "--lr=2"], lambda flag: flag == "--flip")
    3
    """
    place = 0
    while place < len(arguments) and arguments[place].startswith("-") and arguments[place] != "--":
        place += 1 if "=" in arguments[place] or is_alone(arguments[place]) else 2
    return min(place, len(arguments))


def print_help(text: str) -> None:
    """Prints a text. The reader may close the pipe early, as in `--help | head`."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        discard(sys.stdout)
