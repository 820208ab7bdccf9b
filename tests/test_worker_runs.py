"""`tfdist.launch` and `tfdist.train` together: a run of several workers is a run like any other."""

import contextlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest

from tests.strategies.test_rendezvous import find_free_ports
from tfdist.launch import run_local_cluster
from tfdist.launch.progress import StepFile

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(sys.platform != "linux", reason="needs the launcher's agent"),
]

SMALL = (
    *("--dataset=shapes", "--image_size=32,32", "--base_filters=4", "--depth=2"),
    *("--train_examples=32", "--val_examples=9"),
)


def start(run_dir, *flags, workers=2):
    command = [
        sys.executable,
        "-m",
        "tfdist.launch",
        f"--workers={workers}",
        "--timeout_s=1000",
        "--",
    ]
    return subprocess.Popen(
        [*command, *SMALL, f"--run_dir={run_dir}", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for(path, process):
    until = time.monotonic() + 1000
    while not path.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until, "timed out"
        time.sleep(0.02)


def test_a_run_is_interrupted_and_continued(path_with_spaces):
    run_dir = path_with_spaces / "run"
    flags = ("--strategy=multi_worker_mirrored", "--epochs=6")
    with start(run_dir, *flags) as process:
        wait_for(run_dir / "metrics.jsonl", process)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate()
    assert process.returncode == 130, output
    assert "The same command continues the run" in output
    assert not (run_dir / "summary.json").exists()

    with start(run_dir, *flags) as process:
        output, _ = process.communicate()
    assert process.returncode == 0, output
    summary = check_run(run_dir, num_steps=12)
    assert 2 <= summary["resumed_from_step"] < 12
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == list(range(1, 7))


def test_local_sgd_is_a_run_like_any_other(tmp_path):
    run_dir = tmp_path / "run"
    with start(run_dir, "--strategy=local_sgd", "--sync_every=3", "--max_steps=5") as process:
        output, _ = process.communicate()
    assert process.returncode == 0, output
    check_run(run_dir, num_steps=5)


@pytest.mark.parametrize(
    ("servers", "name"), [(["--ps=1"], "parameter_server"), ([], "multi_worker_mirrored")]
)
def test_auto_becomes_what_the_cluster_is_for_in_every_task(tmp_path, servers, name):
    command = [sys.executable, "-m", "tfdist.launch", f"--workers={1 if servers else 2}", *servers]
    flags = [*SMALL, "--max_steps=2", "--notensorboard", "--quiet", f"--run_dir={tmp_path}/run"]
    flags += ["--global_batch_size=8", "--worker_timeout_s=1000"]
    done = subprocess.run(
        [*command, "--timeout_s=1000", "--", *flags], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["strategy"], summary["steps"]) == (name, 2)
    assert sum(map(sum, summary["confusion"])) == 9 * 32 * 32


def check_run(run_dir, *, num_steps):
    """Looks at what a run of two workers leaves; returns its summary."""
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["steps"], summary["replicas"]) == (num_steps, 2)
    peaks = summary["peak_memory_bytes_per_device"]
    assert set(peaks) == {"worker 0/CPU", "worker 1/CPU"}
    assert min(peaks.values()) > 100 * 2**20
    assert max(peaks.values()) == summary["peak_memory_bytes"]
    assert sum(map(sum, summary["confusion"])) == 9 * 32 * 32, "every pixel once"
    log = (run_dir / "logs" / "worker-1.log").read_text()
    assert f"weights_sha256 {summary['weights_sha256']}" in log
    assert {path.name for path in run_dir.iterdir()} == {
        ".lock", "checkpoints", "goodput.jsonl", "logs", "metrics.jsonl", "model.keras",
        "options.json", "report.html", "samples", "steps.jsonl", "summary.json", "tensorboard",
    }  # fmt: skip
    options = json.loads((run_dir / "options.json").read_text())
    assert len(options["cluster"]["worker"]) == 2
    return summary


def test_bad_input_costs_one_line(tmp_path):
    run_dir = tmp_path / "run"
    with start(run_dir, "--strategy=multi_worker_mirrored", "--collective=nccl") as process:
        output, _ = process.communicate()
    assert process.returncode == 2, output
    assert "--collective=nccl needs GPUs" in output
    assert "Traceback" not in output
    assert not run_dir.exists()


OTHER_SEEDS = """
import json, os, sys
index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
command = [sys.executable, "-m", "tfdist.train", *sys.argv[1:], f"--seed={index}"]
os.execv(sys.executable, command)
"""


def test_a_worker_with_other_flags_is_refused(tmp_path, capfd):
    run_dir = tmp_path / "run"
    flags = ["--strategy=multi_worker_mirrored", "--dataset=shapes", f"--run_dir={run_dir}"]
    result = run_local_cluster(
        workers=2,
        command=[sys.executable, "-c", OTHER_SEEDS],
        train_flags=flags,
        run_dir=tmp_path,
        max_restarts=1,
        timeout_s=1000,
    )
    assert (result.status, result.restarts) == (2, 0)
    assert not run_dir.exists()
    output = "".join(capfd.readouterr())
    assert "worker 1 was started with different flags or versions than worker 0: --seed 1" in output
    assert "Traceback" not in output


def test_workers_of_two_machines_start_again_together(tmp_path):
    """Two launchers, each with one task; the task of the second is killed."""
    hosts = ",".join(f"127.0.0.1:{port}" for port in find_free_ports(2))
    flags = ["--strategy=multi_worker_mirrored", *SMALL, "--max_steps=30", "--checkpoint_every=4"]
    flags += ["--notensorboard", "--quiet", f"--run_dir={tmp_path / 'run'}", "--shard_optimizer"]
    launcher = [sys.executable, "-m", "tfdist.launch", f"--hosts={hosts}", "--max_restarts=3"]
    with contextlib.ExitStack() as stack:
        launchers = []
        for index in range(2):
            argv = [*launcher, f"--task=worker:{index}", "--timeout_s=1000", "--", *flags]
            launchers.append(stack.enter_context(subprocess.Popen(argv)))
            stack.callback(launchers[-1].kill)  # where the test has failed
        steps = StepFile(tmp_path / "run" / "logs")
        until = time.monotonic() + 1000
        while steps.read() < 10:
            assert time.monotonic() < until, "timed out"
            time.sleep(0.01)
        os.kill(find_task(hosts, 1), signal.SIGKILL)
        assert [process.wait() for process in launchers] == [0, 0]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["steps"], summary["replicas"]) == (30, 2)
    assert summary["restarts"] == 2  # one of each launcher
    log = (tmp_path / "run" / "logs" / "worker-0.log").read_text()
    # Validation may be going on.
    assert re.search("Lost worker 1 (after step|while worker 0 was in)", log)
    assert 8 <= summary["resumed_from_step"] < 30


LOST_PLACE = """
import json, os, pathlib, sys, threading, time
config = json.loads(os.environ["TF_CONFIG"])
step = pathlib.Path(os.environ["TFDIST_LAUNCH_DIR"], "step")
workers = int(os.environ["WORKERS"])
if len(config["cluster"]["worker"]) == workers and config["task"]["index"] == workers - 1:
    if step.exists():
        sys.exit("This machine is gone.")
    def die():
        while not step.exists() or int(step.read_text() or 0) < 6:
            time.sleep(0.01)
        os._exit(1)
    threading.Thread(target=die, daemon=True).start()
sys.argv[0] = "tfdist.train"
from tfdist.train import main
sys.exit(main())
"""


def test_a_run_goes_on_with_the_workers_that_are_left(tmp_path, capfd):
    flags = [*SMALL, "--strategy=multi_worker_mirrored", "--max_steps=20", "--checkpoint_every=2"]
    flags += ["--notensorboard", "--quiet", f"--run_dir={tmp_path / 'run'}"]
    result = run_local_cluster(
        workers=2,
        min_workers=1,
        command=[sys.executable, "-c", LOST_PLACE],
        train_flags=flags,
        max_restarts=5,
        timeout_s=1000,
        environ=os.environ | {"WORKERS": "2"},
    )
    assert (result.status, result.restarts) == (0, 3)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["steps"], summary["replicas"], summary["restarts"]) == (20, 1, 3)
    assert 4 <= summary["resumed_from_step"] < 20
    assert "without worker-1, which failed repeatedly" in capfd.readouterr().err


LOGICAL = (*SMALL, "--max_steps=20", "--checkpoint_every=2", "--logical_replicas=4", "--quiet")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The summary of a run with logical replicas on one device."""
    run_dir = tmp_path_factory.mktemp("undisturbed")
    start_alone(run_dir, "--strategy=one_device").communicate(timeout=1000)
    return json.loads((run_dir / "summary.json").read_text())


def start_alone(run_dir, *flags):
    command = [sys.executable, "-m", "tfdist.train", *LOGICAL, f"--run_dir={run_dir}", *flags]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_a_run_of_logical_replicas_keeps_its_bits_when_workers_are_lost(tmp_path, undisturbed):
    result = run_local_cluster(
        workers=3,
        min_workers=2,
        command=[sys.executable, "-c", LOST_PLACE],
        train_flags=[*LOGICAL, "--strategy=multi_worker_mirrored", f"--run_dir={tmp_path}"],
        max_restarts=5,
        timeout_s=1000,
        environ=os.environ | {"WORKERS": "3"},
    )
    assert (result.status, result.restarts) == (0, 3)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["steps"], summary["replicas"], summary["restarts"]) == (20, 4, 3)
    assert 4 <= summary["resumed_from_step"] < 20
    assert summary["weights_sha256"] == undisturbed["weights_sha256"]
    assert summary["numerics"] == undisturbed["numerics"]


def test_a_run_of_logical_replicas_keeps_its_bits_when_it_is_arranged_anew(tmp_path, undisturbed):
    workers_of = {"multi_worker_mirrored": (2, 3), "mirrored": (1, 1), "central_storage": (1,)}
    arrangements = [(name, count) for name, counts in workers_of.items() for count in counts]
    for strategy, workers in arrangements:
        before = set(tmp_path.glob("checkpoints/*/state.json"))
        process = (
            start_alone(tmp_path, f"--strategy={strategy}")
            if workers == 1
            else start(tmp_path, *LOGICAL, f"--strategy={strategy}", workers=workers)
        )
        with process:
            until = time.monotonic() + 1000
            while not set(tmp_path.glob("checkpoints/*/state.json")) - before:
                assert process.poll() is None, process.communicate()
                assert time.monotonic() < until, "timed out"
                time.sleep(0.01)
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=1000)
        assert not (tmp_path / "summary.json").exists()
    with start_alone(tmp_path, "--strategy=one_device") as process:
        output = process.communicate(timeout=1000)[0]
    assert "Not the same bits" not in output
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["resumed_from_step"] > len(arrangements)
    assert summary["weights_sha256"] == undisturbed["weights_sha256"]


def find_task(hosts, index):
    """Returns the process of a worker of the cluster at some addresses."""
    for path in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            environment = (path / "environ").read_text().split("\0")
            config = next((v[10:] for v in environment if v.startswith("TF_CONFIG=")), "{}")
            value = json.loads(config)
            if (
                "tfdist.train" in (path / "cmdline").read_text()
                and value.get("cluster", {}).get("worker") == hosts.split(",")
                and value["task"]["index"] == index
            ):
                return int(path.name)
    raise LookupError(hosts)
