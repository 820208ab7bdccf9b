"""The command: what it leaves, how it is continued, and what bad input costs."""

import contextlib
import io
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.cli.command import run_command
from tfdist.runs.options import TrainOptions
from tfdist.train import run_training

ROOT = pathlib.Path(__file__).parents[1]
SMALL = [
    "--dataset=shapes",
    "--image_size=16,16",
    "--train_examples=40",
    "--val_examples=10",
    "--base_filters=4",
    "--depth=1",
    "--global_batch_size=8",
    "--epochs=2",
    "--seed=4",
]
TWO_CPUS = ["--strategy=mirrored", "--devices=CPU:0,CPU:1"]
ONE_DEVICE = [*SMALL, "--strategy=one_device"]
SHORT = [*ONE_DEVICE, "--max_steps=6"]  # ends within an epoch


def train(*arguments):
    return run_command("tfdist.train", run_training, list(arguments), options_class=TrainOptions)


def start(*arguments, **options):
    return subprocess.Popen(
        [sys.executable, "-m", "tfdist.train", *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run: its directory, and the last line that it printed."""
    path = tmp_path_factory.mktemp("finished") / "unet[v1]"
    os.makedirs(path / "logs")  # the launcher's, which come before the run
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert train(*SHORT, "--log_every=2", f"--run_dir={path}") == 0
    return path, out.getvalue().splitlines()[-1]


def test_names_that_look_like_patterns(finished, tmp_path, capfd):
    run = shutil.copytree(finished[0], tmp_path / "unet[v2]")
    assert train(*ONE_DEVICE, "--max_steps=15", f"--run_dir={run}", "--quiet") == 0
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["epochs"], summary["resumed_from_step"]) == (3, 6)
    assert not capfd.readouterr().err


def test_leaves_everything_in_the_run_directory(path_with_spaces, capfd):
    run = path_with_spaces / "run"
    assert train(*SMALL, *TWO_CPUS, "--profile=7,8", f"--run_dir={run}") == 0
    out, err = capfd.readouterr()
    assert f"Everything is in {run}" in out.splitlines()[-1]
    begun = re.findall(r"^\d\d:\d\d:\d\d ([A-Z].*) \.\.\.$", out, re.MULTILINE)
    assert begun[:4] == [
        "Loading TensorFlow",
        "Reading the data",
        "Building the model: unet",
        "Tracing the training step of 2 replicas",
    ]
    assert begun[-1] == "Evaluating and saving the best model"
    assert re.search(
        r"at most \d{2,} MiB of memory \(CPU\); of the time, \d+% input, \d+% host, the rest "
        r"computation, of which all-reduce at most \d+%",
        out.splitlines()[-1],
    )
    assert not err.strip()
    summary = json.loads((run / "summary.json").read_text())
    assert summary["strategy"] == "mirrored"
    assert (summary["replicas"], summary["global_batch_size"]) == (2, 8)
    assert (summary["steps"], summary["epochs"], summary["resumed_from_step"]) == (10, 2, None)
    assert 0 < summary["val_pixel_accuracy"] <= 1
    assert set(summary["per_class_iou"]) == {"background", "circle", "square", "triangle"}
    assert min(summary["examples_per_second"], summary["peak_memory_bytes"]) > 0
    assert len(summary["weights_sha256"]) == 64
    assert min(summary["mfu"], summary["flops_per_second"]) > 0
    assert summary["first_step_s"] > 0
    assert summary["all_reduce_fraction"] > 0
    assert 0 < summary["input_fraction"] < 1 - summary["host_fraction"] < 1
    options = json.loads((run / "options.json").read_text())
    about = options["about"]
    assert (about["model_name"], about["dataset"]) == ("unet", "shapes")
    assert about["parameters"] > about["trainable_parameters"] > 1000
    assert set(about["examples"]) == {"training", "validation"}
    assert about["command"].startswith("python ")
    assert "cores" in about["machine"]
    assert options["task"]["image_size"] == [16, 16]
    assert options["versions"]["tensorflow"] == tf.__version__
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["epoch"]) for line in lines] == [(5, 1), (10, 2)]
    within = [json.loads(line) for line in (run / "steps.jsonl").read_text().splitlines()]
    assert [line["step"] for line in within] == list(range(1, 11))
    assert within[4]["loss"] == pytest.approx(lines[0]["loss"], rel=1e-5)
    assert {"loss", "mean_iou", "val_mean_iou", "val_iou/circle"} <= lines[0].keys()
    assert list((run / "tensorboard").rglob("*tfevents*"))
    assert len(list((run / "tensorboard").glob("plugins/profile/*/*.xplane.pb"))) == 1
    assert np.sum(summary["confusion"]) == 16 * 16 * options["task"]["val_examples"]
    assert "finished after 10 steps" in (run / "report.html").read_text()
    samples = sorted(path.name for path in (run / "samples").iterdir())
    assert samples == ["predictions.png"]
    picture = tf.io.decode_png((run / "samples" / "predictions.png").read_bytes())
    headings, legend = 18, 18
    assert picture.shape == (headings + 6 * 132 + legend, 3 * 132, 3)
    model = keras.saving.load_model(run / "model.keras")
    assert model(np.zeros((1, 16, 16, 3))).shape == (1, 16, 16, 4)
    with zipfile.ZipFile(run / "model.keras") as file:
        modules = set(re.findall(r'"module": "(\w+)', file.read("config.json").decode()))
    assert modules <= {"keras", "builtins"}  # Keras alone can load it


@pytest.mark.thorough
def test_the_strategy_does_not_change_what_is_trained(tmp_path, capfd):
    for strategy in (["--strategy=one_device"], TWO_CPUS):
        options = [*SMALL, *strategy, "--precision=float64", "--quiet"]
        assert train(*options, f"--run_dir={tmp_path / strategy[0]}") == 0
    assert capfd.readouterr().out == ""
    one, two = (
        json.loads((tmp_path / name / "summary.json").read_text())
        for name in ("--strategy=one_device", "--strategy=mirrored")
    )
    for summary in (one, two):
        peaks = summary["peak_memory_bytes_per_device"]
        assert peaks == {"CPU": summary["peak_memory_bytes"]}  # virtual devices share it
    for name in ("loss", "val_loss", "val_mean_iou"):
        assert one[name] == pytest.approx(two[name], rel=1e-9)


def test_ctrl_c_leaves_a_checkpoint_from_which_the_same_command_goes_on(tmp_path, optimized_graphs):
    options = [*ONE_DEVICE, "--epochs=10", "--deterministic"]
    options += ["--val_examples=2", "--notensorboard"]
    assert train(*options, f"--run_dir={tmp_path}/whole", "--quiet") == 0
    stopped = [*options, f"--run_dir={tmp_path}/stopped"]
    process = start(*stopped)
    log = tmp_path / "stopped" / "metrics.jsonl"
    deadline = time.monotonic() + 1000
    while not log.exists() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=1000)
    assert process.returncode == 130, err
    assert "The same command continues the run" in err
    assert train(*stopped, "--quiet") == 0
    whole, continued = (
        json.loads((tmp_path / name / "summary.json").read_text()) for name in ("whole", "stopped")
    )
    assert 0 < continued["resumed_from_step"] < 50
    assert continued["weights_sha256"] == whole["weights_sha256"]
    steps = [json.loads(line)["step"] for line in log.read_text().splitlines()]
    assert steps == list(range(5, 55, 5))


def test_the_average_of_the_weights_is_evaluated_and_saved(finished, tmp_path):
    found, plain = tmp_path / "average", finished[0]
    flags = ["--ema_momentum=0.8", "--notensorboard", "--quiet"]
    assert train(*SHORT, *flags, f"--run_dir={found}") == 0
    lines = [json.loads(line) for line in (found / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((found / "summary.json").read_text())
    (best,) = [line for line in lines if line["step"] == summary["best_step"]]
    assert summary["val_loss"] == pytest.approx(best["val_loss"], rel=1e-5)
    model, other = (keras.saving.load_model(run / "model.keras") for run in (found, plain))
    assert {x.momentum for x in model.layers if hasattr(x, "moving_mean")} == {0.8}
    assert not np.array_equal(model.trainable_weights[0], other.trainable_weights[0])


def test_repeating_a_finished_command_changes_nothing(finished, capfd, monkeypatch):
    run, end = finished
    monkeypatch.setattr("tfdist.runs.training.find_commit", lambda: "another")

    def read():
        files = [path for path in run.rglob("*") if path.is_file() and "tfevents" not in path.name]
        return {path: path.read_bytes() for path in files}

    before = read()
    assert train(*SHORT, "--log_every=2", f"--run_dir={run}") == 0
    assert read() == before
    assert capfd.readouterr().out.splitlines()[-1] == end


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path, capfd):
    arguments = ["--optimizer=sgd", "--learning_rate=1e30", "--clip_norm=0", "--quiet"]
    assert train(*SMALL, f"--run_dir={tmp_path}", *arguments) == 1
    _check_one_line(capfd, "The loss of step")


def test_logs_within_an_epoch_on_request(finished):
    lines = (finished[0] / "metrics.jsonl").read_text().splitlines()
    lines = [json.loads(line) for line in lines]
    assert [(line["step"], "val_loss" in line) for line in lines] == [
        (2, False),
        (4, False),
        (5, True),
        (6, False),
        (6, True),
    ]


def test_help_answers_at_once(capfd):
    assert train("--help") == 0
    assert "--strategy=NAME" in capfd.readouterr().out


def _check_one_line(capfd, *messages):
    out, err = capfd.readouterr()
    assert not re.sub(r"^[\d:]{8} [A-Z].* \.\.\.\n", "", out, flags=re.MULTILINE)
    # libjpeg has a line of its own for a broken file.
    lines = [line for line in err.splitlines() if "JPEG library" not in line]
    assert len(lines) == 1, err
    assert lines[0].startswith("tfdist: ")
    for message in messages:
        assert message in err
