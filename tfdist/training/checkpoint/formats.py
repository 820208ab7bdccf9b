"""The formats of checkpoints: every record is read as one of today's format."""

from typing import Any

from tfdist.errors import TfdistError

FORMAT = 2
"""The format that is written. 1: a record has no number, and arrays are named variable/00012.
2: it has one, and the arrays of variables are named after their paths."""


def upgrade(record: dict[str, Any], path: str) -> dict[str, Any]:
    """Returns the record of a checkpoint in today's format.

    Raises:
      TfdistError: a later tfdist wrote it, or the first one, which described no variables.
    """
    number = record.get("format", 1)
    if number > FORMAT:
        raise TfdistError(
            f"Cannot read the checkpoint {path}: it has format {number}, and this tfdist knows "
            f"formats up to {FORMAT}. Use the tfdist that wrote it, or another `run_dir` or "
            "checkpoint_dir."
        )
    return _upgrade_first(record, path) if number == 1 else record


def _upgrade_first(record: dict[str, Any], path: str) -> dict[str, Any]:
    if "structure" not in record:
        raise TfdistError(
            f"Cannot continue from the checkpoint {path}: it does not describe its variables. Give "
            "another `run_dir` or checkpoint_dir."
        )
    state = record["state"]
    # Metrics were once the sums over all replicas.
    defaults = {
        "metric_states": [[value] for value in state.get("metrics", [])],
        "steps_per_epoch": 0,
        "reading": None,
        "data": {},
    }
    return {"begun_from": None, **record, "state": {**defaults, **state}}
