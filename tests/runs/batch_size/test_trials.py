"""Real trials within real limits, and runs of `--global_batch_size=auto`."""

import functools
import json
import pathlib
import resource
import subprocess
import sys
import time

import pytest

from tfdist.cli.command import run_command
from tfdist.memory import FreeMemory
from tfdist.runs.batch_size.trials import run_trial
from tfdist.runs.options import TrainOptions
from tfdist.strategies.options import make_strategy_options
from tfdist.tasks.data import to_sources
from tfdist.tasks.registry import make_task_options
from tfdist.train import run_training

ROOT = pathlib.Path(__file__).parents[3]
MIB = 2**20
SMALL = TrainOptions(
    strategy=make_strategy_options(strategy="one_device"),
    task=make_task_options(
        image_size=(64, 64), base_filters=16, depth=3, train_examples=40, val_examples=8
    ),
)


@functools.cache
def make_data():
    return to_sources(SMALL.task.select().make_data(seed=0, quiet=True))


def test_a_trial_ends_at_its_limit():
    trial = run_trial(SMALL, 8, data=make_data(), free=FreeMemory(200 * MIB, "here"))
    assert trial.usage is None
    assert trial.problem == "the trial was stopped at 180 MiB"


@pytest.mark.thorough
def test_a_trial_does_not_outlive_what_started_it():
    code = (
        "from tests.runs.batch_size.test_trials import *; "
        "run_trial(SMALL, 8, data=make_data(), free=FreeMemory(2**33, 'here'))"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT) as process:
        children = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children")
        wait_for(lambda: children.read_text(), seconds=60)
        trial = int(children.read_text())
        process.kill()
    wait_for(lambda: not is_running(trial), seconds=8)  # before it has even imported TensorFlow


def train(*flags):
    return run_command(
        "tfdist.train",
        run_training,
        ["--global_batch_size=auto", *flags],
        options_class=TrainOptions,
    )


def test_where_not_even_one_example_fits_nothing_is_written(tmp_path, capfd):
    before = resource.getrlimit(resource.RLIMIT_RSS)
    resource.setrlimit(resource.RLIMIT_RSS, (MIB, before[1]))
    try:
        assert train(f"--run_dir={tmp_path / 'run'}", "--strategy=one_device", "--quiet") == 2
    finally:
        resource.setrlimit(resource.RLIMIT_RSS, before)
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith(
        "tfdist: --global_batch_size=auto: not even a batch of 1 fits: the trial was stopped at "
        "0 MiB (0 MiB free below `ulimit -m`). Free memory,"
    )
    assert len(err.splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_what_training_refuses_ends_the_search(tmp_path, capfd):
    flags = ["--strategy=one_device", "--norm=batch", "--micro_batches=2", "--image_size=32,32"]
    assert train(*flags, f"--run_dir={tmp_path / 'run'}", "--quiet") == 2
    err = capfd.readouterr().err
    assert "computes statistics over the examples" in err
    assert "not even" not in err
    assert len(err.splitlines()) == 1


def wait_for(is_so, *, seconds):
    until = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < until, "timed out"
        time.sleep(0.02)


def is_running(pid):
    try:
        state = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


FAILED_ALLOCATION = """
import resource
from tests.runs.batch_size.test_trials import SMALL, make_data
from tfdist.runs.batch_size.trials import run_trial
from tfdist.memory import FreeMemory
resource.setrlimit(resource.RLIMIT_DATA, (3 * 2**29, 3 * 2**29))
print(run_trial(SMALL, 300, data=make_data(), free=FreeMemory(2**32, 'here')).problem)
"""


@pytest.mark.cluster
def test_a_failed_allocation_ends_the_trial_alone():
    done = subprocess.run(
        [sys.executable, "-c", FAILED_ALLOCATION], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] in (
        "an allocation failed",
        "the trial was ended by SIGABRT",
        "the trial was ended by SIGSEGV",
    )


@pytest.mark.cluster
def test_a_run_trains_within_the_limit_and_goes_on_with_the_number_found(tmp_path):
    limit = 1800 * MIB

    def train_a_step(*, is_limited):
        command = [sys.executable, "-m", "tfdist.train", f"--run_dir={tmp_path / 'run'}"]
        command += ["--strategy=mirrored", "--virtual_devices=2", "--notensorboard"]
        command += ["--global_batch_size=auto", "--max_steps=1"]
        # Much to remember, little to compute.
        command += ["--image_size=256,256", "--base_filters=4", "--depth=1"]
        command += ["--train_examples=2000", "--val_examples=2"]
        done = subprocess.run(
            command,
            cwd=ROOT,
            capture_output=True,
            text=True,
            preexec_fn=limit_memory if is_limited else None,
        )
        assert done.returncode == 0, done.stderr
        options = json.loads((tmp_path / "run" / "options.json").read_text())
        summary = json.loads((tmp_path / "run" / "summary.json").read_text())
        assert options["result"]["global_batch_size"] == summary["global_batch_size"]
        assert options["training"]["global_batch_size"] == summary["global_batch_size"]
        return done.stdout, summary

    def limit_memory():
        resource.setrlimit(resource.RLIMIT_RSS, (limit, limit))

    out, summary = train_a_step(is_limited=True)
    size = summary["global_batch_size"]
    assert 2 < size < 1000
    assert size % 2 == 0
    assert f"from now on, use --global_batch_size={size}." in out
    assert summary["peak_memory_bytes"] < limit
    out, summary = train_a_step(is_limited=False)
    assert summary["global_batch_size"] == size
    assert "--global_batch_size=auto" not in out
