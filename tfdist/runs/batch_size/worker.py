"""The process of a trial: `python -m tfdist.runs.batch_size.worker DIRECTORY`."""

import contextlib
import importlib
import json
import os
import sys
import threading
from pathlib import Path

from tfdist.cli.quiet import start_tensorflow_quietly
from tfdist.errors import TfdistError
from tfdist.runs.batch_size.trials import EXIT_OUT_OF_MEMORY
from tfdist.runs.options import TrainOptions


def main(directory: str) -> int:
    """Runs the trial in `task.json` and writes `result.json`; prints an error as the last line."""
    _end_first()
    task = json.loads((Path(directory) / "task.json").read_text())
    start_tensorflow_quietly()
    import tensorflow as tf

    from tfdist.runs.batch_size.examples import load_examples

    try:
        found = importlib.import_module(task["measure"]).measure(
            TrainOptions.from_dict(task["options"]),
            task["size"],
            info=task["info"],
            examples=load_examples(Path(directory) / "examples.pickle"),
            **task["arguments"],
        )
    except (tf.errors.ResourceExhaustedError, MemoryError):
        return EXIT_OUT_OF_MEMORY
    except TfdistError as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return error.exit_status
    (Path(directory) / "result.json").write_text(json.dumps(found))
    return 0


def _end_first() -> None:
    """Makes this process end with its parent, and be killed first if the memory is full."""

    def watch() -> None:
        # Not through sys.stdin, whose lock would be held when the interpreter exits.
        os.read(0, 1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
