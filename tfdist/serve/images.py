"""Checks encoded images before they get into a batch."""

import io
import warnings
from collections.abc import Iterable

import tensorflow as tf
from PIL import Image

from tfdist.errors import shorten_error
from tfdist.serve.servable import RequestError

IMAGE_INPUT = "image_bytes"
_FORMATS = ("JPEG", "PNG", "BMP", "GIF")  # what `tf.io.decode_image` reads


def check_images(values: Iterable[bytes], *, name: str, max_pixels: int, decode: bool) -> None:
    """Refuses images that are too large, by their headers, and those that cannot be decoded.

    Args:
      values: files; other files than images are allowed unless the name is `image_bytes`.
      max_pixels: the number of pixels of all images together, at most.
      decode: whether to decode them. A batch fails as a whole, so it must hold only images that
        can be decoded.

    Raises:
      RequestError: an image is too large, animated or broken.
    """
    pixels = 0
    for index, data in enumerate(values):
        size = _read_size(data, f"{name}[{index}]")
        if size is None:
            if name == IMAGE_INPUT:
                raise RequestError(f"{name}[{index}] is not a JPEG, PNG, BMP or GIF image.")
            continue
        pixels += size[0] * size[1]
        if pixels > max_pixels:
            raise RequestError(
                f"{name}[{index}] is an image of {size[0]}x{size[1]} pixels: a request may have "
                f"{max_pixels} pixels. Send smaller or fewer images.",
                status=413,
            )
        if not decode:
            continue
        try:
            with tf.device("CPU:0"):
                tf.io.decode_image(data, channels=3, expand_animations=False)
        except tf.errors.OpError as error:
            text = shorten_error(error)
            raise RequestError(f"{name}[{index}] cannot be decoded: {text}") from error


def _read_size(data: bytes, name: str) -> tuple[int, int] | None:
    """Returns width and height; None if the data is no image."""
    try:
        with warnings.catch_warnings(), Image.open(io.BytesIO(data), formats=_FORMATS) as image:
            warnings.simplefilter("ignore")
            if getattr(image, "is_animated", False):
                raise RequestError(f"{name} is an animation. Send one image.")
            return image.size
    except Image.DecompressionBombError as error:
        raise RequestError(f"{name} is too large: {error}", status=413) from error
    except (OSError, ValueError, SyntaxError, EOFError):
        return None
