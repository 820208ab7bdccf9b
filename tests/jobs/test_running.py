"""The written files, run: what stands in for the cluster's software is small, the tasks are real.

The launcher runs the stand-in as one task, for its private network, time-out and clean-up.
"""

import json
import sys

import pytest

from tests.jobs.commands import make_texts
from tfdist.launch import run_local_cluster

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(sys.platform != "linux", reason="needs the launcher's agent"),
]
SMALL = (
    "--dataset=shapes",
    "--image_size=16,16",
    "--train_examples=32",
    "--val_examples=4",
    "--base_filters=4",
    "--depth=2",
    "--global_batch_size=8",
    "--notensorboard",
)


def run(module, *arguments, logs, status=0):
    result = run_local_cluster(
        workers=1,
        command=[sys.executable, "-m", f"tests.jobs.{module}", *map(str, arguments)],
        run_dir=logs,
        timeout_s=1000,
        stream=False,
    )
    output = result.tasks[0].log.read_text()
    assert result.status == status, output
    return output


def test_the_slurm_script_stops_before_the_limit_and_goes_on_after_it(path_with_spaces):
    run_dir, script = path_with_spaces / "run", path_with_spaces / "train.sbatch"
    flags = (*SMALL, "--strategy=multi_worker_mirrored", "--epochs=12", f"--run_dir={run_dir}")
    texts = make_texts("--target=slurm", "--workers=2", "--", *flags)
    script.write_text(texts["train.sbatch"])
    output = run(
        "slurm_stand_in",
        "sbatch",
        script,
        path_with_spaces / "bin",
        run_dir / "metrics.jsonl",  # there after the first epoch
        logs=path_with_spaces / "log",
    )
    assert "start 0 ended with 143" in output
    assert "start 1 ended with 0" in output
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["steps"] == 48
    assert 4 <= summary["resumed_from_step"] < 48
    options = json.loads((run_dir / "options.json").read_text())
    assert [address.partition(":")[0] for address in options["cluster"]["worker"]] == [
        "localhost",
        "localhost",
    ]


@pytest.mark.parametrize(
    ("cluster", "strategy", "replicas"),
    [
        (("--workers=2",), "multi_worker_mirrored", 2),
        (("--workers=1", "--ps=1"), "parameter_server", 1),
    ],
)
def test_the_pods_of_the_job_train_together(path_with_spaces, cluster, strategy, replicas):
    # A pod's path: the volume is mounted below it.
    inside, run_dir = "/mnt/tfdist/run", path_with_spaces / "run"
    flags = (*SMALL, f"--strategy={strategy}", "--epochs=1", f"--run_dir={inside}")
    texts = make_texts("--target=kubernetes", "--image=i", *cluster, "--", *flags)
    path = path_with_spaces / "job.yaml"
    path.write_text(texts["job.yaml"].replace(inside, str(run_dir)))
    output = run("pods_stand_in", path, logs=path_with_spaces / "log")
    assert "statuses 0 0" in output
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["strategy"], summary["steps"]) == (strategy, 4)
    assert summary["replicas"] == replicas


@pytest.mark.parametrize(("finished", "status"), [(False, 143), (True, 0)])
def test_a_server_that_loses_its_chief_is_done_if_the_run_is(tmp_path, finished, status):
    # A Job starts pods again that end with 143, and never one that ends with 0.
    if finished:
        (tmp_path / "summary.json").touch()
    run("lost_chief", tmp_path, logs=tmp_path / "log", status=status)
