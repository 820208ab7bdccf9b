"""Images of 16 bits, of many channels and in TIFF files, and tiles of them."""

import json
import pathlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.test_predict import evaluate, predict
from tfdist.cli.command import run_command
from tfdist.errors import TfdistError
from tfdist.runs.options import TrainOptions
from tfdist.tasks.commands import ExportOptions
from tfdist.tasks.images import tiff
from tfdist.tasks.images.pixels import PixelFormat
from tfdist.tasks.images.reading import find_format, open_image, read_image
from tfdist.tasks.segmentation.folder import make_folder
from tfdist.tasks.segmentation.inference.commands import EXPORT
from tfdist.tasks.segmentation.masks import decode_mask, read_mask
from tfdist.tasks.segmentation.registry import make_source
from tfdist.tasks.segmentation.task import Segmentation
from tfdist.train import run_training

RNG = np.random.default_rng(0)


@pytest.fixture
def tifffile():
    return pytest.importorskip("tifffile", reason="comes with the [tiff] extra")


def write_png(path, values):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(tf.io.encode_png(values if values.ndim == 3 else values[..., None]).numpy())


def write_example(path, name, image, mask):
    write_png(path / "train" / "images" / f"{name}.png", image)
    write_png(path / "train" / "masks" / f"{name}.png", mask)


def draw(high, size=(12, 16), channels=3, dtype=np.uint16):
    return RNG.integers(0, high + 1, (*size, channels)).astype(dtype)


def test_16_bits_become_numbers_from_0_to_255(path_with_spaces):
    image, mask = draw(65535), draw(1, channels=1)[..., 0]
    write_example(path_with_spaces, "a", image, mask)
    source = make_folder(path_with_spaces, "train", (12, 16), 2)
    assert source.info["pixels"] == {
        "dtype": "uint16",
        "channels": 3,
        "value_range": [0.0, 65535.0],
        "is_given": False,
    }
    ((found, labels),) = source.read_examples()
    np.testing.assert_allclose(found, image / 257, rtol=1e-6)
    np.testing.assert_array_equal(labels, mask)
    loaded, _ = source.load(tf.constant(0, tf.int64))
    np.testing.assert_array_equal(loaded, found)
    options = {"image_size": (12, 16), "num_classes": 2, "quiet": True}
    for cache in ("memory", "disk"):
        kept = make_source(
            "folder",
            split="train",
            data_dir=path_with_spaces,
            cache=cache,
            cache_dir=str(path_with_spaces / "cache"),
            **options,
        )
        np.testing.assert_array_equal(kept.load(tf.constant(0, tf.int64))[0], found)
    ranged = make_folder(path_with_spaces, "train", (12, 16), 2, value_range=(1000, 5095))
    ((found, _),) = ranged.read_examples()
    expected = np.clip((image.astype(float) - 1000) / 4095, 0, 1) * 255
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-4)
    assert source.make_fingerprint() != ranged.make_fingerprint()
    assert source.get_fingerprint() != ranged.get_fingerprint()


def test_images_of_8_bits_stay_as_they_are(path_with_spaces):
    image = draw(255, dtype=np.uint8)
    write_example(path_with_spaces, "a", image, draw(1, channels=1, dtype=np.uint8))
    source = make_folder(path_with_spaces, "train", (12, 16), 2)
    assert "pixels" not in source.info
    ((found, _),) = source.read_examples()
    assert found.dtype == np.uint8
    np.testing.assert_array_equal(found, image)


def test_images_of_two_types_need_a_range(path_with_spaces):
    mask = draw(1, channels=1, dtype=np.uint8)
    write_example(path_with_spaces, "a", draw(4095), mask)
    write_example(path_with_spaces, "b", draw(255, dtype=np.uint8), mask)
    with pytest.raises(TfdistError, match=r"b\.png': its values are uint8, not uint16 "):
        list(make_folder(path_with_spaces, "train", (12, 16), 2).read_examples())
    source = make_folder(path_with_spaces, "train", (12, 16), 2, value_range=(0, 255))
    assert [image.max() for image, _ in source.read_examples()] == [255, 255]


def test_masks_of_16_bits_hold_classes(path_with_spaces):
    path = path_with_spaces / "mask.png"
    write_png(path, np.array([[0, 1000], [1, 1]], np.uint16))
    with pytest.raises(TfdistError, match=r"value 1000, and classes .*label_map=1000:1"):
        read_mask(str(path))
    assert read_mask(str(path), label_map={1000: 2}).tolist() == [[0, 2], [1, 1]]


def test_gray_images_of_16_bits_have_three_channels_and_alpha_is_dropped(path_with_spaces):
    for channels in (1, 2, 3, 4):
        image = draw(65535, channels=channels)
        write_png(path_with_spaces / "a.png", image)
        found = read_image(str(path_with_spaces / "a.png"), PixelFormat("uint16", 3, (0.0, 255.0)))
        colors = image[..., :3] if channels > 2 else image[..., :1].repeat(3, -1)
        np.testing.assert_array_equal(found, np.minimum(colors, 255))


@pytest.mark.parametrize("flag", ["tile", "value_range"])
def test_flags_of_folders_are_refused_elsewhere(flag):
    with pytest.raises(TfdistError, match=f"`{flag}` is only for `dataset=folder`"):
        Segmentation(**{flag: {"tile": 8, "value_range": (0, 9)}[flag]}).check()
    with pytest.raises(TfdistError, match=r"`value_range=3,2` is not the lowest"):
        Segmentation(dataset="folder", data_dir="x", num_classes=2, value_range=(3, 2)).check()


def test_tiles_cover_each_image(path_with_spaces):
    image, mask = draw(65535, (20, 30)), draw(2, (20, 30), 1, np.uint8)
    write_example(path_with_spaces, "a", image, mask)
    write_example(path_with_spaces, "b", image[:8, :8], mask[:8, :8])
    source = make_folder(path_with_spaces, "train", (8, 8), 3, tile=8)
    assert (source.num_examples, len(source.pairs)) == (13, 2)
    found = np.zeros_like(image)
    for index, (number, row, column) in enumerate(source.tiles[:12]):
        assert number == 0
        part, labels = source.read_example(index)
        area = (slice(row, row + 8), slice(column, column + 8))
        np.testing.assert_array_equal(labels, mask[area][..., 0])
        found[area] = np.round(part * 257)
    np.testing.assert_array_equal(found, image)
    for index, example in enumerate(source.read_examples()):
        for ours, theirs in zip(example, source.read_example(index), strict=True):
            np.testing.assert_array_equal(ours, theirs)
    assert [i.shape[:2] for i, _ in source.read_examples(original_size=True)] == [(20, 30), (8, 8)]
    with pytest.raises(TfdistError, match=r"b\.png' of 8x8 pixels into tiles of `tile=9`"):
        make_folder(path_with_spaces, "train", (8, 8), 3, tile=9)
    options = {"split": "train", "data_dir": path_with_spaces, "num_classes": 3, "quiet": True}
    half = make_source("folder", image_size=(4, 4), tile=8, measure_size=True, **options)
    assert half.info["original_size"] == (8, 8)


@pytest.mark.parametrize("layout", ["contig", "separate", "tiled", "zlib", "pages"])
def test_tiff_files_may_have_any_number_of_channels(layout, tifffile, tmp_path):
    image = draw(4095, (32, 48), 5)
    options = {
        "contig": {"planarconfig": "contig"},
        "separate": {"planarconfig": "separate"},
        "tiled": {"planarconfig": "contig", "tile": (16, 16)},
        "zlib": {"planarconfig": "contig", "compression": "zlib"},
        "pages": {"imagej": True, "metadata": {"axes": "CYX"}},
    }[layout]
    is_first = layout in ("separate", "pages")
    path = str(tmp_path / "a.tif")
    photometric = {} if layout == "pages" else {"photometric": "minisblack"}
    tifffile.imwrite(
        path, np.moveaxis(image, -1, 0) if is_first else image, **photometric, **options
    )
    pixels = find_format(path, (0, 4095))
    assert (pixels.channels, pixels.dtype) == (5, "uint16")
    expected = image.astype(np.float32) * np.float32(255 / 4095)
    np.testing.assert_array_equal(read_image(path, pixels), expected)
    area = (slice(3, 9), slice(40, 48))
    np.testing.assert_array_equal(open_image(path, pixels).read(area), expected[area])


def test_tiff_files_of_other_kinds(tifffile, tmp_path):
    path = str(tmp_path / "a.tif")
    tifffile.imwrite(path, np.float32([[0, np.nan], [0.5, 2]]))
    with pytest.raises(TfdistError, match=r"values are float32, whose range .*value_range=0,1"):
        find_format(path)
    found = read_image(path, find_format(path, (0, 1)))[..., 0]
    assert found.tolist() == [[0, 0], [127.5, 255]]
    rgba = draw(255, (4, 5), 4, np.uint8)
    tifffile.imwrite(path, rgba, photometric="rgb", extrasamples=["unassalpha"])
    assert find_format(path) == PixelFormat()
    np.testing.assert_array_equal(read_image(path, PixelFormat()), rgba[..., :3])
    with pytest.raises(TfdistError, match="it has 3 channels, not 5 as the data set"):
        read_image(path, PixelFormat(channels=5))
    tifffile.imwrite(path, np.zeros((3, 4, 5), np.uint8), imagej=True, metadata={"axes": "ZYX"})
    with pytest.raises(TfdistError, match="its axes are ZYX of 3x4x5; an image has"):
        find_format(path)
    pathlib.Path(path).write_bytes(b"II*\0 damaged")
    with pytest.raises(TfdistError, match="Cannot decode the image"):
        find_format(path)


def test_masks_may_be_tiff_files(tifffile, tmp_path):
    path = str(tmp_path / "a.tif")
    for dtype in (np.uint8, np.int16, np.uint16, np.int32):
        tifffile.imwrite(path, np.array([[0, 7], [1, 1]], dtype))
        assert read_mask(path, label_map={7: 2}).tolist() == [[0, 2], [1, 1]]
    for values, message in [
        (np.array([[0, -1]], np.int16), "value -1"),
        (np.zeros((4, 4, 3), np.uint8), "3 channels"),
        (np.zeros((4, 4), np.float32), "float32, not whole numbers"),
    ]:
        tifffile.imwrite(path, values, photometric="rgb" if values.ndim == 3 else "minisblack")
        with pytest.raises(TfdistError, match=message):
            read_mask(path)


def test_a_tile_of_a_huge_file_is_read_alone(tifffile, tmp_path):
    for name in ("images", "masks"):
        (tmp_path / "train" / name).mkdir(parents=True)
        # A file of 900 MB, of which the disk holds what is not 0.
        path = tmp_path / "train" / name / "a.tif"
        values = tifffile.memmap(path, shape=(30000, 30000), dtype=np.uint8)
        values[29990:, 29990:] = 1
        values.flush()
        del values
    source = make_folder(tmp_path, "train", (512, 512), 2, tile=512)
    assert source.num_examples == 59**2
    opened = open_image(source.pairs[0][0], source.pixels)
    assert isinstance(opened.values, np.memmap)
    image, mask = source.read_example(source.num_examples - 1)
    assert image.shape == (512, 512, 3)
    assert mask.sum() == 100
    assert image.sum() == 300


def test_the_missing_package_is_named(tmp_path, monkeypatch):
    (tmp_path / "a.tif").touch()
    monkeypatch.setattr(tiff.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(TfdistError, match=r"tifffile is missing. Run pip install 'tfdist\[tiff\]'"):
        find_format(str(tmp_path / "a.tif"))


@pytest.fixture(params=["png", "tif"])
def kind(request):
    if request.param == "tif":
        request.getfixturevalue("tifffile")
    return request.param


def test_a_run_is_used_on_the_values_that_it_was_trained_on(kind, path_with_spaces, capfd):
    channels = {"png": 3, "tif": 5}[kind]
    images = {}
    for index in range(4):
        mask = np.zeros((16, 24), np.uint16)
        mask[4:12, 3 * index : 3 * index + 8] = 1
        image = draw(1000, (16, 24), channels) + 3000 * mask[..., None]
        images[f"{index}"] = image.astype(np.uint16)
        if kind == "png":
            write_example(path_with_spaces, index, images[f"{index}"], mask)
            continue
        import tifffile

        for name, values in (("images", images[f"{index}"]), ("masks", mask)):
            path = path_with_spaces / "train" / name / f"{index}.tif"
            path.parent.mkdir(parents=True, exist_ok=True)
            layout = {"planarconfig": "contig"} if values.ndim == 3 else {}
            tifffile.imwrite(path, values, photometric="minisblack", **layout)
    run_dir = path_with_spaces / "run"
    flags = [
        *("--strategy=one_device", "--dataset=folder", f"--data_dir={path_with_spaces}"),
        *("--num_classes=2", "--val_fraction=0.3", "--tile=16", "--image_size=16,16"),
        *("--value_range=0,4095", "--base_filters=4", "--depth=1", "--epochs=2", "--quiet"),
        *("--global_batch_size=4", "--learning_rate=0.01", "--notensorboard"),
        f"--run_dir={run_dir}",
    ]
    assert run_command("tfdist.train", run_training, flags, options_class=TrainOptions) == 0
    run = tfdist.load_run(str(run_dir))
    assert run.model.input_shape == (None, 16, 16, channels)
    assert run.info["original_size"] == [16, 16]
    assert (run_dir / "samples" / "predictions.png").exists()

    assert evaluate(f"--run_dir={run_dir}", "--quiet") == 0
    scores = json.loads((run_dir / "evaluation" / "val.json").read_text())
    summary = json.loads((run_dir / "summary.json").read_text())
    assert scores["mean_iou"] == pytest.approx(summary["val_mean_iou"], abs=1e-6)
    assert evaluate(f"--run_dir={run_dir}", "--full_size", "--quiet") == 0

    given = path_with_spaces / "train"
    output = path_with_spaces / "out"
    used = [f"--run_dir={run_dir}", f"--images={given}/images", f"--output={output}", "--quiet"]
    assert predict(*used, f"--masks={given}/masks") == 0
    predictor = tfdist.Predictor(run.model, window=(16, 16))
    for name, image in images.items():
        found = decode_mask((output / "masks" / f"{name}.png").read_bytes())
        scaled = image.astype(np.float32) * np.float32(255 / 4095)
        np.testing.assert_array_equal(found, predictor.predict_mask(scaled))

    exported = path_with_spaces / "exported"
    options = [f"--run_dir={run_dir}", f"--output={exported}", "--quiet"]
    assert run_command("tfdist.export", EXPORT.run, options, options_class=ExportOptions) == 0
    servable = tf.saved_model.load(str(exported / "1"))
    image = images["0"][:, :16]
    expected = keras.ops.argmax(run.model(image[None].astype(np.float32) * (255 / 4095)), -1)
    answer = servable.signatures["tensors"](images=tf.constant(image[None], tf.float32))
    np.testing.assert_array_equal(answer["mask"], expected)
    encoded = tf.constant([tf.io.encode_png(image[..., :3]).numpy()])
    if kind == "png":
        answer = servable.signatures["serving_default"](image_bytes=encoded)
        np.testing.assert_array_equal(answer["mask"], expected)
        encoded = tf.constant([tf.io.encode_png(image.astype(np.uint8)).numpy()])
    message = {"png": "no PNG of 16 bits", "tif": "5 channels of uint16: send them as numbers"}[
        kind
    ]
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        servable.signatures["serving_default"](image_bytes=encoded)
    if kind == "png":
        write_png(path_with_spaces / "other" / "a.png", image.astype(np.uint8)[..., :1])
        used[1:3] = [f"--images={path_with_spaces}/other", f"--output={output}2"]
        assert predict(*used) == 0  # a given range is that of all types
