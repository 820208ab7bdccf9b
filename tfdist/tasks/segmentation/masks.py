"""Reads, checks and writes label masks: PNG, including palettes, and TIFF."""

import contextlib
import dataclasses
import struct
import zlib
from collections.abc import Callable, Iterator

import numpy as np
import tensorflow as tf

from tfdist.errors import TfdistError
from tfdist.tasks.images import tiff
from tfdist.tasks.images.orientation import apply_orientation, find_orientation
from tfdist.tasks.images.reading import open_tiff, read_bytes
from tfdist.tasks.segmentation.label_map import (
    LabelMap,
    UnknownColorError,
    is_of_colors,
    map_colors,
    map_values,
)

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_GRAY, _PALETTE = 0, 3
_WITH_ALPHA = (4, 6)
_COLOR_NAMES = {2: "an RGB PNG", 4: "a gray PNG with alpha", 6: "an RGB PNG with alpha"}


class MaskFormatError(ValueError):
    """Raised for bytes that are not a readable mask; the message says why."""


class UnknownValueError(ValueError):
    """Raised for a value that can be no class; the message is the value."""


def decode_mask(data: bytes, *, label_map: LabelMap | None = None) -> np.ndarray:
    """Returns the labels in a PNG file's bytes: uint8 [height, width].

    A one-channel PNG stores labels as gray levels, a palette PNG as indices. TensorFlow
    turns indices into colors, so the header is rewritten to declare them gray levels. With
    a label map of colors, a PNG of any kind stores labels as colors.

    Args:
      label_map: the classes that values or colors stand for, or None if values are classes.

    Raises:
      MaskFormatError: not a PNG, truncated, transparent, or more than one channel.
      UnknownValueError: a value of 16 bits is above 255 and not in the label map.
      UnknownColorError: a color is not in the label map.
    """
    if not data.startswith(_SIGNATURE) or data[12:16] != b"IHDR" or len(data) < 33:
        raise MaskFormatError("it is not a PNG file")
    bits, color = data[24], data[25]
    if label_map and is_of_colors(label_map):
        return map_colors(_decode_colors(data, bits, has_alpha=color in _WITH_ALPHA), label_map)
    if color not in (_GRAY, _PALETTE):
        raise MaskFormatError(f"it is {_COLOR_NAMES.get(color, 'a PNG of an unknown kind')}")
    if bits > 8:
        return _to_labels(_decode_png(data, 1, tf.uint16)[:, :, 0], label_map)
    if color == _PALETTE:
        data = _call_palette_gray(data)
    # TensorFlow stretches values of fewer than 8 bits to 0..255.
    labels = _decode_png(data, 1)[:, :, 0] // np.uint8(255 // (2**bits - 1))
    return map_values(labels, label_map) if label_map else labels


def encode_mask(labels: np.ndarray, palette: np.ndarray) -> bytes:
    """Returns labels, uint8 [height, width], as a palette PNG, which `decode_mask` reads back."""
    data = tf.io.encode_png(labels[:, :, None]).numpy()
    # Gray levels and indices of 8 bits are stored alike; only the header differs.
    header = bytearray(data[16:29])
    header[9] = _PALETTE
    colors = np.ascontiguousarray(palette, np.uint8).tobytes()
    return (
        _SIGNATURE + _make_chunk(b"IHDR", bytes(header)) + _make_chunk(b"PLTE", colors) + data[33:]
    )


def _decode_colors(data: bytes, bits: int, *, has_alpha: bool) -> np.ndarray:
    """Returns a PNG file's colors, uint8 [height, width, 3]."""
    if bits > 8:
        raise MaskFormatError(f"it has {bits} bits per channel")
    pixels = _decode_png(data, 4 if has_alpha else 3)
    if has_alpha and pixels[:, :, 3].min() < 255:
        raise MaskFormatError("it is transparent in places")
    return pixels[:, :, :3]


def _decode_png(data: bytes, channels: int, dtype: tf.DType = tf.uint8) -> np.ndarray:
    try:
        return tf.io.decode_png(data, channels=channels, dtype=dtype).numpy()
    except tf.errors.InvalidArgumentError as error:
        raise MaskFormatError("it is truncated or damaged") from error


def _make_chunk(kind: bytes, content: bytes) -> bytes:
    crc = struct.pack(">I", zlib.crc32(kind + content))
    return struct.pack(">I", len(content)) + kind + content + crc


def _call_palette_gray(data: bytes) -> bytes:
    header = bytearray(data[16:29])
    header[9] = _GRAY
    chunks = [_SIGNATURE, _make_chunk(b"IHDR", bytes(header))]
    start = 33
    while start + 8 <= len(data):
        (length,) = struct.unpack(">I", data[start : start + 4])
        stop = start + 12 + length
        if data[start + 4 : start + 8] in (b"IDAT", b"IEND"):
            chunks.append(data[start:stop])
        start = stop
    return b"".join(chunks)


def check_mask(
    path: str,
    mask: np.ndarray,
    image_size: tuple[int, ...],
    *,
    num_classes: int,
    ignore_label: int | None,
) -> None:
    """Checks that a mask has the size of its image and only valid labels.

    Args:
      mask: uint8 [height, width].
      ignore_label: one more label that is allowed, or None.

    Raises:
      TfdistError: the sizes differ, or a label is out of range.
    """
    check_size(path, mask.shape, image_size)
    labels = np.flatnonzero(np.bincount(mask.ravel(), minlength=256))
    wrong = [int(v) for v in labels if v >= num_classes and v != ignore_label]
    if wrong:
        ignored = "" if ignore_label is None else f" or {ignore_label} (ignored)"
        raise TfdistError(
            f"Cannot use {path!r}: it holds the value {wrong[0]}, but classes are 0 to "
            f"{num_classes - 1}{ignored}. Map it to a class, as in "
            f"`label_map={_propose_label_map(labels, wrong, num_classes)}`; or train "
            "with `num_classes` if it is a class, or `ignore_label` if its pixels should not count."
        )


def check_size(path: str, mask_size: tuple[int, ...], image_size: tuple[int, ...]) -> None:
    """Checks that a mask has the (height, width) of its image."""
    if mask_size != tuple(image_size):
        cure = "Make them the same size."
        if mask_size == tuple(image_size)[::-1]:
            cure = (
                "If the image has an EXIF orientation, remove it from the file or rotate the mask "
                "to match; otherwise make them the same size."
            )
        raise TfdistError(
            f"Cannot use {path!r}: the mask is {_name_size(mask_size)} and its image is "
            f"{_name_size(image_size)}. {cure}"
        )


def read_mask(path: str, *, label_map: LabelMap | None = None) -> np.ndarray:
    """Returns the labels in a PNG or TIFF file: uint8 [height, width].

    A PNG is turned upright according to its EXIF orientation, if it has one.

    Raises:
      TfdistError: the file cannot be read or decoded, or a color is not in the label map.
    """
    return open_mask(path, label_map=label_map).read()


@dataclasses.dataclass(frozen=True)
class OpenedMask:
    """An opened mask, which can be read in parts.

    Attributes:
      values: [height, width], as stored, perhaps mapped from the file.
      to_labels: returns the labels that some of the values stand for.
    """

    path: str
    values: np.ndarray
    to_labels: Callable[[np.ndarray], np.ndarray]

    def read(self, area: tuple[slice, ...] = ()) -> np.ndarray:
        """Returns the labels of a part, or of all: uint8 [height, width]."""
        with _naming(self.path):
            return self.to_labels(self.values[area])


def open_mask(path: str, *, label_map: LabelMap | None = None) -> OpenedMask:
    """Opens a mask, which is decoded here unless it is a TIFF file that can be mapped."""
    if tiff.is_tiff(path):
        found = open_tiff(path)
        with _naming(path):
            return OpenedMask(path, _get_indices(found), lambda v: _to_labels(v, label_map))
    data = read_bytes(path)
    with _naming(path, len(data)):
        labels = decode_mask(data, label_map=label_map)
    return OpenedMask(path, apply_orientation(labels, find_orientation(data)), lambda v: v)


@contextlib.contextmanager
def _naming(path: str, size: int | None = None) -> Iterator[None]:
    """Names the file in the errors of its format."""
    try:
        yield
    except UnknownColorError as error:
        raise TfdistError(
            f"Cannot use {path!r}: its color {error} has no class. Add every color of the masks "
            "to `label_map`, as in #000000:0."
        ) from error
    except UnknownValueError as error:
        raise TfdistError(
            f"Cannot use {path!r}: it holds the value {error}, and classes are at most 255. Map "
            f"it to a class, as in `label_map={error}:1`."
        ) from error
    except MaskFormatError as error:
        length = "" if size is None else f" ({size} bytes)"
        raise TfdistError(
            f"Cannot decode the mask {path!r}{length}: {error}. A mask must be a PNG or TIFF file "
            "with one channel or a palette, or a PNG with the colors of `label_map`."
        ) from error


def _get_indices(image: tiff.TiffImage) -> np.ndarray:
    """Returns the values of a TIFF file that stores classes: [height, width]."""
    if image.is_lossy:
        raise MaskFormatError("its compression changes values")
    values = image.values
    if values.shape[-1] != 1:
        raise MaskFormatError(f"it has {values.shape[-1]} channels")
    if not np.issubdtype(values.dtype, np.integer) and values.dtype != bool:
        raise MaskFormatError(f"its values are {values.dtype.name}, not whole numbers")
    return values[..., 0]


def _to_labels(values: np.ndarray, label_map: LabelMap | None) -> np.ndarray:
    """Returns the classes of values of any whole type: uint8 [height, width]."""
    if label_map and is_of_colors(label_map):
        raise MaskFormatError("it stores values, and `label_map` has colors")
    if values.dtype == bool:
        values = values.astype(np.uint8)
    if values.dtype == np.uint8:
        return map_values(values, label_map) if label_map else np.ascontiguousarray(values)
    labels = values.astype(np.int64)
    for found, label in (label_map or {}).items():
        labels[values == found] = label
    wrong = labels[(labels < 0) | (labels > 255)]
    if wrong.size:
        raise UnknownValueError(str(int(wrong.flat[0])))
    return labels.astype(np.uint8)


def _propose_label_map(labels: np.ndarray, wrong: list[int], num_classes: int) -> str:
    """Returns an example of `--label_map` for a mask's values that are not classes."""
    free = [label for label in range(num_classes) if label not in labels]
    if len(wrong) > len(free):
        return f"{wrong[0]}:{num_classes - 1}"
    pairs = zip(wrong, free[-len(wrong) :], strict=True)
    return ",".join(f"{value}:{label}" for value, label in pairs)


def _name_size(size: tuple[int, ...]) -> str:
    return f"{size[0]}x{size[1]}"
