"""The files of a job: one module a target, from a `Job` to texts."""

from tfdist.job_files.files import JobFiles, make_job_files, write_job_files
from tfdist.job_files.job import Job, make_job
from tfdist.job_files.options import JobsOptions

__all__ = ["Job", "JobFiles", "JobsOptions", "make_job", "make_job_files", "write_job_files"]
