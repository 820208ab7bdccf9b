"""From a folder of images to a servable, nothing on the disk: all of it on `ram://`."""

import json
import os
import signal
import threading
import uuid

import numpy as np
import pytest
import tensorflow as tf

from tfdist.cli.command import run_command
from tfdist.runs.options import TrainOptions
from tfdist.stopping import EXIT_INTERRUPTED
from tfdist.tasks.commands import ExportOptions
from tfdist.tasks.segmentation.inference.commands import (
    EXPORT,
    run_evaluation,
    run_prediction,
)
from tfdist.tasks.segmentation.inference.options import EvaluateOptions, PredictOptions
from tfdist.tasks.segmentation.masks import decode_mask
from tfdist.tasks.segmentation.shapes import make_shapes
from tfdist.train import run_training

STEPS = 80
FEW_STEPS = 10
FLAGS = [
    "--strategy=one_device",
    "--dataset=folder",
    "--num_classes=4",
    "--image_size=16,16",
    "--class_weights=sqrt",
    "--base_filters=4",
    "--depth=2",
    "--global_batch_size=4",
    "--deterministic",
    "--quiet",
]


@pytest.fixture(scope="module")
def root():
    """A directory in memory, with a data set in it."""
    root = f"ram://{uuid.uuid4().hex} with spaces"
    for split, count in (("train", 40), ("val", 4)):
        for index in range(count):
            example = make_shapes(split, (16, 16), count, 3).load(tf.constant(index, tf.int64))
            image, mask = (np.round(part).astype(np.uint8) for part in example)
            write(f"{root}/data/{split}/images/{index}.jpg", tf.io.encode_jpeg(image).numpy())
            png = tf.io.encode_png(mask[..., None]).numpy()
            write(f"{root}/data/{split}/masks/{index}.png", png)
    return root


def write(path, content):
    tf.io.gfile.makedirs(os.path.dirname(path))
    with tf.io.gfile.GFile(path, "wb") as file:
        file.write(content)


def read(path):
    with tf.io.gfile.GFile(path, "rb") as file:
        return file.read()


def train(root, run_dir, steps=STEPS):
    flags = [*FLAGS, f"--data_dir={root}/data", f"--run_dir={run_dir}", f"--max_steps={steps}"]
    return run_command("tfdist.train", run_training, flags, options_class=TrainOptions)


def press_ctrl_c_once_there_is(path):
    """Sends this process SIGINT after a file appeared, from a thread that is returned."""

    def wait():
        pause = threading.Event()
        while not pause.wait(0.01):
            if tf.io.gfile.exists(path):
                os.kill(os.getpid(), signal.SIGINT)
                return

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


@pytest.fixture(scope="module")
def run_dir(root):
    """A run that was stopped in the middle and continued."""
    path = f"{root}/run"
    waiting = press_ctrl_c_once_there_is(f"{path}/metrics.jsonl")
    assert train(root, path) == EXIT_INTERRUPTED
    waiting.join()
    assert train(root, path) == 0
    return path


@pytest.mark.thorough
def test_a_run_that_was_stopped_ends_with_the_same_bits(root, run_dir, path_with_spaces):
    assert train(root, path_with_spaces / "whole") == 0
    whole = json.loads((path_with_spaces / "whole" / "summary.json").read_text())
    summary = json.loads(read(f"{run_dir}/summary.json"))
    assert 0 < summary["resumed_from_step"] < STEPS
    assert summary["weights_sha256"] == whole["weights_sha256"]
    assert summary["val_mean_iou"] == whole["val_mean_iou"]


@pytest.mark.thorough
def test_the_run_directory_is_whole(run_dir):
    lines = [json.loads(line) for line in read(f"{run_dir}/metrics.jsonl").splitlines()]
    assert [line["step"] for line in lines] == list(range(10, STEPS + 10, 10))
    assert json.loads(read(f"{run_dir}/options.json"))["run"]["run_dir"] == run_dir
    assert tf.io.decode_png(read(f"{run_dir}/samples/predictions.png")).shape[2] == 3
    for part in ("train", "validation"):
        steps = [
            event.step
            for path in tf.io.gfile.glob(f"{run_dir}/tensorboard/{part}/*")
            for event in tf.compat.v1.train.summary_iterator(path)
            if any(value.tag == "loss" for value in event.summary.value)
        ]
        assert sorted(steps) == [line["step"] for line in lines], part


def test_the_run_is_evaluated_exported_and_predicts(root):
    run_dir = f"{root}/short run"
    assert train(root, run_dir, FEW_STEPS) == 0
    flags = [f"--run_dir={run_dir}", "--quiet"]
    assert run_command("tfdist.evaluate", run_evaluation, flags, options_class=EvaluateOptions) == 0
    scores = json.loads(read(f"{run_dir}/evaluation/val.json"))
    summary = json.loads(read(f"{run_dir}/summary.json"))
    assert scores["mean_iou"] == pytest.approx(summary["val_mean_iou"], abs=1e-6)

    export = [*flags, f"--output={root}/servable/"]
    assert run_command("tfdist.export", EXPORT.run, export, options_class=ExportOptions) == 0
    images = [f"{root}/data/val/images/{index}.jpg" for index in range(4)]
    servable = tf.saved_model.load(f"{root}/servable/1")
    answer = servable.signatures["serving_default"](tf.constant([read(path) for path in images]))

    predict = [*flags, f"--images={root}/data/val/images/*.jpg", f"--output={root}/predicted"]
    assert run_command("tfdist.predict", run_prediction, predict, options_class=PredictOptions) == 0
    masks = [decode_mask(read(f"{root}/predicted/masks/{index}.png")) for index in range(4)]
    np.testing.assert_array_equal(answer["mask"], masks)
