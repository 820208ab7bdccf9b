"""Reads and applies EXIF orientations, which say how to rotate an image for display."""

import struct
from collections.abc import Iterator

import numpy as np

_UPRIGHT = 1
_ORIENTATION_TAG = 0x0112
_SHORT = 3
_PREFIX = b"Exif\0\0"
_JPEG_START = b"\xff\xd8"
_JPEG_PIXELS = 0xDA
_JPEG_EXIF = 0xE1
_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def find_orientation(data: bytes) -> int:
    """Returns the EXIF orientation, 1 to 8, of a JPEG, PNG or WebP file; 1 if it has none.

    Metadata that cannot be parsed is ignored.

    Source: CIPA DC-008 (Exif 2.32), section 4.6.4, tag 0x0112; PNG third edition, eXIf; RFC 9649,
    section 2.7.1.5.
    """
    for block in _list_exif_blocks(data):
        orientation = _read_orientation(block.removeprefix(_PREFIX))
        if orientation is not None:
            return orientation
    return _UPRIGHT


def apply_orientation(pixels: np.ndarray, orientation: int) -> np.ndarray:
    """Returns an image or a mask rotated and mirrored so that it is upright.

    Args:
      pixels: [height, width, ...], as stored.
      orientation: 1 to 8; from 5 on, height and width are swapped.
    """
    if orientation >= 5:
        pixels = np.swapaxes(pixels, 0, 1)
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    return np.ascontiguousarray(pixels)


def _list_exif_blocks(data: bytes) -> Iterator[bytes]:
    if data.startswith(_JPEG_START):
        return _list_jpeg_blocks(data)
    if data.startswith(_PNG_SIGNATURE):
        return _list_chunks(data, len(_PNG_SIGNATURE), b"eXIf", is_png=True)
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return _list_chunks(data, 12, b"EXIF", is_png=False)
    return iter(())


def _list_jpeg_blocks(data: bytes) -> Iterator[bytes]:
    start = len(_JPEG_START)
    while start + 4 <= len(data) and data[start] == 0xFF:
        kind = data[start + 1]
        if kind == 0xFF:  # a fill byte
            start += 1
            continue
        if kind == _JPEG_PIXELS:
            return
        (length,) = struct.unpack_from(">H", data, start + 2)
        if kind == _JPEG_EXIF and data.startswith(_PREFIX, start + 4):
            yield data[start + 4 : start + 2 + length]
        start += 2 + length


def _list_chunks(data: bytes, start: int, wanted: bytes, *, is_png: bool) -> Iterator[bytes]:
    """Yields the contents of the chunks of one kind in a PNG or RIFF file."""
    while start + 8 <= len(data):
        head = data[start : start + 8]
        kind = head[4:] if is_png else head[:4]
        length = int.from_bytes(head[:4], "big") if is_png else int.from_bytes(head[4:], "little")
        if kind == wanted:
            yield data[start + 8 : start + 8 + length]
        # A PNG chunk ends with a checksum; a RIFF chunk is padded to an even length.
        start += 8 + length + (4 if is_png else length % 2)


def _read_orientation(block: bytes) -> int | None:
    """Returns the orientation in a TIFF structure, or None."""
    order = {b"II": "<", b"MM": ">"}.get(block[:2])
    if order is None:
        return None
    try:
        (directory,) = struct.unpack_from(f"{order}I", block, 4)
        (count,) = struct.unpack_from(f"{order}H", block, directory)
        for entry in range(directory + 2, directory + 2 + 12 * count, 12):
            tag, kind, _, value = struct.unpack_from(f"{order}HHIH", block, entry)
            if tag == _ORIENTATION_TAG:
                return value if kind == _SHORT and 1 <= value <= 8 else None
    except struct.error:
        return None
    return None
