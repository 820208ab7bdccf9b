import os
import pathlib
import re
import struct
import uuid
import zlib

import numpy as np
import pytest
import tensorflow as tf

from tfdist.data.cache import cache_source
from tfdist.data.graph_errors import as_user_error
from tfdist.data.pipeline import make_eval_dataset
from tfdist.errors import TfdistError
from tfdist.tasks.segmentation.folder import leave_out_bad, make_folder
from tfdist.tasks.segmentation.masks import MaskFormatError, decode_mask, encode_mask
from tfdist.tasks.segmentation.task import parse_label_map


def write(path, data):
    tf.io.gfile.makedirs(path.rpartition("/")[0])
    with tf.io.gfile.GFile(path, "wb") as file:
        file.write(data)


def make_image(index, size=(12, 16)):
    ramp = np.arange(size[0] * size[1] * 3).reshape(*size, 3)
    return ((ramp + 20 * index) % 256).astype(np.uint8)


def make_mask(index, size=(12, 16)):
    return ((np.arange(size[0] * size[1]).reshape(size) // 5 + index) % 3).astype(np.uint8)


def png(array):
    return tf.io.encode_png(array if array.ndim == 3 else array[..., None]).numpy()


def indexed_png(labels, bits, color=3, transparent=b""):
    """A palette (3) or gray (0) PNG of any bit depth, written by hand."""

    def chunk(kind, data):
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    height, width = labels.shape
    rows = np.zeros((height, -(-width * bits // 8) * 8), np.uint8)
    planes = (labels[..., None] >> np.arange(bits - 1, -1, -1)) & 1
    rows[:, : width * bits] = planes.reshape(height, -1)
    lines = b"".join(b"\0" + np.packbits(row).tobytes() for row in rows)
    palette = chunk(b"PLTE", bytes(range(3 * 2**bits))[: 3 * 2**bits] if bits < 8 else bytes(768))
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, color, 0, 0, 0))
        + (palette if color == 3 else b"")
        + (chunk(b"tRNS", transparent) if transparent else b"")
        + chunk(b"IDAT", zlib.compress(lines))
        + chunk(b"IEND", b"")
    )


@pytest.fixture
def data_dir(path_with_spaces):
    root = str(path_with_spaces)
    encoders = {
        "a.jpg": tf.io.encode_jpeg,
        "b.JPEG": tf.io.encode_jpeg,
        "c c.png": tf.io.encode_png,
    }
    for index, (name, encode) in enumerate(encoders.items()):
        write(f"{root}/train/images/{name}", encode(make_image(index)).numpy())
        stem = name.rpartition(".")[0]
        write(f"{root}/train/masks/{stem}.png", png(make_mask(index)))
    write(f"{root}/train/images/.DS_Store", b"")
    return root


def read(data_dir, split="train", image_size=(12, 16), num_classes=3, **options):
    source = make_folder(data_dir, split, image_size, num_classes, **options)
    return list(source.read_examples())


def test_pairs_by_stem_in_the_order_of_names(data_dir):
    examples = read(data_dir)
    assert len(examples) == 3
    for index, (image, mask) in enumerate(examples):
        np.testing.assert_array_equal(mask, make_mask(index))
        assert image.dtype == np.uint8
        assert image.shape == (12, 16, 3)
    np.testing.assert_array_equal(examples[2][0], make_image(2))
    assert len(read(data_dir, max_examples=2)) == 2


def exif_jpeg(image, orientation):
    tiff = b"II*\0" + struct.pack("<IHHHIHHI", 8, 1, 0x0112, 3, 1, orientation, 0, 0)
    segment = b"Exif\0\0" + tiff
    data = tf.io.encode_jpeg(image, quality=100, chroma_downsampling=False).numpy()
    return data[:2] + b"\xff\xe1" + struct.pack(">H", len(segment) + 2) + segment + data[2:]


def test_an_image_stands_as_its_exif_orientation_says(path_with_spaces):
    upright, mask = np.zeros((12, 16, 3), np.uint8), np.zeros((12, 16), np.uint8)
    upright[:4, :10] = 200
    mask[:4, :10] = 1
    root = str(path_with_spaces)
    write(f"{root}/val/images/x.jpg", exif_jpeg(np.rot90(upright), 6))
    write(f"{root}/val/masks/x.png", png(mask))
    image, labels = read(root, "val")[0]
    np.testing.assert_allclose(image.astype(int), upright, atol=20)
    np.testing.assert_array_equal(labels, mask)
    write(f"{root}/val/masks/x.png", png(np.rot90(mask)))
    with pytest.raises(TfdistError, match=r"the mask is 16x12 .* 12x16\. If .* EXIF orientation"):
        read(root, "val")


def test_other_files_are_skipped_aloud(data_dir, caplog):
    for name in ("x.jp2", "Y.JP2", "notes.txt", "readme", "old/a.png"):
        write(f"{data_dir}/train/images/{name}", b"")
    write(f"{data_dir}/train/masks/x.png", png(make_mask(0)))
    write(f"{data_dir}/train/images/z.png", png(make_image(0)))
    write(f"{data_dir}/train/masks/z.jxl", b"")
    source = make_folder(data_dir, "train", (12, 16), 3)
    assert (source.num_examples, source.num_skipped) == (3, 2)
    assert [record.message for record in caplog.records] == [
        f"Skipped 5 files in '{data_dir}/train/images': 2 .jp2, 1 .txt, 1 without an extension, "
        "1 directory; left out with them: 1 mask.",
        f"Skipped 1 file in '{data_dir}/train/masks': 1 .jxl; left out with them: 1 image.",
    ]
    for name in ("a.jpg", "b.JPEG", "c c.png", "z.png"):
        tf.io.gfile.remove(f"{data_dir}/train/images/{name}")
    for name in ("a", "b", "c c"):
        tf.io.gfile.remove(f"{data_dir}/train/masks/{name}.png")
    write(f"{data_dir}/train/images/z.png", png(make_image(0)))
    with pytest.raises(TfdistError, match="Cannot use any image in '.*train'"):
        make_folder(data_dir, "train", (12, 16), 3)


def test_memory_file_system_is_read():
    root = f"ram://{uuid.uuid4().hex}"
    write(f"{root}/val/images/x.png", png(make_image(0)))
    write(f"{root}/val/masks/x.png", png(make_mask(0)))
    np.testing.assert_array_equal(read(root, "val")[0][1], make_mask(0))


def test_resizing_keeps_masks_to_their_labels(path_with_spaces):
    root = str(path_with_spaces)
    mask = np.kron(np.array([[0, 9], [9, 0]]), np.ones((20, 20))).astype(np.uint8)
    write(f"{root}/train/images/x.png", png(np.repeat(mask[..., None] * 20, 3, -1)))
    write(f"{root}/train/masks/x.png", png(mask))
    image, small = read(root, image_size=(6, 10), num_classes=10)[0]
    assert set(np.unique(small)) == {0, 9}
    assert small.shape == (6, 10)
    assert len(np.unique(image)) > 2  # Anti-aliased.
    np.testing.assert_array_equal(small[:3, :5], 0)


def test_ignore_label_is_allowed_in_masks(data_dir):
    mask = make_mask(0)
    mask[0, 0] = 255
    write(f"{data_dir}/train/masks/a.png", png(mask))
    np.testing.assert_array_equal(read(data_dir, ignore_label=255)[0][1], mask)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("color", [0, 3])
def test_masks_of_few_bits_and_with_palettes_hold_indices(bits, color):
    labels = (np.arange(35).reshape(5, 7) % 2**bits).astype(np.uint8)
    np.testing.assert_array_equal(decode_mask(indexed_png(labels, bits, color)), labels)


@pytest.mark.parametrize(("color", "transparent"), [(0, b"\0\0"), (3, b"\0")])
def test_a_label_of_a_mask_may_be_transparent(color, transparent):
    labels = make_mask(0)
    data = indexed_png(labels, 8, color, transparent=transparent)
    np.testing.assert_array_equal(decode_mask(data), labels)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\xff\xd8\xff", "not a PNG"),
        (png(make_image(0)), "RGB PNG"),
        (png(np.dstack([make_image(0), make_mask(0)])), "RGB PNG with alpha"),
        (png(make_mask(0))[:-30], "truncated"),
    ],
)
def test_masks_of_other_kinds_are_refused(data, message):
    with pytest.raises(MaskFormatError, match=message):
        decode_mask(data)


def test_a_label_map_gives_values_their_classes(data_dir):
    stored = np.array([0, 255, 128], np.uint8)[make_mask(0)]
    write(f"{data_dir}/train/masks/a.png", png(stored))
    with pytest.raises(TfdistError, match=r"holds the value 128, .*=128:1,255:2`; or train"):
        read(data_dir, ignore_label=9)
    examples = read(data_dir, label_map={255: 1, 128: 9}, ignore_label=9)
    np.testing.assert_array_equal(examples[0][1], np.array([0, 1, 9])[make_mask(0)])
    np.testing.assert_array_equal(examples[1][1], make_mask(1))
    with pytest.raises(TfdistError, match=r"map 255 to class 3: classes are 0 to 2 or 9 \(ign"):
        read(data_dir, label_map={255: 3}, ignore_label=9)


def test_the_proposed_label_map_makes_the_mask_fit(data_dir):
    for values, classes in (([0, 255], 2), ([255], 2), ([0, 1, 255], 3), ([0, 90, 255], 4)):
        stored = np.resize(np.array(values, np.uint8), (12, 16))
        write(f"{data_dir}/train/masks/a.png", png(stored))
        with pytest.raises(TfdistError) as caught:
            read(data_dir, num_classes=classes, max_examples=1)
        proposed = re.search(r"`label_map=(\S+)`;", str(caught.value))[1]
        label_map = parse_label_map(proposed.split(","))
        mask = read(data_dir, num_classes=classes, max_examples=1, label_map=label_map)[0][1]
        assert len(np.unique(mask)) == len(values)


def test_a_label_map_gives_colors_their_classes(data_dir):
    colors = np.array([[0, 0, 0], [255, 0, 0], [0, 128, 255]], np.uint8)
    label_map = {"#000000": 0, "#ff0000": 1, "#0080ff": 2}
    labels = make_mask(0)
    opaque = np.full((12, 16, 1), 255, np.uint8)
    palette = encode_mask(labels, colors)
    for data in (png(colors[labels]), png(np.dstack([colors[labels], opaque])), palette):
        write(f"{data_dir}/train/masks/a.png", data)
        mask = read(data_dir, label_map=label_map, max_examples=1)[0][1]
        np.testing.assert_array_equal(mask, labels)
    del label_map["#0080ff"]
    with pytest.raises(TfdistError, match=r"a\.png': its color #0080ff has no class"):
        read(data_dir, label_map=label_map)
    write(f"{data_dir}/train/masks/a.png", png(np.dstack([colors[labels], opaque // 2])))
    with pytest.raises(TfdistError, match="transparent in places"):
        read(data_dir, label_map=label_map)


def test_the_label_map_is_part_of_what_is_cached(data_dir):
    keys = {
        make_folder(data_dir, "train", (12, 16), 3, label_map=label_map).get_fingerprint()
        for label_map in (None, {5: 1}, {5: 2})
    }
    assert len(keys) == 3


def test_missing_directories_are_named(data_dir):
    with pytest.raises(TfdistError, match=r"`data_dir='.*nowhere'`: there is no such directory"):
        read(f"{data_dir}/nowhere")
    with pytest.raises(TfdistError, match=r"the split 'val' .* its directories are train\."):
        read(data_dir, "val")
    with pytest.raises(TfdistError, match=r"the split 'x' in .* it has no directory"):
        read(f"{data_dir}/train/images", "x")
    tf.io.gfile.makedirs(f"{data_dir}/val/images")
    with pytest.raises(TfdistError, match=r"any \.jpg, .*, \.tiff file in '.*images'\. Put"):
        read(data_dir, "val")
    write(f"{data_dir}/val/images/a.jp2", b"")
    with pytest.raises(TfdistError, match=r"any \.jpg, .* file in '.*images', only 1 \.jp2\. Put"):
        read(data_dir, "val")
    write(f"{data_dir}/val/images/a.png", png(make_image(0)))
    with pytest.raises(TfdistError, match=r"find the directory '.*val/masks'"):
        read(data_dir, "val")


def test_files_without_a_partner_are_named(data_dir):
    tf.io.gfile.remove(f"{data_dir}/train/masks/a.png")
    with pytest.raises(TfdistError, match=r"pair '.*/a\.jpg': no mask of that name"):
        read(data_dir)
    tf.io.gfile.remove(f"{data_dir}/train/images/a.jpg")
    for name in "uvwx":
        write(f"{data_dir}/train/masks/{name}.png", b"")
    with pytest.raises(TfdistError, match=r"u\.png'.*w\.png' and 1 more: no image of that name"):
        read(data_dir)


def test_two_images_of_one_name_are_refused(data_dir):
    write(f"{data_dir}/train/images/a.png", png(make_image(0)))
    with pytest.raises(TfdistError, match=r"tell apart '.*a\.jpg' and '.*a\.png'"):
        read(data_dir)


def break_image(root):
    with tf.io.gfile.GFile(f"{root}/train/images/b.JPEG", "rb") as file:
        data = file.read()
    write(f"{root}/train/images/b.JPEG", data[: len(data) // 2])


BREAKAGES = {
    "truncated": (break_image, r"decode the image '.*b\.JPEG' \(\d+ bytes\)"),
    "not_an_image": (
        lambda root: write(f"{root}/train/images/b.JPEG", b"text"),
        r"decode the image '.*b\.JPEG' \(4 bytes\)",
    ),
    "mask_of_colors": (
        lambda root: write(f"{root}/train/masks/b.png", png(make_image(0))),
        r"decode the mask '.*b\.png' .* RGB PNG",
    ),
    "other_size": (
        lambda root: write(f"{root}/train/masks/b.png", png(make_mask(0, (6, 16)))),
        r"use '.*b\.png': the mask is 6x16 and its image is 12x16",
    ),
    "out_of_range": (
        lambda root: write(f"{root}/train/masks/b.png", png(make_mask(0) + np.uint8(5))),
        r"use '.*b\.png': it holds the value 5, but classes are 0 to 2 or 9 \(ignored\)\. ",
    ),
}


@pytest.mark.parametrize("name", BREAKAGES)
def test_files_that_cannot_be_used_are_named(data_dir, name):
    break_it, message = BREAKAGES[name]
    break_it(data_dir)
    source = make_folder(data_dir, "train", (12, 16), 3, ignore_label=9)
    with pytest.raises(TfdistError, match=message) as caught:
        cache_source(source, "memory", quiet=True)
    assert "\n" not in str(caught.value)


def test_error_inside_tf_data_becomes_one_line(data_dir):
    break_image(data_dir)
    source = cache_source(make_folder(data_dir, "train", (12, 16), 3), "none")
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        list(make_eval_dataset(source, global_batch_size=3))
    error = as_user_error(caught.value)
    assert str(error).startswith("Cannot decode the image '")
    assert "b.JPEG" in str(error)
    assert "\n" not in str(error)


def test_random_access_reads_what_the_cache_does(data_dir):
    source = make_folder(data_dir, "train", (6, 8), 3)
    direct = next(iter(make_eval_dataset(source, global_batch_size=3)))[0]
    cached = cache_source(source, "memory", quiet=True)
    for left, right in zip(direct, cached.load_batch(tf.range(3, dtype=tf.int64)), strict=True):
        np.testing.assert_array_equal(left, right)


def test_a_changed_file_is_not_taken_from_the_disk_cache(data_dir, tmp_path):
    def read_mask():
        source = make_folder(data_dir, "train", (12, 16), 3)
        cached = cache_source(source, "disk", directory=str(tmp_path / "cache"), quiet=True)
        return cached.load(tf.constant(0, tf.int64))[1].numpy()

    path = pathlib.Path(data_dir) / "train" / "masks" / "a.png"
    path.write_bytes(indexed_png(np.ones((12, 16), np.uint8), 8))
    stat = path.stat()
    assert (read_mask() == 1).all()
    changed = indexed_png(np.full((12, 16), 2, np.uint8), 8)
    assert len(changed) == stat.st_size
    path.write_bytes(changed)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert (read_mask() == 2).all()


def test_refuses_impossible_classes(data_dir):
    with pytest.raises(TfdistError, match="use 1 classes"):
        make_folder(data_dir, "train", (8, 8), 1)
    with pytest.raises(TfdistError, match=r"name 3 classes with 2 names \(a, b\)"):
        make_folder(data_dir, "train", (8, 8), 3, class_names=("a", "b"))


def test_bad_ones_are_left_out_on_request(data_dir, caplog):
    whole = make_folder(str(data_dir), "train", (12, 16), 3)
    path = pathlib.Path(whole.pairs[1][0])
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(TfdistError, match=f"Cannot decode the image .*{path.name}"):
        list(whole.read_examples())
    source = leave_out_bad(whole)
    assert source.pairs == tuple(pair for i, pair in enumerate(whole.pairs) if i != 1)
    assert (source.num_examples, source.num_skipped) == (whole.num_examples - 1, 1)
    assert path.name in caplog.text
    assert cache_source(source, "memory", quiet=True).num_skipped == 1
    for image, _ in source.pairs:
        pathlib.Path(image).write_bytes(b"")
    with pytest.raises(TfdistError, match="None of the .* examples can be used"):
        leave_out_bad(source)


def test_validation_takes_a_share_of_a_folder_without_splits(path_with_spaces):
    root = str(path_with_spaces)
    for index in range(12):
        write(f"{root}/images/{index}.png", png(make_image(index)))
        write(f"{root}/masks/{index}.png", png(make_mask(index)))
    parts = [
        make_folder(root, split, (6, 8), 3, val_fraction=0.3).pairs for split in ("train", "val")
    ]
    assert set(parts[0]).isdisjoint(parts[1])
    assert len(parts[0]) + len(parts[1]) == 12
    assert 1 <= len(parts[1]) < len(parts[0])
    with pytest.raises(TfdistError, match="`val_fraction=1` of 12 examples leaves none for train"):
        make_folder(root, "train", (6, 8), 3, val_fraction=1)
