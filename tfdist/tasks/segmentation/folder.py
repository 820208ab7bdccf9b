"""`folder`: images and masks in directories, paired by name."""

import concurrent.futures
import dataclasses
import functools
import hashlib
import itertools
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from tfdist.data.fingerprint import hash_files
from tfdist.data.graph_errors import make_graph_error
from tfdist.data.listing import Listing, find_split, list_directory, take_part
from tfdist.data.source import SequentialSource, Source
from tfdist.data.tf_data import call_python
from tfdist.errors import TfdistError
from tfdist.tasks.images import tiff
from tfdist.tasks.images.pixels import PixelFormat
from tfdist.tasks.images.reading import (
    ANY_EXTENSIONS,
    OpenedImage,
    find_format,
    find_size,
    open_image,
    read_all,
    resize_image,
)
from tfdist.tasks.segmentation.examples import ImagesAndMasks
from tfdist.tasks.segmentation.label_map import LabelMap, check_label_map
from tfdist.tasks.segmentation.masks import OpenedMask, check_mask, check_size, open_mask
from tfdist.tasks.segmentation.tiles import list_tiles

MASK_EXTENSIONS = (".png", *tiff.EXTENSIONS)

# Images in formats that cannot be read; they are left out together with their partners.
_OTHER_EXTENSIONS = (".jxl", ".avif", ".heic", ".heif", ".jp2", ".pgm", ".ppm")

_MAX_NAMED = 3


def make_folder(
    data_dir: str,
    split: str,
    image_size: tuple[int, int],
    num_classes: int,
    *,
    ignore_label: int | None = None,
    label_map: LabelMap | None = None,
    class_names: tuple[str, ...] | None = None,
    max_examples: int | None = None,
    val_fraction: float = 0.0,
    value_range: Sequence[float] = (),
    tile: int = 0,
    pixels: PixelFormat | None = None,
) -> "FolderSource":
    """Returns a source of the images in DATA_DIR/SPLIT/images and masks in DATA_DIR/SPLIT/masks.

    An image `NAME.jpg` (or jpeg, png, bmp, gif, webp, tif) has the mask `NAME.png` or `NAME.tif`,
    of one channel or a palette, in which a pixel's value is its class. PNG images have 8 or 16
    bits; TIFF images may have any number of channels of any type. All images of a data set are
    alike. PNG and JPEG files are turned upright according to their EXIF orientation, as in
    viewers. Examples are sorted by name. Images are resized bilinearly with anti-aliasing, masks
    to the nearest label.

    Other files and directories are skipped and counted in a warning. If one file of a pair is
    in an image format that cannot be read, such as JPEG 2000, both files are skipped.

    Args:
      data_dir: a directory on any file system of `tf.io.gfile`, such as gs://.
      label_map: maps values in the masks, such as 255, or colors, such as "#ff0000", to
        classes. Values that are not in it stand for themselves; colors must all be in it,
        and the masks may then be RGB.
      val_fraction: the fraction of DATA_DIR/train, or of DATA_DIR itself, that becomes the split
        "val", chosen by a hash of the names; the rest is "train". 0 if each has a directory.
      value_range: the stored values that become 0 and 255 for the model, whatever their type. By
        default, the images of a data set are of one type of integers, whose range is meant.
      tile: the height and the width in pixels of the tiles of the images that are the examples, or
        0 for whole images.
      pixels: what the images have in common; by default, as the first of them.

    Raises:
      TfdistError: a directory is missing or empty; an image has no mask, a mask has no
        image, or two images share a name; the number of class names is wrong; the label map
        names a class that does not exist. Reading the examples also raises it, naming the
        file, if a file cannot be decoded, the sizes of a pair differ or a label is out of
        range.
    """
    _check_classes(num_classes, class_names)
    if label_map:
        check_label_map(label_map, num_classes, ignore_label)
    root = find_split(str(data_dir), split, val_fraction)
    pairs, num_skipped = _list_pairs(str(data_dir), split, root)
    pairs = take_part(pairs, split, val_fraction, name=lambda pair: os.path.basename(pair[0]))
    if max_examples is not None:
        pairs = pairs[:max_examples]
    tiles = tuple(list_tiles(((path, find_size(path)) for path, _ in pairs), tile)) if tile else ()
    if max_examples is not None:
        tiles = tiles[:max_examples]
    return FolderSource(
        num_examples=len(tiles) if tile else len(pairs),
        image_size=(int(image_size[0]), int(image_size[1])),
        num_classes=num_classes,
        class_names=class_names,
        ignore_label=ignore_label,
        num_skipped=num_skipped,
        label_map=dict(label_map or {}),
        pairs=tuple(pairs),
        pixels=pixels or _find_common_format([image for image, _ in pairs], value_range),
        tile=tile,
        tiles=tiles,
    )


def leave_out_bad(source: "FolderSource") -> "FolderSource":
    """Returns a source without the examples that cannot be used; reads every file once.

    Each of these examples is named in a warning, and counted in `num_skipped`.
    """
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        problems = list(pool.map(source.find_problem, range(source.num_examples)))
    for problem in filter(None, problems):
        logging.warning("Left out: %s", problem)
    pairs = tuple(pair for pair, problem in zip(source.pairs, problems, strict=True) if not problem)
    if not pairs:
        raise TfdistError(f"None of the {len(problems)} examples can be used. {problems[0]}")
    return dataclasses.replace(
        source,
        pairs=pairs,
        num_examples=len(pairs),
        num_skipped=source.num_skipped + source.num_examples - len(pairs),
    )


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class FolderSource(ImagesAndMasks, SequentialSource, Source):
    """See `make_folder`.

    Random access (`load`) decodes files in Python, in this process only; `cache_source` turns
    it into a source that is fast and that any worker can read.

    Attributes:
      pairs: (image path, mask path) of every image.
      tiles: the image's number, the first row and the first column of every example; none if the
        examples are the images.
    """

    num_examples: int
    pairs: tuple[tuple[str, str], ...]
    tile: int = 0
    tiles: tuple[tuple[int, ...], ...] = ()
    label_map: LabelMap = dataclasses.field(default_factory=dict)

    def load(self, index: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the example at `index` (int64 scalar), decoded at each call."""
        dtypes = tuple(spec.dtype for spec in self.stored_spec)
        image, mask = call_python(self._read_marked, [index], dtypes)
        image = tf.ensure_shape(image, (*self.image_size, self.pixels.channels))
        mask = tf.ensure_shape(mask, self.image_size)
        return tf.cast(image, tf.float32), tf.cast(mask, tf.int32)

    def read_examples(
        self, *, original_size: bool = False
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields every example in order; tiles, or whole images if the original size is kept."""
        if self.tiles and not original_size:
            yield from self._read_tiles()
            return
        read = functools.partial(self.read_example, original_size=original_size)
        yield from read_all(read, range(len(self.pairs)))

    def read_example(
        self, index: int, *, original_size: bool = False
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns (image [height, width, channels], mask uint8 [height, width]).

        The image is uint8, or float32 where the values are converted.
        """
        with tf.device("CPU:0"):
            if self.tiles and not original_size:
                number, row, column = self.tiles[index]
                return self._cut(number, self._open(number), row, column)
            image, mask = (part.read() for part in self._open(index))
            self._check(index, image, mask)
            return (image, mask) if original_size else resize_example(image, mask, self.image_size)

    def _open(self, number: int) -> tuple[OpenedImage, OpenedMask]:
        image_path, mask_path = self.pairs[number]
        image = open_image(image_path, self.pixels)
        mask = open_mask(mask_path, label_map=self.label_map)
        if self.tiles:
            check_size(mask_path, mask.values.shape, image.values.shape[:2])
        return image, mask

    def _check(self, number: int, image: np.ndarray, mask: np.ndarray) -> None:
        check_mask(
            self.pairs[number][1],
            mask,
            image.shape[:2],
            num_classes=self.num_classes,
            ignore_label=self.ignore_label,
        )

    def _read_tiles(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields the tiles; each image is opened once."""
        for number, tiles in itertools.groupby(self.tiles, key=lambda tile: tile[0]):
            with tf.device("CPU:0"):
                opened = self._open(number)
            for _, row, column in tiles:
                with tf.device("CPU:0"):
                    example = self._cut(number, opened, row, column)
                yield example

    def _cut(
        self, number: int, opened: tuple[OpenedImage, OpenedMask], row: int, column: int
    ) -> tuple[np.ndarray, np.ndarray]:
        area = (slice(row, row + self.tile), slice(column, column + self.tile))
        image, mask = (part.read(area) for part in opened)
        self._check(number, image, mask)
        return resize_example(image, mask, self.image_size)

    def find_problem(self, index: int) -> str | None:
        """Returns why an example cannot be used, naming the file, or None."""
        try:
            self.read_example(index)
        except TfdistError as error:
            return str(error)
        return None

    def make_fingerprint(self) -> dict[str, Any]:
        """Returns a fingerprint of the files' names, sizes and some of their contents."""
        return {
            **self._make_header("folder"),
            "label_map": {str(found): label for found, label in self.label_map.items()},
            **self._describe_values(),
            "files": hash_files([{"image": image, "mask": mask} for image, mask in self.pairs]),
        }

    def get_fingerprint(self) -> str:
        """Returns a hash of the files' names, sizes and modification times, and of the labels."""
        digest = hashlib.sha256()
        for path in (path for pair in self.pairs for path in pair):
            stat = tf.io.gfile.stat(path)
            digest.update(f"{path}\0{stat.length}\0{stat.mtime_nsec}\0".encode())
        labels = f"{self.num_classes} {self.ignore_label} {sorted(self.label_map.items())}"
        values = "".join(f" {key}={value}" for key, value in self._describe_values().items())
        return f"folder {digest.hexdigest()} {labels}{values}"

    def _describe_values(self) -> dict[str, Any]:
        """Returns what is special about the values and the tiles, if anything is."""
        pixels = {} if self.pixels.is_plain else {"pixels": self.pixels.to_json()}
        return {**pixels, **({"tile": self.tile} if self.tile else {})}

    def _read_marked(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        try:
            return self.read_example(int(index))
        except TfdistError as error:
            raise make_graph_error(str(error)) from error


def resize_example(
    image: np.ndarray, mask: np.ndarray, image_size: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray]:
    """Returns an image resized bilinearly with anti-aliasing, and its mask to the nearest label.

    Args:
      image: uint8 or float32 [any height, any width, channels].
      mask: uint8 [the same height, the same width].
    """
    if image.shape[:2] == tuple(image_size):
        return image, mask
    labels = tf.image.resize(mask[..., None], image_size, method="nearest")
    return resize_image(image, image_size), labels[..., 0].numpy()


def _find_common_format(paths: Sequence[str], value_range: Sequence[float]) -> PixelFormat:
    """Returns the format of the first image that can be read."""
    first: TfdistError | None = None
    for path in paths:
        try:
            return find_format(path, value_range)
        except TfdistError as error:
            first = first or error
    assert first is not None
    raise first


def _check_classes(num_classes: int, class_names: tuple[str, ...] | None) -> None:
    if not 2 <= num_classes <= 256:
        raise TfdistError(
            f"Cannot use {num_classes} classes: 8-bit masks have 2 to 256. Set `num_classes`."
        )
    if class_names is not None and len(class_names) != num_classes:
        raise TfdistError(
            f"Cannot name {num_classes} classes with {len(class_names)} names "
            f"({', '.join(class_names)}). Give one name per class."
        )


def _list_pairs(data_dir: str, split: str, root: str) -> tuple[list[tuple[str, str]], int]:
    """Returns the pairs in a split, and how many are left out because of their format."""
    gfile = tf.io.gfile
    if not gfile.isdir(data_dir):
        raise TfdistError(
            f"Cannot read `data_dir={data_dir!r}`: there is no such directory. It must hold "
            "SPLIT/images and SPLIT/masks."
        )
    if not gfile.isdir(root):
        splits = [name for name in _list_names(data_dir) if gfile.isdir(gfile.join(data_dir, name))]
        found = f"its directories are {', '.join(splits)}" if splits else "it has no directory"
        raise TfdistError(
            f"Cannot find the split {split!r} in {data_dir!r}: {found}. It must hold "
            f"{split}/images and {split}/masks."
        )
    image_files = _list_files(gfile.join(root, "images"), ANY_EXTENSIONS)
    mask_files = _list_files(gfile.join(root, "masks"), MASK_EXTENSIONS)
    images, masks = _find_stems(image_files), _find_stems(mask_files)
    lost_masks = masks.keys() & _find_unreadable(image_files) - images.keys()
    lost_images = images.keys() & _find_unreadable(mask_files) - masks.keys()
    images = {stem: path for stem, path in images.items() if stem not in lost_images}
    masks = {stem: path for stem, path in masks.items() if stem not in lost_masks}
    lonely = sorted(images.keys() - masks.keys())
    if lonely:
        raise TfdistError(
            f"Cannot pair {_name_some([images[stem] for stem in lonely])}: no mask of that name "
            f"in {mask_files.directory!r}. Add NAME.png for every image, or remove the image."
        )
    lonely = sorted(masks.keys() - images.keys())
    if lonely:
        raise TfdistError(
            f"Cannot pair {_name_some([masks[stem] for stem in lonely])}: no image of that name "
            f"in {image_files.directory!r}. Add the image, or remove the mask."
        )
    if not images:
        raise TfdistError(
            f"Cannot use any image in {root!r}: {image_files.directory!r} and "
            f"{mask_files.directory!r} have no readable pair. Convert images to JPEG or PNG and "
            "masks to PNG."
        )
    image_files.warn_of_skipped(more=_name_lost("mask", len(lost_masks)))
    mask_files.warn_of_skipped(more=_name_lost("image", len(lost_images)))
    return [(images[stem], masks[stem]) for stem in sorted(images)], len(lost_masks | lost_images)


def _list_files(directory: str, extensions: tuple[str, ...]) -> Listing:
    if not tf.io.gfile.isdir(directory):
        raise TfdistError(
            f"Cannot find the directory {directory!r}. Put images in SPLIT/images and masks in "
            "SPLIT/masks."
        )
    listing = list_directory(directory, extensions)
    if not listing.names:
        found = f", only {listing.describe_skipped()}" if listing.skipped else ""
        raise TfdistError(
            f"Cannot find any {', '.join(extensions)} file in {directory!r}{found}. Put the data "
            "there, or name another `data_dir`."
        )
    return listing


def _find_stems(listing: Listing) -> dict[str, str]:
    """Returns the path of each file that can be read, by its name without the extension."""
    paths: dict[str, str] = {}
    for name in listing.names:
        stem = name.rpartition(".")[0]
        path = tf.io.gfile.join(listing.directory, name)
        if stem in paths:
            raise TfdistError(
                f"Cannot tell apart {paths[stem]!r} and {path!r}: they have the same name, and "
                "examples are paired by name. Remove one."
            )
        paths[stem] = path
    return paths


def _find_unreadable(listing: Listing) -> set[str]:
    """Returns the names, without extension, of the skipped files that are images."""
    pictures = (*ANY_EXTENSIONS, *_OTHER_EXTENSIONS)
    return {name.rpartition(".")[0] for name in listing.skipped if name.lower().endswith(pictures)}


def _name_lost(what: str, count: int) -> str:
    return f"; left out with them: {count} {what}{'' if count == 1 else 's'}" if count else ""


def _list_names(directory: str) -> list[str]:
    # Object stores end the name of a directory with a slash.
    return sorted(name.rstrip("/") for name in tf.io.gfile.listdir(directory))


def _name_some(paths: list[str]) -> str:
    named = ", ".join(map(repr, paths[:_MAX_NAMED]))
    more = len(paths) - _MAX_NAMED
    return f"{named} and {more} more" if more > 0 else named
