import base64
import struct
import zlib

import numpy as np
import pytest
import tensorflow as tf

from tfdist.tasks.images.bitmaps import BitmapFormatError, decode_bmp
from tfdist.tasks.images.orientation import apply_orientation, find_orientation
from tfdist.tasks.images.reading import ImageFormatError, decode_image

PICTURE = np.random.default_rng(0).integers(0, 256, (5, 7, 3)).astype(np.uint8)
PALETTE = np.array([[9, 8, 7], [200, 100, 50], [1, 2, 3]], np.uint8)
# Made with another encoder: a lossless picture of 2 x 2 pixels with an alpha channel of 128.
WEBP = base64.b64decode(
    "UklGRjwAAABXRUJQVlA4TDAAAAAvAUAAEB9AIEBRPPX/gxsCEkL+/zKLgrQNmO74mX91G8AA/qu1BgrSNmBRdyP6Hzk="
)
WEBP_PIXELS = [[[200, 100, 50], [0, 0, 0]], [[1, 2, 3], [255, 255, 255]]]
# Made with another encoder, as are all of these: [200, 100, 50] at the left, black at the right.
GIF = base64.b64decode("R0lGODdhAgACAIEAAMhkMgAAAAAAAAAAACwAAAAAAgACAAAIBgABBBAYEAA7")
PALETTE_PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAIAAAACAQMAAABIeJ9nAAAABlBMVEXIZDIAAABuTMSxAAAADElEQVR42mNwYGIAAADIAEPz"
    "0vc5AAAAAElFTkSuQmCC"
)
# All of it is [200, 100, 50].
CMYK_JPEG = base64.b64decode(
    "/9j/7gAOQWRvYmUAZAAAAAAA/9sAQwADAgIDAgIDAwMDBAMDBAUIBQUEBAUKBwcGCAwKDAwLCgsLDQ4SEA0OEQ4LCxAWEBET"
    "FBUVFQwPFxgWFBgSFBUU/8AAFAgACAAIBEMRAE0RAFkRAEsRAP/EABYAAQEBAAAAAAAAAAAAAAAAAAgHCf/EABQQAQAAAAAA"
    "AAAAAAAAAAAAAAD/2gAOBEMATQBZAEsAAD8AYCaBe1Tf/9k="
)
COLORS = np.array([[[200, 100, 50], [0, 0, 0]]] * 2, np.uint8)
GRAYS = np.repeat(COLORS[..., :1], 3, -1)
ALPHA = np.zeros((2, 2, 1), np.uint8)


def make_bmp(rows, bits, size, *, palette=None, compression=0, top_down=False):
    """A BMP file; `rows` are the packed bytes of each row, from the top."""
    height, width = size
    padded = [row + bytes(-len(row) % 4) for row in rows]
    data = b"".join(padded if top_down else padded[::-1])
    colors = b"" if palette is None else b"".join(bytes([*c[::-1], 0]) for c in palette.tolist())
    start = 54 + len(colors)
    count = 0 if palette is None else len(palette)
    stored_height = -height if top_down else height
    return (
        b"BM"
        + struct.pack("<IHHI", start + len(data), 0, 0, start)
        + struct.pack(
            "<IiiHHIIiiII",
            40,
            width,
            stored_height,
            1,
            bits,
            compression,
            len(data),
            0,
            0,
            count,
            0,
        )
        + colors
        + data
    )


def pack(indices, bits):
    planes = (indices[..., None] >> np.arange(bits - 1, -1, -1)) & 1
    return [np.packbits(row.reshape(-1)).tobytes() for row in planes.astype(np.uint8)]


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_bitmaps_with_palettes_show_its_colors(bits):
    indices = (np.arange(35).reshape(5, 7) % min(3, 2**bits)).astype(np.uint8)
    data = make_bmp(pack(indices, bits), bits, (5, 7), palette=PALETTE)
    np.testing.assert_array_equal(decode_image(data), PALETTE[indices])


@pytest.mark.parametrize("top_down", [False, True])
@pytest.mark.parametrize("bits", [24, 32])
def test_bitmaps_of_colors(bits, top_down):
    alpha = np.full((5, 7, bits // 8 - 3), 77, np.uint8)
    stored = np.concatenate([PICTURE[..., ::-1], alpha], -1)
    data = make_bmp([row.tobytes() for row in stored], bits, (5, 7), top_down=top_down)
    np.testing.assert_array_equal(decode_image(data), PICTURE)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"BM", "truncated"),
        (make_bmp([bytes(6)] * 2, 24, (2, 2))[:-1], "truncated"),
        (make_bmp([bytes(4)] * 2, 16, (2, 2)), "16 bits"),
        (make_bmp([bytes(2)] * 2, 8, (2, 2), palette=PALETTE, compression=1), "compressed"),
        (make_bmp([b"\5\5"] * 2, 8, (2, 2), palette=PALETTE), "palette does not have"),
        (b"BM" + struct.pack("<IHHII", 90, 0, 0, 26, 12) + bytes(72), "OS/2"),
    ],
)
def test_bitmaps_of_other_kinds_are_refused(data, message):
    with pytest.raises(BitmapFormatError, match=message):
        decode_bmp(data)
    with pytest.raises(ImageFormatError, match=message):
        decode_image(data)


def test_webp_files_lose_their_alpha_channel_alone():
    np.testing.assert_array_equal(decode_image(WEBP), WEBP_PIXELS)


@pytest.mark.parametrize(
    ("data", "pixels"),
    [
        (GIF, COLORS),
        (PALETTE_PNG, COLORS),
        (tf.io.encode_png(np.dstack([COLORS, ALPHA])).numpy(), COLORS),
        (tf.io.encode_png(GRAYS[..., :1]).numpy(), GRAYS),
        (tf.io.encode_png(np.dstack([GRAYS[..., :1], ALPHA])).numpy(), GRAYS),
        (tf.io.encode_png(COLORS[:1, :1]).numpy(), COLORS[:1, :1]),
    ],
    ids=["gif", "palette", "alpha", "gray", "gray and alpha", "one pixel"],
)
def test_every_kind_of_file_becomes_three_channels_of_eight_bits(data, pixels):
    np.testing.assert_array_equal(decode_image(data), pixels)


@pytest.mark.parametrize("options", [{"format": "grayscale"}, {"progressive": True}])
def test_other_jpeg_files_are_read(options):
    gray = np.full((9, 8, 1 if "format" in options else 3), 90, np.uint8)
    found = decode_image(tf.io.encode_jpeg(gray, **options).numpy())
    np.testing.assert_allclose(found, np.full((9, 8, 3), 90), atol=2)


def test_jpeg_files_of_four_inks_show_their_colors():
    found = decode_image(CMYK_JPEG)
    assert found.shape == (8, 8, 3)
    np.testing.assert_allclose(found, np.broadcast_to([200, 100, 50], found.shape), atol=2)


@pytest.mark.parametrize("data", [b"", b"text", WEBP[:30], tf.io.encode_png(PICTURE).numpy()[:60]])
def test_what_is_no_image_is_refused(data):
    with pytest.raises(ImageFormatError, match="truncated, damaged or in another format"):
        decode_image(data)


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_images_of_16_bits_are_refused_instead_of_cut(channels):
    values = np.full((2, 2, channels), 800, np.uint16)  # TensorFlow would return 3
    with pytest.raises(ImageFormatError, match="16 bits per channel"):
        decode_image(tf.io.encode_png(values).numpy())


def make_exif(orientation, order="<"):
    mark = {"<": b"II*\0", ">": b"MM\0*"}[order]
    entries = [(0x010F, 2, 4, 0), (0x0112, 3, 1, orientation)]
    packed = b"".join(struct.pack(f"{order}HHIHH", *entry, 0) for entry in entries)
    return mark + struct.pack(f"{order}IH", 8, len(entries)) + packed + bytes(4)


def add_to_png(data, exif):
    chunk = b"eXIf" + exif
    packed = struct.pack(">I", len(exif)) + chunk + struct.pack(">I", zlib.crc32(chunk))
    return data[:33] + packed + data[33:]


def add_to_jpeg(data, exif):
    segment = b"Exif\0\0" + exif
    return data[:20] + b"\xff\xe1" + struct.pack(">H", len(segment) + 2) + segment + data[20:]


def add_to_webp(data, exif):
    return data + b"EXIF" + struct.pack("<I", len(exif)) + exif


# Where the numbers of [[1, 2, 3], [4, 5, 6]] are shown; EXIF's own words: the stored row 0 is at
# the top, top, bottom, bottom, left, right, right, left.
SHOWN = {
    1: [[1, 2, 3], [4, 5, 6]],
    2: [[3, 2, 1], [6, 5, 4]],
    3: [[6, 5, 4], [3, 2, 1]],
    4: [[4, 5, 6], [1, 2, 3]],
    5: [[1, 4], [2, 5], [3, 6]],
    6: [[4, 1], [5, 2], [6, 3]],
    7: [[6, 3], [5, 2], [4, 1]],
    8: [[3, 6], [2, 5], [1, 4]],
}


@pytest.mark.parametrize("orientation", SHOWN)
@pytest.mark.parametrize("order", ["<", ">"])
def test_every_orientation(orientation, order):
    stored = np.array([[1, 2, 3], [4, 5, 6]], np.uint8)
    np.testing.assert_array_equal(apply_orientation(stored, orientation), SHOWN[orientation])
    picture = tf.io.encode_png(np.repeat(stored[..., None], 3, -1)).numpy()
    data = add_to_png(picture, make_exif(orientation, order))
    np.testing.assert_array_equal(decode_image(data)[..., 0], SHOWN[orientation])


def test_orientation_is_found_in_all_formats_that_have_one():
    exif = make_exif(6)
    jpeg = tf.io.encode_jpeg(PICTURE).numpy()
    assert find_orientation(jpeg) == 1
    assert find_orientation(add_to_jpeg(jpeg, exif)) == 6
    assert decode_image(add_to_jpeg(jpeg, exif)).shape == (7, 5, 3)
    assert find_orientation(add_to_webp(WEBP, exif)) == 6
    assert find_orientation(add_to_webp(WEBP, b"Exif\0\0" + exif)) == 6
    assert find_orientation(b"GIF89a" + exif) == 1


@pytest.mark.parametrize(
    "exif",
    [b"", b"II", b"none", make_exif(0), make_exif(9), make_exif(6)[:25], b"II*\0" + b"\xff" * 8],
)
def test_metadata_that_make_no_sense_turn_nothing(exif):
    assert find_orientation(add_to_jpeg(tf.io.encode_jpeg(PICTURE).numpy(), exif)) == 1
    assert find_orientation(add_to_png(tf.io.encode_png(PICTURE).numpy(), exif)) == 1
