"""Decoding of label masks, including palette PNGs, without Pillow."""

import struct
import zlib

import numpy as np
import tensorflow as tf

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_GREY, _PALETTE = 0, 3
_COLOUR_NAMES = {2: "RGB", 4: "grey with alpha", 6: "RGB with alpha"}


class MaskFormatError(ValueError):
    """The bytes are not a mask that can be read; the message says why."""


def decode_mask(data: bytes) -> np.ndarray:
    """Returns the labels in a PNG file's bytes.

    A one-channel PNG holds labels as grey levels, a palette PNG as indices. TensorFlow
    turns indices into colours, so the file's header is rewritten to call them grey.

    Returns:
      uint8 [height, width].

    Raises:
      MaskFormatError: not a PNG, more than one channel, more than 8 bits, truncated.
    """
    if not data.startswith(_SIGNATURE) or data[12:16] != b"IHDR" or len(data) < 33:
        raise MaskFormatError("it is not a PNG file")
    bits, colour = data[24], data[25]
    if colour not in (_GREY, _PALETTE):
        raise MaskFormatError(f"it is {_COLOUR_NAMES.get(colour, 'an unknown kind of')} PNG")
    if bits > 8:
        raise MaskFormatError(f"it has {bits} bits a pixel")
    if colour == _PALETTE:
        data = _call_palette_grey(data)
    try:
        labels = tf.io.decode_png(data, channels=1).numpy()[:, :, 0]
    except tf.errors.InvalidArgumentError as error:
        raise MaskFormatError("it is truncated or damaged") from error
    # Fewer than 8 bits come out stretched to 0..255.
    return labels // np.uint8(255 // (2**bits - 1))


def encode_mask(labels: np.ndarray, palette: np.ndarray) -> bytes:
    """Returns labels as the bytes of an indexed PNG: `decode_mask` gives them back.

    Args:
      labels: uint8 [height, width].
      palette: uint8 [colours, 3], the colour that each label is shown in.
    """
    data = tf.io.encode_png(labels[:, :, None]).numpy()
    # Grey levels and indices of 8 bits are stored alike: the header says which they are.
    header = bytearray(data[16:29])
    header[9] = _PALETTE
    colours = np.ascontiguousarray(palette, np.uint8).tobytes()
    return (
        _SIGNATURE + _make_chunk(b"IHDR", bytes(header)) + _make_chunk(b"PLTE", colours) + data[33:]
    )


def _make_chunk(kind: bytes, content: bytes) -> bytes:
    crc = struct.pack(">I", zlib.crc32(kind + content))
    return struct.pack(">I", len(content)) + kind + content + crc


def _call_palette_grey(data: bytes) -> bytes:
    header = bytearray(data[16:29])
    header[9] = _GREY
    chunks = [_SIGNATURE, _make_chunk(b"IHDR", bytes(header))]
    start = 33
    while start + 8 <= len(data):
        (length,) = struct.unpack(">I", data[start : start + 4])
        stop = start + 12 + length
        if data[start + 4 : start + 8] in (b"IDAT", b"IEND"):
            chunks.append(data[start:stop])
        start = stop
    return b"".join(chunks)
