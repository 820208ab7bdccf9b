"""`--dry_run`: what it says is what training does, and it leaves nothing."""

import json
import pathlib
import re

import keras
import pytest

from tfdist import models
from tfdist.cli.command import run_command
from tfdist.runs.dry_run import estimate_memory
from tfdist.runs.options import TrainOptions
from tfdist.train import run_training

ROOT = pathlib.Path(__file__).parents[2]
SMALL = [
    "--dataset=shapes",
    "--image_size=16,16",
    "--train_examples=40",
    "--val_examples=10",
    "--base_filters=4",
    "--depth=2",
    "--global_batch_size=8",
    "--epochs=2",
]


def dry_run(*flags):
    return run_command(
        "tfdist.train", run_training, [*flags, "--dry_run"], options_class=TrainOptions
    )


def read(capfd):
    out, err = capfd.readouterr()
    assert not err
    return dict(line.split("  ", 1) for line in out.splitlines() if "  " in line)


def test_says_what_would_be_run_and_writes_nothing(path_with_spaces, capfd):
    run = path_with_spaces / "run"
    assert dry_run(*SMALL, "--strategy=mirrored", "--devices=CPU:0,CPU:1", f"--run_dir={run}") == 0
    said = {title: text.strip() for title, text in read(capfd).items()}
    assert said["strategy"] == "mirrored: 2 replicas on CPU:0, CPU:1"
    assert said["global batch"] == "8 examples, at most 4 per replica"
    assert said["data"] == ("shapes, 40 training and 10 validation examples of 16x16, 4 classes")
    assert said["steps"] == "10, 5 per epoch"
    assert said["run directory"] == f"{run}, new"
    assert not run.exists()


def test_says_what_a_tpu_would_pad(tmp_path, capfd):
    flags = [*SMALL, "--strategy=tpu", f"--run_dir={tmp_path}/run"]
    assert dry_run(*flags) == 0
    out, _ = capfd.readouterr()
    assert (
        " layers have outputs that are padded, such as encoder_0_conv_1/kernel with 4 channels"
        in out
    )
    assert "a global batch of 8 fills the tiles on up to 1 core" in out
    assert dry_run(*flags, "--global_batch_size=12") == 0
    assert "a global batch of 12 is padded, too" in capfd.readouterr().out


@pytest.mark.parametrize(("steps", "end"), [(99, "CPU:0"), (100, "when training starts")])
def test_says_that_trials_may_choose_another_strategy(tmp_path, capfd, steps, end):
    assert dry_run(*SMALL, f"--max_steps={steps}", f"--run_dir={tmp_path}/run") == 0
    assert read(capfd)["strategy"].endswith(end)


def test_does_not_search_for_the_batch_size(tmp_path, capfd):
    flags = [*SMALL, "--strategy=one_device", "--global_batch_size=auto"]
    assert dry_run(*flags, f"--run_dir={tmp_path}/run") == 0
    said = {title: text.strip() for title, text in read(capfd).items()}
    assert said["global batch"] == "auto: found when training starts"
    assert said["steps"] == "known once the batch size is found"
    assert said["memory"].startswith("for the smallest batch, about ")


def test_agrees_with_a_run_that_was_done(run_dir, capfd):
    options = json.loads((pathlib.Path(run_dir) / "options.json").read_text())
    summary = json.loads((pathlib.Path(run_dir) / "summary.json").read_text())
    model = keras.saving.load_model(f"{run_dir}/model.keras", compile=False)
    before = sorted(pathlib.Path(run_dir).rglob("*"))
    flags = [
        f"--{name}={','.join(map(str, value)) if isinstance(value, list) else value}"
        for name, value in options["result"].items()
        if value not in (None, [])
    ]
    assert dry_run(*flags, "--strategy=one_device", f"--run_dir={run_dir}") == 0
    said = read(capfd)
    assert f" {summary['steps']}, " in said["steps"]
    assert f"{model.count_params():,} parameters" in said["model"]
    assert said["run directory"].endswith(f"continued after step {summary['steps']}")
    assert sorted(pathlib.Path(run_dir).rglob("*")) == before
    flags += ["--strategy=one_device", f"--run_dir={run_dir}", "--global_batch_size=auto"]
    assert dry_run(*flags) == 0
    assert said == read(capfd)  # with the number that it began with
    assert dry_run(*flags, "--seed=7") == 2
    assert "holds the run of another command: --seed=7" in capfd.readouterr().err


def test_counts_the_replicas_of_a_cluster_without_waiting_for_it(tmp_path, monkeypatch, capfd):
    cluster = {"worker": ["10.0.0.1:2222", "10.0.0.2:2222", "10.0.0.3:2222"]}
    config = {"cluster": cluster, "task": {"type": "worker", "index": 1}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    assert dry_run(*SMALL, f"--run_dir={tmp_path}/run") == 0
    out, _ = capfd.readouterr()
    assert "multi_worker_mirrored: 3 replicas on 3 workers like this one" in out
    assert "8 examples, at most 3 per replica" in out
    assert "worker 1  10.0.0.2:2222  <- this process" in out


def test_estimates_memory_from_what_has_to_be_kept():
    model = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(5, name="only")])
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    memory = estimate_memory(model, 4)
    weights = 4 * (6 * 5 + 5)
    optimizer = weights + 4 * 1 + 8 * 1  # momentum, the learning rate, the count of steps
    assert memory.state == pytest.approx(2 * weights + optimizer, abs=8)
    assert memory.activations == 4 * 4 * 5


def test_counts_the_largest_stage_and_what_is_between_stages():
    model = models.make_model(
        "unet", image_size=(16, 16), num_classes=3, base_filters=4, depth=1, norm="none"
    )
    model.compile("sgd", "mse")
    whole = estimate_memory(model, 2)
    memory = estimate_memory(model, 2, rematerialize=True)
    # All that is computed at the image's size: the rescaled image, six tensors of four channels and
    # one of eight, and the logits.
    assert whole.activations > 4 * 2 * 16 * 16 * (3 + 6 * 4 + 8 + 3)
    assert memory.activations < 0.7 * whole.activations


def test_bad_input_costs_one_line(tmp_path, capfd):
    assert dry_run(*SMALL, f"--run_dir={tmp_path}/run", "--image_size=18,16") == 2
    err = capfd.readouterr().err
    assert "18x16 cannot be halved" in err
    assert len(err.splitlines()) == 1


def test_knows_what_takes_less_memory(tmp_path, capfd):
    flags = [*SMALL, "--norm=group", "--image_size=64,64", f"--run_dir={tmp_path}/run"]
    assert dry_run(*flags) == 0
    whole = read(capfd)
    assert dry_run(*flags, "--micro_batches=4") == 0
    parts = read(capfd)
    assert dry_run(*flags, "--rematerialize") == 0
    again = read(capfd)
    assert parts["global batch"].endswith("at most 8 per replica, in 4 micro-batches")
    find = lambda said: int(re.search(r"(\d+) activations", said["memory"])[1])  # noqa: E731
    assert find(parts) < find(whole)
    assert find(again) < find(whole)
    assert dry_run(*SMALL, f"--run_dir={tmp_path}/run", "--micro_batches=4") == 2
    assert "computes statistics over the examples" in capfd.readouterr().err
