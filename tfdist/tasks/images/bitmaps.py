"""Decodes BMP files, including their palettes, which TensorFlow ignores."""

import struct

import numpy as np

SIGNATURE = b"BM"

_PALETTE_BITS = (1, 2, 4, 8)
_COLOR_BITS = (24, 32)
_UNCOMPRESSED, _BIT_FIELDS = 0, 3
_USUAL_FIELDS = (0xFF0000, 0xFF00, 0xFF)
_FILE_HEADER_BYTES = 14
_INFO_HEADER_BYTES = 40


class BitmapFormatError(ValueError):
    """Raised for bytes that are not a readable BMP file; the message says why."""


def decode_bmp(data: bytes) -> np.ndarray:
    """Returns the image in the bytes of a BMP file with a palette, or 24 or 32 bits per pixel.

    Returns:
      uint8 [height, width, 3]. An alpha channel is dropped.

    Raises:
      BitmapFormatError: the file is truncated, compressed or of another kind.

    Source: https://learn.microsoft.com/en-us/windows/win32/gdi/bitmap-storage
    """
    if len(data) < _FILE_HEADER_BYTES + _INFO_HEADER_BYTES:
        raise BitmapFormatError("it is truncated")
    start, header_bytes = struct.unpack_from("<II", data, 10)
    if header_bytes < _INFO_HEADER_BYTES:
        raise BitmapFormatError("it is an OS/2 BMP file")
    width, stored_height, _, bits, compression = struct.unpack_from("<iiHHI", data, 18)
    if bits not in (*_PALETTE_BITS, *_COLOR_BITS):
        raise BitmapFormatError(f"it is a BMP file with {bits} bits per pixel")
    fields = struct.unpack_from("<III", data, 54) if len(data) >= 66 else ()
    is_plain = compression == _UNCOMPRESSED or (
        compression == _BIT_FIELDS and bits == 32 and fields == _USUAL_FIELDS
    )
    if not is_plain:
        raise BitmapFormatError("it is a compressed BMP file")
    height, row_bytes = abs(stored_height), (bits * width + 31) // 32 * 4
    if width < 1 or height < 1 or start + height * row_bytes > len(data):
        raise BitmapFormatError("it is truncated or damaged")
    rows = np.frombuffer(data, np.uint8, height * row_bytes, start).reshape(height, row_bytes)
    if stored_height > 0:  # stored from the bottom up
        rows = rows[::-1]
    if bits in _PALETTE_BITS:
        return _look_up(data, _FILE_HEADER_BYTES + header_bytes, _unpack(rows, bits)[:, :width])
    channels = bits // 8
    pixels = rows[:, : channels * width].reshape(height, width, channels)
    return np.ascontiguousarray(pixels[:, :, 2::-1])  # stored as blue, green, red


def _unpack(rows: np.ndarray, bits: int) -> np.ndarray:
    shifts = np.arange(8 - bits, -1, -bits, dtype=np.uint8)
    return ((rows[:, :, None] >> shifts) & (2**bits - 1)).reshape(len(rows), -1)


def _look_up(data: bytes, start: int, indices: np.ndarray) -> np.ndarray:
    (count,) = struct.unpack_from("<I", data, 46)
    count = min(count or 256, 256, (len(data) - start) // 4)
    palette = np.frombuffer(data, np.uint8, 4 * count, start).reshape(-1, 4)
    if indices.max() >= count:
        raise BitmapFormatError("a pixel refers to a color that its palette does not have")
    return palette[:, 2::-1][indices]
