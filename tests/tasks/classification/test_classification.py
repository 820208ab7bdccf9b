"""Classification: its data, its networks, and what a run says of it."""

import dataclasses
import json
import re
import shutil

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.cli.command import run_command
from tfdist.data.cache import read_examples
from tfdist.errors import TfdistError
from tfdist.runs.options import TrainOptions
from tfdist.tasks.classification.sources import make_class_folder, make_class_tfds, make_drawn
from tfdist.tasks.classification.task import Classification
from tfdist.train import run_training


@pytest.fixture
def folder(path_with_spaces):
    rng = np.random.default_rng(0)
    for split, count in (("train", 6), ("val", 2)):
        for level, name in ((40, "dark"), (200, "light")):
            (path_with_spaces / split / name).mkdir(parents=True)
            for number in range(count):
                image = rng.integers(level - 40, level + 40, (12, 10, 3)).astype("uint8")
                file = path_with_spaces / split / name / f"{number}.png"
                file.write_bytes(tf.io.encode_png(image).numpy())
    return path_with_spaces


def test_a_drawn_example_is_of_the_shape_that_covers_most():
    source = make_drawn("train", (32, 32), 6, 0)
    images, labels = source.load_batch(tf.range(6, dtype=tf.int64))
    _, masks = source.pictures.load_batch(tf.range(6, dtype=tf.int64))
    assert images.shape == (6, 32, 32, 3)
    for label, mask in zip(labels.numpy(), masks.numpy(), strict=True):
        counts = np.bincount(mask.ravel(), minlength=4)[1:]
        assert counts[label] == counts.max()
    assert source.info == {"class_names": ["circle", "square", "triangle"]}


def test_a_directory_holds_a_class(folder):
    source = make_class_folder(str(folder), "train", (6, 5), max_examples=5)
    labels = [int(label) for _, label in read_examples(source)]
    assert labels == [0, 1, 0, 1, 0]
    assert source.class_names == ("dark", "light")
    image, _ = next(read_examples(source))
    assert image.shape == (6, 5, 3)
    assert image.mean() < 100
    other = make_class_folder(str(folder), "val", (6, 5), class_names=("light", "dark"))
    assert next(read_examples(other))[0].mean() > 100


def test_reads_a_data_set_of_tfds(pets_dir, path_with_spaces):
    task = Classification(dataset="tfds:oxford_iiit_pet", data_dir=pets_dir, image_size=(8, 8))
    data = task.make_data(seed=0, quiet=True)
    assert (data.train.num_examples, data.val.num_examples) == (3, 2)
    images, labels = data.train.load_batch(tf.range(3, dtype=tf.int64))
    assert images.shape == (3, 8, 8, 3)
    names = data.info["class_names"]
    assert len(names) == 37
    assert labels.numpy().tolist() == [0, 1, 2]  # as the archive's list says
    assert "3 training and 2 validation examples" in task.describe_data(seed=0).text
    elsewhere = dataclasses.replace(task, data_dir=str(path_with_spaces))
    assert "training will download it" in elsewhere.describe_data(seed=0).text


@pytest.mark.parametrize(
    ("name", "message"),
    [("oxford_iit_pet", "Did you mean oxford_iiit_pet"), ("div2k", "it has no image")],
)
def test_refuses_data_sets_without_classes(path_with_spaces, name, message):
    with pytest.raises(TfdistError, match=re.escape(message)):
        make_class_tfds(name, "train", (8, 8), data_dir=str(path_with_spaces))


@pytest.mark.parametrize("has_train", [True, False])
def test_validation_takes_a_share_where_it_has_no_directory(folder, has_train):
    shutil.rmtree(folder / "val")
    root = folder if has_train else folder / "train"
    if not has_train:
        assert not (root / "train").exists()
    parts = [
        make_class_folder(str(root), split, (6, 5), val_fraction=0.4) for split in ("train", "val")
    ]
    paths = [{path for path, _ in part.files} for part in parts]
    assert not paths[0] & paths[1]
    assert len(paths[0] | paths[1]) == 12
    assert 1 <= len(paths[1]) <= 8
    next(iter((folder / "train" / "dark").iterdir())).unlink()
    again = make_class_folder(str(root), "val", (6, 5), val_fraction=0.4)
    assert {path for path, _ in again.files} <= paths[1]


def test_refuses_a_share_beside_a_directory(folder):
    with pytest.raises(TfdistError, match="has a directory val. Leave out `val_fraction=0.4`"):
        make_class_folder(str(folder), "train", (6, 5), val_fraction=0.4)


def test_refuses_directories_that_are_no_classes(folder):
    with pytest.raises(TfdistError, match="there is no directory '.*test'"):
        make_class_folder(str(folder), "test", (6, 5))
    with pytest.raises(TfdistError, match="directories are dark, light, but `class_names=a,b`"):
        make_class_folder(str(folder), "train", (6, 5), class_names=("a", "b"))
    (folder / "train" / "none").mkdir()
    with pytest.raises(TfdistError, match="none': it has no image"):
        make_class_folder(str(folder), "train", (6, 5))


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("strategy", [["--strategy=mirrored"], ["--strategy=one_device"]])
def test_a_run_learns_and_says_what_it_confuses(folder, strategy):
    flags = [
        "--task=classification",
        "--dataset=folder",
        f"--data_dir={folder}",
        "--image_size=12,10",
        "--global_batch_size=4",
        "--epochs=4",
        "--warmup_steps=0",
        f"--run_dir={folder / 'run'}",
        "--quiet",
        *strategy,
    ]
    assert run_command("tfdist.train", run_training, flags, options_class=TrainOptions) == 0
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert np.sum(summary["confusion"]) == 4
    assert set(summary["per_class_accuracy"]) == {"dark", "light"}
    assert np.trace(summary["confusion"]) / 4 == pytest.approx(summary["val_accuracy"])
    assert {path.name for path in (folder / "run" / "samples").iterdir()} == {
        f"{kind}_{number}.png" for kind in ("best", "worst") for number in range(1, 5)
    }
    page = (folder / "run" / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 8
    assert "Confusion matrix" in page


def test_any_network_of_keras_can_be_trained():
    task = Classification(model="MobileNetV2", image_size=(32, 32))
    model = task.build_model({"class_names": list("abcdef")}, seed=0)
    assert model.output.shape == (None, 6)
    task.compile_model(model, keras.optimizers.SGD(), {"class_names": list("abcdef")})
    x, y = np.full((4, 32, 32, 3), 127.5, "float32"), np.arange(4)
    assert set(model.evaluate(x, y, verbose=0, return_dict=True)) == {
        "loss",
        "accuracy",
        "top_5_accuracy",
    }
    with pytest.raises(TfdistError, match="Unknown `model=MobileNet9`"):
        Classification(model="MobileNet9").build_model({"class_names": ["a", "b"]}, seed=0)
