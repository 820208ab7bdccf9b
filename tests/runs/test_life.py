"""A run that goes on for longer, stops early, or begins with another one's weights."""

import json
import shutil

import keras
import pytest

from tests import zoo
from tfdist.cli.command import run_command
from tfdist.runs.options import TrainOptions
from tfdist.train import run_training

SMALL = [
    "--strategy=one_device",
    "--dataset=shapes",
    "--image_size=16,16",
    "--train_examples=16",
    "--val_examples=4",
    "--base_filters=4",
    "--depth=1",
    "--global_batch_size=8",
    "--notensorboard",
    "--warmup_steps=0",
    "--schedule=constant",
]


def train(run, *flags, status=0, small=SMALL):
    arguments = [*small, f"--run_dir={run}", *flags]
    assert (
        run_command("tfdist.train", run_training, arguments, options_class=TrainOptions) == status
    )
    return json.loads((run / "summary.json").read_text()) if status == 0 else None


@pytest.mark.thorough
def test_a_finished_run_goes_on_for_more_epochs(tmp_path, capsys):
    whole = train(tmp_path / "whole", "--epochs=3")
    assert train(tmp_path / "parts", "--epochs=1")["steps"] == 2
    parts = train(tmp_path / "parts", "--epochs=3")
    assert (parts["steps"], parts["epochs"], parts["resumed_from_step"]) == (6, 3, 2)
    assert parts["weights_sha256"] == whole["weights_sha256"]
    lines = (tmp_path / "parts" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["epoch"] for line in lines] == [1, 2, 3]
    train(tmp_path / "parts", "--epochs=2", status=2)
    assert "--epochs=2 (there: 3)" in capsys.readouterr().err


def test_a_run_that_other_versions_began_is_named_as_such(run_dir, tmp_path, capsys):
    run = shutil.copytree(run_dir, tmp_path / "run")
    options = json.loads((run / "options.json").read_text())
    options["versions"]["keras"] = "3.13.2"
    (run / "options.json").write_text(json.dumps(options))
    train(run, small=zoo.SMALL_RUN)  # a repeated command changes nothing
    assert "within rounding" not in capsys.readouterr().err
    train(run, "--epochs=5", small=zoo.SMALL_RUN)
    said = f"but equal within rounding: keras was 3.13.2 and is {keras.__version__}."
    assert capsys.readouterr().err.count(said) == 1


def test_a_run_that_is_not_finished_keeps_its_length(run_dir, tmp_path, capsys):
    run = shutil.copytree(run_dir, tmp_path / "run")
    (run / "summary.json").unlink()
    train(run, "--epochs=5", status=2, small=zoo.SMALL_RUN)
    assert "--epochs=5 (there: 4)" in capsys.readouterr().err


def test_stops_when_nothing_gets_better(tmp_path):
    flags = ("--epochs=9", "--early_stopping=2", "--learning_rate=1e-30", "--norm=group")
    found = train(tmp_path, *flags)
    assert (found["epochs"], found["steps"]) == (3, 6)
    assert train(tmp_path, *flags) == found


@pytest.mark.thorough
def test_begins_with_the_weights_of_another_run(tmp_path, capsys):
    first = train(tmp_path / "first", "--epochs=2", "--learning_rate=1e-2")
    flags = ("--epochs=1", "--learning_rate=1e-30", f"--init_from={tmp_path / 'first'}")
    second = train(tmp_path / "second", *flags)
    assert f"weights from {tmp_path / 'first'}." in capsys.readouterr().out
    # Batch normalization's averages move on, a little, without any training.
    assert second["val_mean_iou"] == pytest.approx(first["val_mean_iou"], abs=0.1)
    shutil.rmtree(tmp_path / "first")
    assert train(tmp_path / "second", *flags) == second
    train(tmp_path / "third", *flags, status=2)
    assert "--init_from" in capsys.readouterr().err


def test_refuses_the_weights_of_another_network(run_dir, tmp_path, capsys):
    flags = ("--task=classification", f"--init_from={run_dir}")
    small = [flag for flag in SMALL if not flag.startswith(("--base_filters", "--depth"))]
    arguments = [*small, *flags, f"--run_dir={tmp_path / 'second'}"]
    assert run_command("tfdist.train", run_training, arguments, options_class=TrainOptions) == 2
    assert "by name and shape. Name a run of the same network" in capsys.readouterr().err
    assert not (tmp_path / "second" / "options.json").exists()
