"""Makes and writes the files of a job, for any target."""

from dataclasses import dataclass
from pathlib import Path

from tfdist.errors import TfdistError
from tfdist.jobs.job import Job
from tfdist.jobs.kubernetes import make_kubernetes_files
from tfdist.jobs.slurm import make_slurm_files
from tfdist.jobs.submission import Submission
from tfdist.jobs.tpu_vm import make_tpu_vm_files
from tfdist.jobs.vertex import make_vertex_files


@dataclass(frozen=True)
class JobFiles:
    """The files of a job, and how to submit it."""

    texts: dict[str, str]
    submission: Submission


def make_job_files(job: Job) -> JobFiles:
    """Returns the files of a job for its target."""
    make = {
        "vertex": make_vertex_files,
        "tpu_vm": make_tpu_vm_files,
        "kubernetes": make_kubernetes_files,
        "slurm": make_slurm_files,
    }
    return JobFiles(*make[job.target](job))


def write_job_files(files: JobFiles, output: str) -> list[str]:
    """Writes the files locally, replacing those of an earlier call, and returns their paths."""
    if "://" in output:
        raise TfdistError(
            f"--output={output}: job files must be on the machine that submits them. Give a local "
            "directory."
        )
    directory = Path(output)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in files.texts.items():
            (directory / name).write_text(text)
    except OSError as error:
        raise OSError(
            f"Cannot write to --output={output}: {error.strerror}. Give another directory."
        ) from error
    return [str(directory / name) for name in files.texts]
