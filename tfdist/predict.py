"""`python -m tfdist.predict`: predicts on new data with a finished run."""

import sys

from tfdist.tasks.commands import run_task_command


def main() -> int:
    """Runs the command line and returns the exit status."""
    return run_task_command("predict")


if __name__ == "__main__":
    sys.exit(main())
