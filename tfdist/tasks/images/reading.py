"""Reads images: JPEG, PNG, BMP, GIF and WebP."""

import numpy as np
import tensorflow as tf

from tfdist.data.listing import check_regular
from tfdist.errors import TfdistError, shorten_error
from tfdist.tasks.images import bitmaps
from tfdist.tasks.images.orientation import apply_orientation, find_orientation

IMAGE_EXTENSIONS = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp")
IMAGE_FORMATS = "JPEG, PNG, BMP, GIF or WebP"

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
PNG_BITS_OFFSET = 24  # of the byte that holds the bits per channel
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
    if data.startswith(PNG_SIGNATURE) and data[PNG_BITS_OFFSET : PNG_BITS_OFFSET + 1] > b"\x08":
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
    """Returns a file's bytes.

    Raises:
      TfdistError: the file cannot be read.
    """
    check_regular(path)
    try:
        return tf.io.read_file(path).numpy()
    except tf.errors.OpError as error:
        raise TfdistError(f"Cannot read {path!r}: {shorten_error(error)}.") from error


def read_image(path: str) -> np.ndarray:
    """Returns the image in a file, turned upright according to its EXIF orientation.

    Returns:
      uint8 [height, width, 3].

    Raises:
      TfdistError: the file cannot be read or decoded.
    """
    data = read_bytes(path)
    try:
        return decode_image(data)
    except ImageFormatError as error:
        raise TfdistError(
            f"Cannot decode the image {path!r} ({len(data)} bytes): {error}. Replace it with a "
            f"{IMAGE_FORMATS} file."
        ) from error


def resize_image(image: np.ndarray, image_size: tuple[int, int]) -> np.ndarray:
    """Returns an image, uint8 [height, width, 3], resized bilinearly with anti-aliasing."""
    resized = tf.image.resize(image, image_size, method="bilinear", antialias=True)
    return tf.cast(tf.round(tf.clip_by_value(resized, 0.0, 255.0)), tf.uint8).numpy()
