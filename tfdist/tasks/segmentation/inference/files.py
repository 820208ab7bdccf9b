"""The files that a prediction reads and writes, on any file system of `tf.io.gfile`."""

import csv
import io
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.data.listing import list_directory, list_names
from tfdist.errors import TfdistError
from tfdist.reading import parse_object
from tfdist.records.durable_files import read_file, write_atomically
from tfdist.tasks.finished_files import describe_write_failure, writing_output
from tfdist.tasks.images.reading import ANY_EXTENSIONS
from tfdist.tasks.segmentation.folder import MASK_EXTENSIONS
from tfdist.tasks.segmentation.masks import encode_mask, read_mask
from tfdist.tasks.segmentation.pictures import make_overlay


def list_images(directory_or_pattern: str) -> dict[str, str]:
    """Returns the images to predict: name without directory and extension -> path, sorted.

    Args:
      directory_or_pattern: a directory, whose JPEG, PNG, BMP, GIF, WebP and TIFF files are listed
        while all others are skipped and counted in a warning; or a file; or a pattern of
        `tf.io.gfile.glob`, for which every matching file is listed.

    Raises:
      TfdistError: there is no image, or two have the same name.
    """
    gfile = tf.io.gfile
    if gfile.isdir(directory_or_pattern):
        listing = list_directory(directory_or_pattern, ANY_EXTENSIONS)
        problem = f"it has no {', '.join(ANY_EXTENSIONS)} file"
        if listing.skipped:
            problem += f", only {listing.describe_skipped()}"
        paths = [gfile.join(directory_or_pattern, name) for name in listing.names]
        if paths:
            listing.warn_of_skipped()
    elif gfile.exists(directory_or_pattern):  # its name may look like a pattern
        paths = [directory_or_pattern]
    else:
        paths = [path for path in _glob(directory_or_pattern) if not gfile.isdir(path)]
        problem = "no file matches, and no directory has that name"
    if not paths:
        raise TfdistError(
            f"Cannot find images in `images={directory_or_pattern}`: {problem}. Name another."
        )
    images: dict[str, str] = {}
    for path in sorted(paths):
        stem = os.path.splitext(os.path.basename(path))[0]
        if stem in images:
            raise TfdistError(
                f"Cannot tell apart {images[stem]!r} and {path!r}: their predictions would have "
                "the same name. Predict them separately, into two directories."
            )
        images[stem] = path
    return images


def find_masks(images: Mapping[str, str], directory: str) -> dict[str, str]:
    """Returns image -> path of DIRECTORY/NAME.png, or .tif or .tiff, each of which must exist."""
    if not tf.io.gfile.isdir(directory):
        raise TfdistError(
            f"Cannot read `masks={directory}`: there is no such directory. It must hold NAME.png "
            "for every image."
        )
    there = set(list_names(directory))
    found = {stem: [f"{stem}{end}" for end in MASK_EXTENSIONS] for stem in images}
    masks = {stem: next((n for n in names if n in there), "") for stem, names in found.items()}
    lonely = [path for stem, path in images.items() if not masks[stem]]
    if lonely:
        more = f" and {len(lonely) - 1} more" if len(lonely) > 1 else ""
        raise TfdistError(
            f"Cannot find the truth of {lonely[0]!r}{more} in `masks={directory}`: it must hold "
            "NAME.png for every image. Leave out `masks` to predict without metrics."
        )
    return {stem: tf.io.gfile.join(directory, name) for stem, name in masks.items()}


@dataclass(frozen=True)
class PredictionDirectory:
    """The output of a prediction: masks, overlays and tables. Every file is written atomically.

    Attributes:
      palette: uint8 [classes, 3].
    """

    path: str
    palette: np.ndarray
    class_names: Sequence[str]

    def open(self, command: Mapping[str, Any]) -> None:
        """Claims the directory for a command, or checks that the same command has claimed it.

        Args:
          command: what determines the predictions, as flag -> JSON value.

        Raises:
          TfdistError: the directory holds another command's predictions, or cannot be written to.
        """
        record = f"{self.path}/predictions.json"
        try:
            if tf.io.gfile.exists(record):
                before = parse_object(read_file(record))
                if before is None:
                    raise TfdistError(
                        f"`output={self.path}` holds predictions of an unknown command: its "
                        "predictions.json is incomplete or was changed. Give another `output`."
                    )
                changed = [name for name in command if before.get(name) != command[name]]
                if changed:
                    raise TfdistError(
                        f"`output={self.path}` holds predictions of another command: "
                        f"{changed[0]} is {command[changed[0]]} (there: "
                        f"{before.get(changed[0])}). Give another `output`."
                    )
            for directory in ("masks", "overlays"):
                tf.io.gfile.makedirs(f"{self.path}/{directory}")
            write_atomically(record, json.dumps(command, indent=1))
        except (OSError, tf.errors.OpError) as error:
            raise TfdistError(describe_write_failure(self.path, error)) from error

    def holds(self, name: str) -> bool:
        """Returns whether an image's mask and overlay exist."""
        return all(map(tf.io.gfile.exists, self._list_paths(name)))

    def write(self, name: str, image: np.ndarray, mask: np.ndarray) -> None:
        """Writes an image [height, width, channels], in [0, 255], and its mask, uint8."""
        mask_path, overlay_path = self._list_paths(name)
        self._write(mask_path, encode_mask(mask, self.palette))
        overlay = make_overlay(image, mask, self.palette, class_names=self.class_names)
        self._write(overlay_path, overlay)

    def read_mask(self, name: str) -> np.ndarray:
        """Returns a mask that `write` wrote: uint8 [height, width]."""
        return read_mask(self._list_paths(name)[0])

    def write_table(self, name: str, rows: Sequence[Sequence[Any]]) -> None:
        """Writes rows as CSV."""
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(rows)
        self._write(f"{self.path}/{name}", text.getvalue())

    def write_json(self, name: str, value: object) -> None:
        """Writes a value as JSON."""
        self._write(f"{self.path}/{name}", json.dumps(value, indent=1))

    def _list_paths(self, name: str) -> tuple[str, str]:
        return f"{self.path}/masks/{name}.png", f"{self.path}/overlays/{name}.png"

    def _write(self, path: str, content: str | bytes) -> None:
        with writing_output(self.path):
            write_atomically(path, content)


def _glob(pattern: str) -> list[str]:
    try:
        return tf.io.gfile.glob(pattern)
    except tf.errors.OpError:  # a directory in the pattern does not exist
        return []
