"""Lists the files of a directory that can be read, and warns of those that are skipped."""

import hashlib
import os
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import tensorflow as tf
from absl import logging

from tfdist.errors import TfdistError

Item = TypeVar("Item")


@dataclass(frozen=True)
class Listing:
    """The contents of a directory, without hidden files.

    Attributes:
      names: the names of the files with one of the wanted extensions, sorted.
      skipped: all other names, sorted; those of directories end with a slash.
    """

    directory: str
    names: tuple[str, ...]
    skipped: tuple[str, ...]

    def describe_skipped(self) -> str:
        """Returns how many files of each kind are skipped, such as "2 .tif, 1 directory"."""
        return _describe_kinds(self.skipped)

    def warn_of_skipped(self, *, more: str = "") -> None:
        """Logs one warning that says what is skipped, if anything is, and then `more`."""
        if self.skipped:
            count = len(self.skipped)
            text = f"Skipped {count} {'file' if count == 1 else 'files'} in {self.directory!r}"
            logging.warning("%s: %s%s.", text, self.describe_skipped(), more)


def list_directory(directory: str, extensions: Sequence[str]) -> Listing:
    """Returns the files of a directory on any file system of `tf.io.gfile`.

    Args:
      extensions: the wanted extensions, in lower case with the dot; case is ignored in names.

    Raises:
      TfdistError: a name is not UTF-8.
    """
    names, skipped = [], []
    for name in list_names(directory):
        if name.startswith("."):
            continue
        if name.lower().endswith(tuple(extensions)):
            names.append(name)
        # An object store ends the name of a directory with a slash.
        elif name.endswith("/") or tf.io.gfile.isdir(tf.io.gfile.join(directory, name)):
            skipped.append(f"{name.rstrip('/')}/")
        else:
            skipped.append(name)
    return Listing(directory, tuple(names), tuple(skipped))


def check_regular(path: str) -> None:
    """Refuses what is no regular file: reading it may wait for ever, or fill the memory."""
    if "://" in path:
        return
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError) as error:
        raise TfdistError(
            f"Cannot read {path!r}: {getattr(error, 'strerror', None) or error}. Remove it, or "
            "restore the file."
        ) from error
    if not stat.S_ISREG(mode):
        kind = "a directory" if stat.S_ISDIR(mode) else "a FIFO, a socket or a device"
        raise TfdistError(f"Cannot read {path!r}: it is {kind}, not a file. Remove it.")


def list_names(directory: str) -> list[str]:
    """Returns the sorted names in a directory, which must be UTF-8."""
    if "://" in directory:
        return sorted(tf.io.gfile.listdir(directory))
    names = os.listdir(directory)
    for name in names:
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise TfdistError(
                f"Cannot read the file {os.fsencode(name)!r} in {directory!r}: its name is not "
                "UTF-8. Rename it."
            ) from error
    return sorted(names)


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


def find_split(data_dir: str, split: str, val_fraction: float) -> str:
    """Returns the directory that holds a split, or from which the split is taken.

    Args:
      val_fraction: the fraction of the training examples to use for validation; 0 for none.

    Raises:
      TfdistError: a fraction is given although there is a directory for validation.
    """
    gfile = tf.io.gfile
    if not val_fraction or split not in ("train", "val"):
        return gfile.join(data_dir, split)
    if gfile.isdir(gfile.join(data_dir, "val")):
        raise TfdistError(
            f"`data_dir={data_dir}` has a directory val. Leave out `val_fraction={val_fraction:g}`."
        )
    train = gfile.join(data_dir, "train")
    return train if gfile.isdir(train) else data_dir


def take_part(
    items: Sequence[Item], split: str, val_fraction: float, *, name: Callable[[Item], str]
) -> list[Item]:
    """Returns the items that belong to "train" or "val" according to a hash of their names.

    The part to which an item belongs does not change when other items are added or removed.

    Args:
      val_fraction: the fraction of the items that belong to "val"; 0 selects all items.
    """
    if not val_fraction or split not in ("train", "val"):
        return list(items)

    def is_for_validation(item: Item) -> bool:
        digest = hashlib.sha256(name(item).encode()).digest()
        return int.from_bytes(digest[:8], "big") < val_fraction * 2**64

    part = [item for item in items if is_for_validation(item) == (split == "val")]
    if not part:
        raise TfdistError(
            f"`val_fraction={val_fraction:g}` of {len(items)} examples leaves none for {split}. "
            "Give another fraction."
        )
    return part
