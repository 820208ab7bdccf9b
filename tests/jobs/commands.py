"""`tfdist.jobs` in this process."""

from tfdist.cli.flags import parse_flags
from tfdist.jobs import JobsOptions, make_job, make_job_files


def make_files(*arguments):
    split = arguments.index("--") if "--" in arguments else len(arguments)
    options = parse_flags(JobsOptions, arguments[:split])
    return make_job_files(make_job(options, arguments[split + 1 :]))


def make_texts(*arguments):
    return make_files(*arguments).texts
