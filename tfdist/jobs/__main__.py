"""`python -m tfdist.jobs`: writes job files for Vertex AI, Kubernetes and Slurm.

    python -m tfdist.jobs --target=slurm --workers=4 -- --strategy=multi_worker_mirrored ...

The flags of tfdist.train follow `--`; or those of tfdist.run, your own script and its arguments.
Nothing is submitted.
"""

import functools
import shlex
import sys
from collections.abc import Sequence

from tfdist.cli.command import run_command
from tfdist.jobs import JobsOptions, make_job, make_job_files, write_job_files
from tfdist.runs.options import TrainOptions


def main() -> int:
    """Runs the command line and returns the exit status."""
    given = sys.argv[1:]
    split = given.index("--") if "--" in given else len(given)
    return run_command(
        "tfdist.jobs",
        functools.partial(run_jobs, arguments=given[split + 1 :]),
        given[:split],
        options_class=JobsOptions,
        others=(TrainOptions,),
        needs_tensorflow=False,
    )


def run_jobs(options: JobsOptions, *, arguments: Sequence[str]) -> int:
    """Writes a job's files and prints how to submit them.

    Args:
      options: the options of the command.
      arguments: the arguments after `--`.

    Returns:
      0.

    Raises:
      TfdistError: bad input; nothing was written.
      OSError: `--output` cannot be written.
    """
    files = make_job_files(make_job(options, arguments))
    output = options.files.output
    paths = write_job_files(files, output)
    if not options.files.quiet:
        print("\n".join(paths))
        commands = [command.format(output=shlex.quote(output)) for command in files.commands]
        print("Submit with\n  " + "\nor\n  ".join(commands))
    return 0


if __name__ == "__main__":
    sys.exit(main())
