"""`python -m tfdist.jobs`: job files for Vertex AI, Kubernetes and Slurm.

    python -m tfdist.jobs --target=slurm --workers=4 -- --strategy=multi_worker_mirrored ...

What follows `--` are the flags of tfdist.train. Nothing is submitted.
"""

import functools
import shlex
import sys
from collections.abc import Sequence

from tfdist.cli.command import run_command
from tfdist.jobs import JobsOptions, make_job, make_job_files, write_job_files


def main() -> int:
    """Runs the command line and returns the exit status."""
    arguments = sys.argv[1:]
    split = arguments.index("--") if "--" in arguments else len(arguments)
    return run_command(
        "tfdist.jobs",
        functools.partial(run_jobs, train_arguments=arguments[split + 1 :]),
        arguments[:split],
        options_class=JobsOptions,
        needs_tensorflow=False,
    )


def run_jobs(options: JobsOptions, *, train_arguments: Sequence[str]) -> int:
    """Writes a job's files and says how to submit them.

    Args:
      options: the command's.
      train_arguments: the flags of `tfdist.train`.

    Returns:
      0.

    Raises:
      TfdistError: bad input; nothing was written.
      OSError: `--output` cannot be written.
    """
    files = make_job_files(make_job(options, train_arguments))
    output = options.files.output
    paths = write_job_files(files, output)
    if not options.files.quiet:
        print("\n".join(paths))
        commands = [command.format(output=shlex.quote(output)) for command in files.commands]
        print("Submit with\n  " + "\nor\n  ".join(commands))
    return 0


if __name__ == "__main__":
    sys.exit(main())
