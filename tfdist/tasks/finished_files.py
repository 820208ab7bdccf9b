"""What a finished run has in its directory, which can be seen without TensorFlow."""

import os
from collections.abc import Callable

from tfdist.errors import TfdistError


def check_finished(path: str, exists: Callable[[str], bool] = os.path.exists) -> None:
    """Checks that a directory holds a finished run.

    Args:
      path: the directory.
      exists: returns whether there is a file; one on this machine by default.

    Raises:
      TfdistError: there is no run, or it is not finished.
    """
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
