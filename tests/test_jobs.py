"""`python -m tfdist.jobs`: what it prints, writes and refuses."""

import subprocess
import sys

import pytest

from tests.job_files.commands import make_texts
from tfdist.errors import TfdistError

VERTEX = ("--target=vertex", "--image=i")
KUBERNETES = ("--target=kubernetes", "--image=i")
PEERS = "--strategy=multi_worker_mirrored"


def run_jobs(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "tfdist.jobs", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_writes_files_and_says_how_to_submit_them(path_with_spaces):
    output = path_with_spaces / "my jobs"
    done = run_jobs("--target=slurm", "--workers=2", f"--output={output}", "--", PEERS)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"{output}/train.sbatch",
        "Submit with",
        f"  sbatch '{output}'/train.sbatch",
    ]
    assert PEERS in (output / "train.sbatch").read_text()


def test_refuses_in_one_line_and_writes_nothing(path_with_spaces):
    output = path_with_spaces / "jobs"
    done = run_jobs(*VERTEX, f"--output={output}", "--", "--run_dir=gs://b/r", "--epocs=3")
    assert done.returncode == 2
    assert done.stderr.startswith("tfdist: Unknown flag '--epocs'. Did you mean --epochs,")
    assert len(done.stderr.splitlines()) == 1
    assert not output.exists()
    done = run_jobs("--target=slurm", "--output=gs://bucket/jobs")
    assert done.returncode == 2
    assert "Give a local directory" in done.stderr
    done = run_jobs("--target=slurm", "--output=/proc/jobs")
    assert done.returncode == 1
    assert done.stderr.startswith("tfdist: Cannot write to --output=/proc/jobs: ")


def test_a_file_of_flags_is_read_here(tmp_path):
    path = tmp_path / "flags"
    path.write_text("--epochs=7\n--seed=3\n")
    text = make_texts("--target=slurm", "--", f"--flagfile={path}", "--run_dir=a b")["train.sbatch"]
    assert "--epochs=7 \\\n  --seed=3 \\\n  '--run_dir=a b'\n" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "Unknown --target ''"),
        (("--target=vertx",), "Unknown --target 'vertx'. Valid: vertex"),
        (("--target=slurm", "--workers=0"), "--workers=0 is too small: give 1 or more"),
        (("--target=slurm", "--time_limit_h=0"), "--time_limit_h=0 is no time"),
        (("--target=slurm", "--name=My job"), "--name=My job is no name"),
        (("--target=slurm", "--image=i"), "Leave --image out"),
        (("--target=slurm", "--accelerator=a100"), "Add --accelerators_per_worker=1"),
        (("--target=slurm", "--", "--strategy=tpu"), "no job files are written for TPUs"),
        (("--target=slurm", "--", "--checkpoint_every=soon"), "neither steps"),
        (("--target=slurm", "--", "--flagfile=/nowhere"), "Unable to open flagfile"),
        (
            ("--target=slurm", "--workers=2", "--", "--strategy=mirrored"),
            "--strategy=mirrored runs in one process, but --workers describes 2 tasks",
        ),
        (
            ("--target=slurm", "--", "--strategy=parameter_server"),
            "--strategy=parameter_server with --ps=0",
        ),
        (("--target=slurm", "--ps=1", "--", PEERS), "with --ps=1: parameter servers and"),
        (("--target=vertex",), "--target=vertex needs --image"),
        (VERTEX, "--run_dir=runs/default is a directory of a machine that Vertex AI deletes"),
        ((*VERTEX, "--accelerator=nvidia-l4", "--accelerators_per_worker=1"), "Write NVIDIA_L4"),
        (
            (*VERTEX, "--", "--run_dir=gs://b/r", "--data_dir=data"),
            "Copy it to a bucket and give --data_dir=gs://BUCKET/DATA",
        ),
        (KUBERNETES, "as in --run_dir=/mnt/tfdist/runs/default."),
        (
            (*KUBERNETES, "--", "--run_dir=gs://b/r", "--data_dir=/data"),
            "as in --data_dir=/mnt/tfdist/data.",
        ),
    ],
)
def test_says_what_is_wrong(arguments, message):
    with pytest.raises(TfdistError) as caught:
        make_texts(*arguments)
    assert message in str(caught.value)


def test_help_names_what_follows():
    done = run_jobs("--help")
    assert done.stdout.startswith("usage: python -m tfdist.jobs [--flag=value ...] -- ")
