"""--submit and --follow, with a stand-in for the targets' tools that notes how it is called."""

import os
import shlex
import subprocess
import sys

import pytest

from tests.jobs import tools_stand_in
from tests.jobs.commands import make_texts
from tfdist.errors import TfdistError

IMAGE = "--image=europe-docker.pkg.dev/p/r/tfdist"
VERTEX = ("--target=vertex", IMAGE, "--", "--run_dir=gs://b/r")
TPU_VM = ("--target=tpu_vm", IMAGE, "--spot", "--retries=1", "--", "--strategy=tpu", "--tpu=local")
TPU_VM = (*TPU_VM, "--run_dir=gs://b/a run")
KUBERNETES = ("--target=kubernetes", IMAGE, "--", "--run_dir=gs://b/r")


@pytest.fixture
def tools(path_with_spaces):
    return path_with_spaces / "bin"


def run_jobs(tools, *arguments, statuses=()):
    tools_stand_in.install(tools, statuses=statuses)
    output = f"--output={tools.parent / 'my jobs'}"
    return subprocess.run(
        [sys.executable, "-m", "tfdist.jobs", "--submit", "--quiet", output, *arguments],
        env={**os.environ, "PATH": f"{tools}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=1000,
    )


def test_submits_with_the_targets_tool(tools):
    done = run_jobs(tools, "--target=slurm")
    assert done.returncode == 0, done.stderr
    path = f"{tools.parent}/my jobs/train.sbatch"
    assert tools_stand_in.read_calls(tools) == [["sbatch", path]]
    assert os.path.exists(path)
    assert done.stdout.endswith("Submitted batch job 7\n")


def test_follows_on_slurm_with_the_status_of_the_job(tools):
    done = run_jobs(tools, "--follow", "--target=slurm", statuses=[2])
    assert done.returncode == 2
    (call,) = tools_stand_in.read_calls(tools)
    assert call[:2] == ["sbatch", "--wait"]


def test_follows_the_job_that_vertex_ai_made(tools):
    done = run_jobs(tools, "--follow", *VERTEX)
    assert done.returncode == 0, done.stderr
    create, stream = tools_stand_in.read_calls(tools)
    assert create[:4] == ["gcloud", "ai", "custom-jobs", "create"]
    assert create[-1] == "--format=value(name)"
    assert stream[1:] == [
        "ai",
        "custom-jobs",
        "stream-logs",
        tools_stand_in.CUSTOM_JOB,
        "--region=us-central1",
    ]


def test_follows_the_pods_on_kubernetes(tools):
    done = run_jobs(tools, "--follow", *KUBERNETES, statuses=[1])
    assert done.returncode == 1
    apply, logs = tools_stand_in.read_calls(tools)
    assert apply == ["kubectl", "apply", "-f", f"{tools.parent}/my jobs/job.yaml"]
    assert logs[:2] == ["kubectl", "logs"]
    assert logs[-1] == "job/tfdist"


def test_a_tpu_vm_is_given_back_and_a_failed_job_starts_on_another(tools):
    done = run_jobs(tools, *TPU_VM, statuses=[255, 0])
    assert done.returncode == 0, done.stderr
    calls = [call for call in tools_stand_in.read_calls(tools) if call[0] == "gcloud"]
    once = ["create", "describe", "describe", "ssh", "delete"]
    assert [call[4] for call in calls] == once * 2
    create, ssh = calls[0], calls[3]
    assert create[5:] == [
        "tfdist",
        "--zone=us-west4-a",
        "--node-id=tfdist",
        "--accelerator-type=v5litepod-8",
        "--runtime-version=v2-alpha-tpuv5-lite",
        "--spot",
    ]
    login, _, run = ssh[-1].removeprefix("--command=").partition(" && ")
    assert shlex.split(login)[-2:] == ["europe-docker.pkg.dev", "--quiet"]
    train = ["python", "-m", "tfdist.train", "--strategy=tpu", "--tpu=local"]
    image = IMAGE.removeprefix("--image=")
    assert shlex.split(run)[-7:] == [image, *train, "--run_dir=gs://b/a run"]


@pytest.mark.parametrize(
    ("accelerator", "runtime"),
    [("v6e-8", "v2-alpha-tpuv6e"), ("v5p-8", "v2-alpha-tpuv5"), ("v4-8", "tpu-ubuntu2204-base")],
)
def test_every_kind_of_tpu_gets_its_software(accelerator, runtime):
    script = make_texts(*TPU_VM[:2], f"--accelerator={accelerator}", *TPU_VM[2:])["tpu_vm.sh"]
    assert f"--accelerator-type={accelerator} --runtime-version={runtime} " in script


def test_a_tpu_without_tensorflow_is_refused():
    with pytest.raises(TfdistError, match="TensorFlow does not run on TPU7x"):
        make_texts(*TPU_VM[:2], "--accelerator=tpu7x-8", *TPU_VM[2:])


def test_bad_input_is_not_tried_again_on_a_tpu_vm(tools):
    assert run_jobs(tools, *TPU_VM, statuses=[2]).returncode == 2
    assert [c[4] for c in tools_stand_in.read_calls(tools) if c[0] == "gcloud"].count("ssh") == 1
