"""`python -m tfdist.jobs`: writes job files for Vertex AI, TPU VMs, Kubernetes and Slurm.

    python -m tfdist.jobs --target=slurm --workers=4 -- --strategy=multi_worker_mirrored ...

The flags of tfdist.train follow `--`; or those of tfdist.run, your own script and its arguments.
Nothing is submitted without --submit.
"""

import functools
import shlex
import sys
from collections.abc import Sequence

from tfdist.cli.arguments import split_at_dashes
from tfdist.cli.command import run_command
from tfdist.errors import TfdistError
from tfdist.jobs import JobsOptions, make_job, make_job_files, write_job_files
from tfdist.jobs.submission import check_tools, run_commands
from tfdist.runs.options import TrainOptions


def main() -> int:
    """Runs the command line and returns the exit status."""
    given, train_flags = split_at_dashes(sys.argv[1:])
    return run_command(
        "tfdist.jobs",
        functools.partial(run_jobs, arguments=train_flags),
        given,
        options_class=JobsOptions,
        others=(TrainOptions,),
        needs_tensorflow=False,
    )


def run_jobs(options: JobsOptions, *, arguments: Sequence[str]) -> int:
    """Writes a job's files, and submits them or prints how to.

    Returns:
      0, or the status of the tool that submits or follows the job.

    Raises:
      TfdistError: bad input; nothing was written.
      OSError: `--output` cannot be written.
    """
    given = options.files
    if given.follow and not given.submit:
        raise TfdistError("--follow follows a job that this command submits. Add --submit.")
    files = make_job_files(make_job(options, arguments))
    commands = files.submission.list_commands(follow=given.follow) if given.submit else ()
    check_tools(commands)
    paths = write_job_files(files, given.output)
    if not given.quiet:
        print("\n".join(paths))
    if given.submit:
        return run_commands(commands, given.output)
    if not given.quiet:
        output = shlex.quote(given.output)
        shown = [command.format(output=output) for command in files.submission.commands]
        print("Submit with\n  " + "\nor\n  ".join(shown))
    return 0


if __name__ == "__main__":
    sys.exit(main())
