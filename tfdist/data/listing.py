"""The files of a directory that can be read, and those that are skipped aloud."""

import hashlib
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


def find_split(data_dir: str, split: str, val_fraction: float) -> str:
    """Returns the directory that holds a split, or of which it is a part.

    Args:
      data_dir: holds a directory for each split; or, with a fraction, what else `train` holds.
      split: "train", "val" or another one.
      val_fraction: the share of the training examples that validation takes; 0 for none.

    Raises:
      TfdistError: there is a directory for validation beside the fraction.
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
    """Returns the items that belong to "train" or "val", by a hash of their names.

    Which part one belongs to does not change when others are added or removed.

    Args:
      items: of both parts.
      split: which of them; any other has all items.
      val_fraction: the share of validation; 0 for no parts.
      name: the name of an item.

    Raises:
      TfdistError: a part has none.
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
