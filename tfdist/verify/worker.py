"""One process of a comparison's cluster: `python -m tfdist.verify.worker DIRECTORY NAME`."""

import sys

from tfdist.cli.quiet import start_tensorflow_quietly
from tfdist.errors import TfdistError


def main(directory: str, name: str) -> int:
    """Runs the process; the last line of its log says what failed, if anything."""
    start_tensorflow_quietly()
    from tfdist.verify.runs import run_worker

    try:
        return run_worker(directory, name)
    except TfdistError as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
