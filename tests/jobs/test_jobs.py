"""`python -m tfdist.jobs`: what it prints and writes; tests/test_errors.py has what it refuses."""

import subprocess
import sys

import pytest
import yaml

from tests.jobs.commands import make_texts
from tfdist.errors import TfdistError

VERTEX = ("--target=vertex", "--image=i")
PEERS = "--strategy=multi_worker_mirrored"


def run_jobs(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "tfdist.jobs", *arguments],
        capture_output=True,
        text=True,
        timeout=1000,
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


def test_a_model_that_only_the_container_has_is_taken():
    text = make_texts("--target=slurm", "--", "--model=absent:build")["train.sbatch"]
    assert "--model=absent:build" in text


def test_help_names_what_follows():
    done = run_jobs("--help")
    assert done.stdout.startswith("usage: python -m tfdist.jobs [--flag=value ...] -- ")


def test_a_script_of_the_users_own():
    script = (PEERS, "--check=off", "my script.py", "--epochs=3")
    text = make_texts("--target=slurm", "--workers=2", "--", *script)["train.sbatch"]
    assert "  python -m tfdist.run \\\n  --strategy=multi_worker_mirrored \\\n" in text
    assert "--check=off \\\n  'my script.py' \\\n  --epochs=3\n" in text
    (text,) = make_texts(*VERTEX, "--workers=2", "--", *script).values()
    job = yaml.safe_load(text)
    assert "baseOutputDirectory" not in job
    container = job["workerPoolSpecs"][0]["containerSpec"]
    assert container["command"] == ["python", "-m", "tfdist.run"]
    assert container["args"] == list(script)


def test_the_job_starts_a_scripts_processes():
    with pytest.raises(TfdistError, match="--workers belongs before `--`"):
        make_texts("--target=slurm", "--workers=2", "--", "--workers=2", "script.py")
    with pytest.raises(TfdistError, match="Unknown flag '--epocs'"):
        make_texts("--target=slurm", "--", "--epocs=2", "script.py")
