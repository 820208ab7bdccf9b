"""Reads images: JPEG, PNG, BMP, GIF and WebP, and TIFF for data sets that may have other values."""

import concurrent.futures
import contextlib
import dataclasses
import os
import struct
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np
import tensorflow as tf

from tfdist.data.listing import check_regular
from tfdist.errors import TfdistError, shorten_error
from tfdist.tasks.images import bitmaps, tiff
from tfdist.tasks.images.orientation import apply_orientation, find_orientation
from tfdist.tasks.images.pixels import PixelError, PixelFormat, make_format

Item = TypeVar("Item")
Result = TypeVar("Result")

IMAGE_EXTENSIONS = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp")
IMAGE_FORMATS = "JPEG, PNG, BMP, GIF or WebP"

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
PNG_BITS_OFFSET = 24  # of the byte that holds the bits per channel
ANY_EXTENSIONS = (*IMAGE_EXTENSIONS, *tiff.EXTENSIONS)
DEEP_IMAGE = "it has 16 bits per channel, whose range a file does not say: scale it to 8 bits"


class ImageFormatError(ValueError):
    """Raised for bytes that are not a readable image; the message says why."""


def decode_image(data: bytes) -> np.ndarray:
    """Returns the image in a file's bytes, turned upright according to its EXIF orientation.

    The format is recognized by the contents, not by the file's name. An alpha channel is dropped.
    Only the first frame of an animation is decoded.

    Returns:
      uint8 [height, width, 3].

    Raises:
      ImageFormatError: the bytes cannot be decoded, or have more than 8 bits per channel.
    """
    if _is_deep(data):
        # TensorFlow would keep the upper 8 bits, which are 0 in a picture of 0 to 255.
        raise ImageFormatError(DEEP_IMAGE)
    if data.startswith(bitmaps.SIGNATURE):
        try:
            return bitmaps.decode_bmp(data)
        except bitmaps.BitmapFormatError as error:
            raise ImageFormatError(str(error)) from error
    is_webp = data[:4] == b"RIFF" and data[8:12] == b"WEBP"
    try:
        # TensorFlow decodes a WebP file only to the number of channels that the file has.
        image = tf.io.decode_image(
            data, channels=0 if is_webp else 3, expand_animations=False
        ).numpy()
    except tf.errors.InvalidArgumentError as error:
        raise ImageFormatError("it is truncated, damaged or in another format") from error
    return apply_orientation(image[..., :3], find_orientation(data))


def read_bytes(path: str) -> bytes:
    """Returns a file's bytes; an error names the file."""
    check_regular(path)
    try:
        return tf.io.read_file(path).numpy()
    except tf.errors.OpError as error:
        raise TfdistError(f"Cannot read {path!r}: {shorten_error(error)}.") from error


def read_image(path: str, pixels: PixelFormat | None = None) -> np.ndarray:
    """Returns the image in a file, turned upright according to its EXIF orientation.

    Args:
      pixels: the values of the data set's images; by default, only images of 8 bits are read, which
        have three channels.

    Returns:
      uint8 [height, width, channels], or float32 if the format converts the values.

    Raises:
      TfdistError: the file cannot be read or decoded, or has other values.
    """
    if pixels is not None:
        return open_image(path, pixels).read()
    data = read_bytes(path)
    with _naming(path, len(data)):
        return decode_image(data)


@dataclasses.dataclass(frozen=True)
class OpenedImage:
    """An opened image, which can be read in parts.

    Attributes:
      values: [height, width, channels], as stored, perhaps mapped from the file.
      to_pixels: returns the pixels that some of the values stand for.
    """

    path: str
    pixels: PixelFormat
    values: np.ndarray
    to_pixels: Callable[[np.ndarray], np.ndarray]

    def read(self, area: tuple[slice, ...] = ()) -> np.ndarray:
        """Returns a part of the image, or all of it, as `read_image` does."""
        with _naming(self.path):
            return self.pixels.convert(self.to_pixels(self.values[area]))


def open_image(path: str, pixels: PixelFormat) -> OpenedImage:
    """Opens an image, which is decoded here unless its file can be mapped."""
    if tiff.is_tiff(path):
        found = open_tiff(path)
        return OpenedImage(path, pixels, found.values, found.to_pixels)
    data = read_bytes(path)
    with _naming(path, len(data)):
        return OpenedImage(path, pixels, _decode_any(data), lambda values: values)


def open_tiff(path: str) -> tiff.TiffImage:
    """Opens a TIFF file, if the package for it is there."""
    tiff.check_installed(path)
    check_regular(path)
    with _naming(path):
        return tiff.open_tiff(read_bytes(path) if "://" in path else path)


def find_format(path: str, value_range: Sequence[float] = ()) -> PixelFormat:
    """Returns the format of a data set's images, of which one tells the type and the channels.

    Raises:
      TfdistError: it cannot be read, or its type has no range.
    """
    if tiff.is_tiff(path):
        found = open_tiff(path)
        part = found.to_pixels(found.values[:1, :1])
        dtype, channels = part.dtype.name, part.shape[-1]
    else:
        is_deep = _is_deep(read_bytes(path)[: PNG_BITS_OFFSET + 1])
        dtype, channels = "uint16" if is_deep else "uint8", 3
    with _naming(path):
        return make_format(dtype, channels, value_range)


def find_size(path: str) -> tuple[int, int]:
    """Returns the (height, width) of an image, of which as little as possible is decoded."""
    if tiff.is_tiff(path):
        height, width = open_tiff(path).values.shape[:2]
        return height, width
    data = read_bytes(path)
    if data.startswith(PNG_SIGNATURE) and len(data) > PNG_BITS_OFFSET:
        width, height = struct.unpack(">II", data[16:24])
    else:
        with _naming(path, len(data)):
            height, width = decode_image(data).shape[:2]
        return height, width
    return (width, height) if find_orientation(data) >= 5 else (height, width)


def read_ahead(
    read: Callable[[Item], Result], items: Iterable[Item], *, threads: int
) -> Generator[concurrent.futures.Future[Result], None, None]:
    """Yields a future for each item, in order, while several threads read the next ones."""
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        pending: deque[concurrent.futures.Future[Result]] = deque()
        try:
            for item in items:
                pending.append(pool.submit(read, item))
                if len(pending) > 4 * threads:
                    yield pending.popleft()
            while pending:
                yield pending.popleft()
        finally:
            for future in pending:
                future.cancel()


def read_all(read: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """Yields what `read` returns for each item, in order, computed by as many threads as cores."""
    reading = read_ahead(read, items, threads=os.cpu_count() or 1)
    with contextlib.closing(reading) as futures:  # at once if an example cannot be used
        for future in futures:
            yield future.result()


@contextlib.contextmanager
def _naming(path: str, size: int | None = None) -> Iterator[None]:
    """Names the file in the errors of its format."""
    try:
        yield
    except (ImageFormatError, PixelError, tiff.TiffFormatError) as error:
        if isinstance(error, PixelError):
            raise TfdistError(f"Cannot use the image {path!r}: {error}.") from error
        length = "" if size is None else f" ({size} bytes)"
        raise TfdistError(
            f"Cannot decode the image {path!r}{length}: {error}. Replace it with a "
            f"{IMAGE_FORMATS} file."
        ) from error


def _is_deep(data: bytes) -> bool:
    """Returns whether the bytes are those of a PNG file with 16 bits per channel."""
    return data.startswith(PNG_SIGNATURE) and data[PNG_BITS_OFFSET : PNG_BITS_OFFSET + 1] > b"\x08"


def _decode_any(data: bytes) -> np.ndarray:
    """Returns the image in the bytes of a file that is no TIFF; 16 bits are kept."""
    if not _is_deep(data):
        return decode_image(data)
    try:
        image = tf.io.decode_png(data, dtype=tf.uint16).numpy()
    except tf.errors.InvalidArgumentError as error:
        raise ImageFormatError("it is truncated or damaged") from error
    has_alpha = image.shape[-1] in (2, 4)
    return apply_orientation(image[..., :-1] if has_alpha else image, find_orientation(data))


def resize_image(image: np.ndarray, image_size: tuple[int, int]) -> np.ndarray:
    """Returns an image, uint8 or float32 [height, width, channels], in [0, 255], resized.

    It is resized bilinearly with anti-aliasing, and keeps its type.
    """
    resized = tf.image.resize(image, image_size, method="bilinear", antialias=True)
    if image.dtype != np.uint8:
        return tf.clip_by_value(resized, 0.0, 255.0).numpy()
    return tf.cast(tf.round(tf.clip_by_value(resized, 0.0, 255.0)), tf.uint8).numpy()
