"""`python -m tfdist.plan`; tests/test_errors.py has what it refuses."""

import json
import os
import shlex
import subprocess
import sys

import pytest

from tfdist.cli.flags import parse_flags
from tfdist.plan.__main__ import main
from tfdist.runs.options import TrainOptions

SMALL = "--dataset=shapes --image_size=32,32 --base_filters=8 --depth=2 --train_examples=1000"


@pytest.fixture
def plan(monkeypatch, capsys):
    """Runs the command in this process; returns what it prints."""

    def run(flags, train=f"{SMALL} --global_batch_size=64"):
        monkeypatch.setattr("sys.argv", ["plan", *shlex.split(flags), "--", *shlex.split(train)])
        status = main()
        out, err = capsys.readouterr()
        assert status == 0, err
        return out

    return run


def test_the_table_and_the_recommendation(plan):
    text = plan("--hardware=a100 --workers=2 --price_per_hour=2")
    lines = text.splitlines()
    assert lines[0].startswith("NVIDIA A100 SXM 80 GB, float32: ")
    names = " ".join(lines)
    for name in ("one_device", "mirrored", "central_storage", "parameter_server", "local_sgd"):
        assert f"{name} " in names
    assert "one_device + layers x2" in text
    command = next(line for line in lines if line.startswith("  python -m tfdist."))
    train = command.partition(" -- ")[2] or command.partition("tfdist.train ")[2]
    options = parse_flags(TrainOptions, shlex.split(train))
    options.strategy.select()
    assert options.training.global_batch_size == 64


@pytest.mark.parametrize("given", ["", "--placement=strips --grid=2,1", "--stages=a --mesh=data:2"])
def test_every_setup_is_a_command_that_train_accepts(given):
    from tfdist.plan.hardware import load_hardware
    from tfdist.plan.setup import list_setups
    from tfdist.plan.training_command import make_command
    from tfdist.plan.workload import Workload

    hardware, workload = load_hardware("a100"), Workload(layers=(), global_batch_size=64)
    setups = list_setups(hardware, workload, workers=2, devices=4)
    assert len({setup.placement for setup in setups}) == 4
    for setup in setups:
        command = make_command(setup, parse_flags(TrainOptions, []), shlex.split(given), hardware)
        flags = command.partition("tfdist.train ")[2] or command.partition(" -- ")[2]
        options = parse_flags(TrainOptions, shlex.split(flags))
        assert options.strategy.strategy == setup.strategy
        options.strategy.select()
        options.placement.select()


def test_json(plan):
    found = json.loads(plan("--hardware=h100 --json --sweep=workers=1..8 --simulate"))
    assert {row["setup"]["workers"] for row in found["estimates"]} == {1, 2, 4, 8}
    assert found["model"]["global_batch_size"] == 64
    assert found["recommendation"]["command"].startswith("python -m tfdist.")
    assert 0.5 < found["simulation"]["failures"]["goodput"] < 1
    assert found["simulation"]["stragglers"]["even"] >= 1


def test_a_slow_worker_holds_up_synchronous_steps(plan):
    found = json.loads(plan("--hardware=h100 --json --workers=4 --simulate --slow_worker=4"))
    rates = found["simulation"]["stragglers"]
    assert rates["stragglers"] == pytest.approx(4, rel=0.2)
    assert rates["asynchronous, twice in flight"] < rates["stragglers"]
    assert "and one worker always 4 times as long" in found["simulation"]["text"]["Stragglers"]


def test_batch_normalization_cannot_be_split_into_micro_batches(plan):
    with_batches = plan("--hardware=v100 --workers=1 --devices_per_worker=2")
    assert "micro-batches" not in with_batches
    groups = plan(
        "--hardware=v100 --workers=1 --devices_per_worker=2",
        f"{SMALL} --norm=group --global_batch_size=64",
    )
    assert "one_device + layers x2, 8 micro-batches" in groups


def test_flags_that_the_recommended_strategy_does_not_take_are_dropped(plan):
    text = plan(
        "--hardware=k80 --workers=1 --devices_per_worker=2",
        f"{SMALL} --global_batch_size=64 --strategy=local_sgd --sync_every 4 --epochs=3",
    )
    command = next(line for line in text.splitlines() if line.startswith("  python -m"))
    assert "--strategy=local_sgd" not in command
    assert "sync_every" not in command
    assert "--epochs=3" in command


@pytest.mark.cluster
def test_calibration_measures_this_machine(path_with_spaces):
    path = path_with_spaces / "this machine.toml"
    # Sixteen processes trace this model.
    train = shlex.split(SMALL.replace("--depth=2", "--depth=1"))
    train += ["--val_examples=8", "--global_batch_size=8"]
    command = [sys.executable, "-m", "tfdist.plan"]
    done = subprocess.run(
        [*command, f"--calibrate={path}", "--", *train],
        capture_output=True,
        text=True,
        timeout=1000,
    )
    assert done.returncode == 0, done.stderr
    done = subprocess.run(
        [*command, f"--hardware={path}", "--json", "--workers=2", "--", *train],
        capture_output=True,
        text=True,
        timeout=1000,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    measured, *of_half = found["hardware"]["measured"]
    assert measured["share"] == 1
    cores = len(os.sched_getaffinity(0))
    assert [m["share"] for m in of_half] == ([-(-cores // 2) / cores] if cores > 1 else [])
    alone = next(row for row in found["estimates"] if row["name"] == "one_device")
    assert alone["step_s"] == pytest.approx(measured["step_s"] + 8 * measured["example_s"])


def test_the_page_has_curves_and_a_table(plan, path_with_spaces):
    path = path_with_spaces / "a plan.html"
    plan(f"--hardware=a100 --workers=2 --price_per_hour=2 --html='{path}' --quiet")
    page = path.read_text()
    for text in ("Recommendation", "efficiency, %", "price of an epoch", "parameter_server"):
        assert text in page
    assert "http" not in page.partition("<main>")[2].partition("<script>")[0]
