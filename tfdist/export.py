"""`python -m tfdist.export`: exports a finished run as a servable."""

import sys

from tfdist.tasks.commands import run_task_command


def main() -> int:
    """Runs the command line and returns the exit status."""
    return run_task_command("export")


if __name__ == "__main__":
    sys.exit(main())
