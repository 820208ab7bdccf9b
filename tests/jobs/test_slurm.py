"""The sbatch script, run by bash with an srun that prints what it is given."""

import dataclasses
import os
import shlex
import subprocess

import pytest

from tests.jobs.commands import make_texts
from tfdist.cli.flags import parse_flags
from tfdist.errors import TfdistError
from tfdist.jobs import JobsOptions, make_job, make_job_files

AWKWARD = ["--run_dir=a 'run' \"of\" $(touch injected) `touch injected` $HOME", "--tpu=#;|&*\\"]


def test_arguments_arrive_as_they_were_given(path_with_spaces):
    script = make_texts("--target=slurm", "--", "--strategy=one_device", *AWKWARD)["train.sbatch"]
    srun = path_with_spaces / "srun"
    srun.write_text("#!/bin/bash\nprintf '%s\\n' \"$@\"\n")
    srun.chmod(0o755)
    done = subprocess.run(
        ["bash"],
        input=script,
        env={**os.environ, "PATH": f"{path_with_spaces}:{os.environ['PATH']}"},
        cwd=path_with_spaces,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-3:] == ["--strategy=one_device", *AWKWARD]
    assert not (path_with_spaces / "injected").exists()


def test_names_the_partition_and_the_account():
    script = make_texts("--target=slurm", "--partition=gpu", "--account=lab")["train.sbatch"]
    assert "#SBATCH --partition=gpu\n#SBATCH --account=lab\n" in script
    assert "--partition" not in make_texts("--target=slurm")["train.sbatch"]


def make_job_with(accelerator):
    options = parse_flags(JobsOptions, ["--target=slurm", "--accelerators_per_worker=1"])
    return dataclasses.replace(make_job(options, []), accelerator=accelerator)


@pytest.mark.parametrize("text", ["a100\necho INJECTED", "a100\r", "a100\u2028b", "\n"])
def test_a_directive_has_one_line_whoever_made_the_job(text):
    with pytest.raises(TfdistError, match="it has a line break"):
        make_job_files(make_job_with(text))


def test_a_directive_is_quoted():
    script = make_job_files(make_job_with("a b#'c"))
    lines = script.texts["train.sbatch"].splitlines()
    (line,) = [line for line in lines if line.startswith("#SBATCH --gpus-per-task=")]
    assert shlex.split(line.removeprefix("#SBATCH ")) == ["--gpus-per-task=a b#'c:1"]
