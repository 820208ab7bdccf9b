"""The files of a job; one module per target turns a `Job` into texts."""

from tfdist.jobs.files import JobFiles, make_job_files, write_job_files
from tfdist.jobs.job import Job, make_job
from tfdist.jobs.options import JobsOptions

__all__ = ["Job", "JobFiles", "JobsOptions", "make_job", "make_job_files", "write_job_files"]
