"""A cluster of two hosts, which are network namespaces with a cable, by --hosts and --task."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import keras
import numpy as np
import pytest

from tests.launch.test_launch import ALL_REDUCE
from tests.two_hosts import ADDRESSES, UnavailableError, two_hosts

HOSTS = f"{ADDRESSES[0]}:2222,{ADDRESSES[1]}:2222"
SMALL = [
    "--dataset=shapes",
    "--image_size=16,16",
    "--train_examples=64",
    "--val_examples=8",
    "--base_filters=4",
    "--depth=2",
    "--global_batch_size=8",
    "--precision=float64",
    "--notensorboard",
]


@pytest.fixture
def hosts():
    try:
        with two_hosts() as made:
            yield made
    except UnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture
def start(hosts):
    """Starts the launcher on a host; what still runs at the end of the test is ended."""
    started = []

    def start(host, *rest):
        command = hosts.launch(host, HOSTS, f"worker:{host}", *rest)
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.thorough
def test_an_all_reduce_over_a_network(start, script):
    for check in [start(host, "--check", "--wait_s=3") for host in range(2)]:
        assert check.communicate(timeout=1000)[0].count("ok   ") == 2
        assert check.returncode == 0
    run = f"--command={shlex.join(script(ALL_REDUCE))}"
    for task in [start(host, run, "--timeout_s=1000") for host in range(2)]:
        assert "sum 11.0" in task.communicate(timeout=1000)[0]
        assert task.returncode == 0


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    """Returns a function that trains on one device and returns the weights."""

    def train(*flags):
        run_dir = tmp_path_factory.mktemp("one device") / "run"
        command = [sys.executable, "-m", "tfdist.train", "--strategy=one_device", *SMALL, *flags]
        subprocess.run([*command, f"--run_dir={run_dir}", "--quiet"], check=True, timeout=1000)
        return read_weights(run_dir)

    return train


def read_weights(run_dir):
    return keras.models.load_model(run_dir / "model.keras", compile=False).get_weights()


def assert_equal(found, expected):
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-9)


def lose(launcher):
    """Ends all of a host's processes at once, as when its power fails."""
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    launcher.kill()
    for agent in children:  # the kernel kills the tasks of an agent that is killed
        os.kill(int(agent), signal.SIGKILL)


@pytest.mark.cluster
def test_two_hosts_train_as_one_device_even_if_one_of_them_is_lost(
    hosts, start, one_device, path_with_spaces
):
    hosts.set_rate(1)
    run_dir = path_with_spaces / "run"
    flags = ["--max_steps=40", "--epochs=5"]
    launch = ["--max_restarts=2", "--", "--strategy=multi_worker_mirrored", *SMALL, *flags]
    launch += ["--checkpoint_every=4", f"--run_dir={run_dir}", "--quiet"]
    tasks = [start(host, *launch) for host in range(2)]
    until = time.monotonic() + 1000
    while not list(run_dir.glob("checkpoints/*/state.json")):
        assert time.monotonic() < until
        time.sleep(0.05)
    lose(tasks[1])
    again = start(1, *launch)
    assert tasks[0].wait(timeout=1000) == 0
    assert again.wait(timeout=1000) == 0
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["restarts"] >= 1
    assert summary["resumed_from_step"] >= 4
    assert_equal(read_weights(run_dir), one_device(*flags))
