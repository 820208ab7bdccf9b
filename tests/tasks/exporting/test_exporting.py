"""Files of LiteRT and ONNX: they predict as the model does, or are refused."""

import dataclasses
import importlib.util
import json
import os
import pathlib

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.cli.command import run_command
from tfdist.runs.options import TrainOptions
from tfdist.tasks.commands import run_task_command
from tfdist.tasks.exporting.conversion import convert_model, to_float32
from tfdist.tasks.exporting.scoring import open_file, score_examples
from tfdist.tasks.segmentation.shapes import make_shapes
from tfdist.train import run_training

FORMATS = [("litert", "none"), ("litert", "int8"), ("litert", "float16"), ("onnx", "none")]
ENDINGS = {"litert": "tflite", "onnx": "onnx"}


def export(*flags):
    return run_task_command("export", flags)


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize(("file_format", "quantize"), FORMATS)
def test_a_file_predicts_as_the_model_does(file_format, quantize, run_dir, path_with_spaces, capfd):
    path = path_with_spaces / f"model.{ENDINGS[file_format]}"
    flags = [f"--format={file_format}", f"--quantize={quantize}", f"--output={path}"]
    assert export(f"--run_dir={run_dir}", *flags, "--max_lost=0.1") == 0
    out, err = capfd.readouterr()
    assert not err
    assert "mean_iou" in out
    assert out.splitlines()[-1].startswith(f"{path} loses ")
    record = json.loads((path_with_spaces / f"{path.name}.json").read_text())
    assert record["bytes"] == os.path.getsize(path)
    assert record["info"]["class_names"] == ["background", "circle", "square", "triangle"]
    summary = json.loads(pathlib.Path(run_dir, "summary.json").read_text())
    assert record["keras"]["logs"]["mean_iou"] == pytest.approx(summary["val_mean_iou"], rel=1e-3)
    x = make_shapes("val", (16, 16), 1).load_batch(tf.constant([0]))[0].numpy()
    model = keras.saving.load_model(f"{run_dir}/model.keras", compile=False)
    expected = model(x).numpy()
    found = open_file(str(path), file_format)(x)
    tolerance = {"none": 1e-5, "float16": 1e-2, "int8": 0.1}[quantize]
    difference = np.abs(found - expected).mean() / np.ptp(expected)
    assert difference < tolerance
    assert difference > 1e-5 or quantize == "none"


@pytest.mark.thorough
def test_a_file_that_computes_something_else_is_refused(
    run_dir, path_with_spaces, monkeypatch, capfd
):
    """The file is of another model, as a converter with a defect would write it."""

    def convert_other(model, path, **options):
        other = keras.models.clone_model(model)
        other.set_weights([0 * weight for weight in model.get_weights()])
        convert_model(other, path, **options)

    monkeypatch.setattr("tfdist.tasks.exporting.command.convert_model", convert_other)
    path = path_with_spaces / "model.tflite"
    flags = [f"--run_dir={run_dir}", "--format=litert", f"--output={path}", "--quiet"]
    assert export(*flags) == 2
    err = capfd.readouterr().err
    assert err.startswith(f"tfdist: Refused to write --output={path}: its outputs differ")
    assert len(err.splitlines()) == 1
    assert not list(path_with_spaces.iterdir())


@pytest.mark.thorough
def test_a_file_that_loses_too_much_is_refused(run_dir, path_with_spaces, monkeypatch, capfd):
    """The file of this small model loses nothing, so a hundredth is taken off its score."""

    def score_lower(model, predict, examples):
        score = score_examples(model, predict, examples)
        lower = 0.0 if predict == model.predict_on_batch else 0.01
        return dataclasses.replace(score, logs={"mean_iou": score.logs["mean_iou"] - lower})

    monkeypatch.setattr("tfdist.tasks.exporting.command.score_examples", score_lower)
    path = path_with_spaces / "model.tflite"
    flags = [f"--run_dir={run_dir}", "--format=litert", f"--output={path}", "--quiet"]
    assert export(*flags, "--max_lost=1e-4") == 2
    assert "its mean_iou is " in capfd.readouterr().err
    assert not list(path_with_spaces.iterdir())


def test_a_missing_package_costs_one_line(run_dir, path_with_spaces, monkeypatch, capfd):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "tf2onnx" else find(name)
    )
    flags = ["--format=onnx", f"--output={path_with_spaces}/model.onnx"]
    assert export(f"--run_dir={run_dir}", *flags) == 2
    assert "Run `pip install 'tfdist[onnx]'`." in capfd.readouterr().err


def test_models_of_mixed_precision_become_float32(path_with_spaces):
    keras.utils.set_random_seed(0)
    layers = [
        keras.layers.Conv2D(4, 3, dtype="mixed_bfloat16"),
        keras.layers.GlobalAveragePooling2D(dtype="mixed_bfloat16"),
        keras.layers.Dense(3, dtype="float32"),
    ]
    model = keras.Sequential([keras.Input((8, 8, 3)), *layers])
    path = str(path_with_spaces / "model.tflite")
    convert_model(to_float32(model), path, file_format="litert")
    x = np.random.default_rng(0).uniform(size=(1, 8, 8, 3)).astype(np.float32)
    np.testing.assert_allclose(open_file(path, "litert")(x), model(x), atol=0.02)


@pytest.mark.thorough
def test_a_run_of_another_task_is_exported_as_well(path_with_spaces):
    run, path = path_with_spaces / "run", path_with_spaces / "model.tflite"
    flags = [
        "--task=classification",
        "--image_size=32,32",
        "--train_examples=64",
        "--val_examples=16",
        "--global_batch_size=16",
        "--epochs=2",
        "--notensorboard",
        "--quiet",
        f"--run_dir={run}",
    ]
    assert run_command("tfdist.train", run_training, flags, options_class=TrainOptions) == 0
    flags = ["--format=litert", "--quantize=int8", "--max_lost=0.2", "--quiet"]
    assert export(f"--run_dir={run}", f"--output={path}", *flags) == 0
    record = json.loads((path_with_spaces / "model.tflite.json").read_text())
    assert record["file"]["logs"]["accuracy"] == pytest.approx(
        record["keras"]["logs"]["accuracy"], abs=0.2
    )
