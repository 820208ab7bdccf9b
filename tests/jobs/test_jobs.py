"""`python -m tfdist.jobs`: what it prints and writes; tests/test_errors.py has what it refuses."""

import subprocess
import sys

from tests.jobs.commands import make_texts

VERTEX = ("--target=vertex", "--image=i")
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


def test_help_names_what_follows():
    done = run_jobs("--help")
    assert done.stdout.startswith("usage: python -m tfdist.jobs [--flag=value ...] -- ")
