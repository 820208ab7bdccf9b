"""The files of a directory that can be read, and those that are skipped aloud."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import tensorflow as tf
from absl import logging


@dataclass(frozen=True)
class Listing:
    """What a directory holds; hidden files are left out.

    Attributes:
      directory: its path.
      names: of the files with one of the wanted extensions, sorted.
      skipped: of everything else, sorted; a directory's ends with a slash.
    """

    directory: str
    names: tuple[str, ...]
    skipped: tuple[str, ...]

    def describe_skipped(self) -> str:
        """Returns how many of each kind are skipped, such as "2 .tif, 1 directory"."""
        return _describe_kinds(self.skipped)

    def warn_of_skipped(self, *, more: str = "") -> None:
        """Says in one line what is skipped, if anything is.

        Args:
          more: added to the line, such as what is left out because of it.
        """
        if self.skipped:
            count = len(self.skipped)
            text = f"Skipped {count} {'file' if count == 1 else 'files'} in {self.directory!r}"
            logging.warning("%s: %s%s.", text, self.describe_skipped(), more)


def list_directory(directory: str, extensions: Sequence[str]) -> Listing:
    """Returns the files of a directory on any file system of `tf.io.gfile`.

    Args:
      directory: its path.
      extensions: the wanted ones, in lower case and with the dot; a name's case is ignored.
    """
    names, skipped = [], []
    for name in sorted(tf.io.gfile.listdir(directory)):
        if name.startswith("."):
            continue
        if name.lower().endswith(tuple(extensions)):
            names.append(name)
        # An object store ends a directory's name with a slash.
        elif name.endswith("/") or tf.io.gfile.isdir(tf.io.gfile.join(directory, name)):
            skipped.append(f"{name.rstrip('/')}/")
        else:
            skipped.append(name)
    return Listing(directory, tuple(names), tuple(skipped))


def _describe_kinds(names: Iterable[str]) -> str:
    kinds = Counter(map(_find_kind, names))
    if (count := kinds.pop("directory", 0)) > 1:
        kinds["directories"] = count
    elif count:
        kinds["directory"] = count
    return ", ".join(f"{count} {kind}" for kind, count in kinds.items())


def _find_kind(name: str) -> str:
    if name.endswith("/"):
        return "directory"
    stem, dot, extension = name.rpartition(".")
    return f".{extension.lower()}" if stem and dot else "without an extension"
