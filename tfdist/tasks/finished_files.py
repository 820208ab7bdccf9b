"""The files of a finished run, and of the commands that use it."""

import contextlib
import os
from collections.abc import Callable, Iterator

from tfdist.errors import TfdistError, shorten_error


def check_finished(path: str, exists: Callable[[str], bool] = os.path.exists) -> None:
    """Checks that a directory holds a run, and that the run is finished."""
    if not exists(f"{path}/options.json"):
        raise TfdistError(
            f"Cannot find a run in `run_dir={path}`: it has no options.json. Give the run "
            "directory of a tfdist.train command."
        )
    if not (exists(f"{path}/model.keras") and exists(f"{path}/summary.json")):
        raise TfdistError(
            f"The run in `run_dir={path}` is not finished: it has no model.keras or no "
            "summary.json. Run the tfdist.train command that started it until it finishes."
        )


@contextlib.contextmanager
def writing_output(path: str) -> Iterator[None]:
    """Converts an error of the file system to an OSError of one line that names `output`."""
    import tensorflow as tf

    try:
        yield
    except (OSError, tf.errors.OpError) as error:
        raise OSError(describe_write_failure(path, error)) from error


def describe_write_failure(path: str, error: Exception) -> str:
    """Returns what to say when the output of a command cannot be written."""
    return (
        f"Cannot write to `output={path}`: {shorten_error(error)}. Check its permissions "
        "and the free space."
    )
