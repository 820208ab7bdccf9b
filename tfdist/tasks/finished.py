"""A finished run of `tfdist.train`: its options, its task and its model."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from tfdist.errors import TfdistError
from tfdist.named_code import TRUST, UnknownCodeError, check_recorded_code
from tfdist.reading import parse_object, parse_options
from tfdist.records.durable_files import FullTemporaryError, read_file, temporary_directory
from tfdist.records.run_directory import RunDirectory
from tfdist.runs.options import TrainOptions
from tfdist.tasks.base import Task
from tfdist.tasks.finished_files import check_finished


@dataclass(frozen=True)
class FinishedRun:
    """A finished run, read from its directory, with the best model, uncompiled."""

    path: str
    options: TrainOptions
    task: Task
    summary: Mapping[str, Any]
    model: keras.Model
    model_sha256: str


def read_finished(path: str, *, trust_task: bool = False) -> FinishedRun:
    """Reads a run's directory, on any file system of `tf.io.gfile`.

    The model's variables are created in the current strategy's scope.

    Args:
      trust_task: whether to execute any code that the run's options name.

    Raises:
      TfdistError: there is no run, it is not finished, its files cannot be read, or its options
        name code that no command line has named on this machine.
    """
    run = RunDirectory(path)
    check_finished(path, tf.io.gfile.exists)
    try:
        recorded = parse_options(read_file(f"{path}/options.json"))
        summary = parse_object(read_file(f"{path}/summary.json"))
        if recorded is None or summary is None:
            name = "options.json" if recorded is None else "summary.json"
            raise ValueError(f"{name} is incomplete or was changed.")
        if not trust_task:
            check_recorded_code(recorded, where=f"The run in `run_dir={path}`", cure=TRUST)
        options = TrainOptions.from_dict(recorded)
        task = options.task.select()  # First: its module may register the model's layers.
        model, digest = _load_model(run.model)
    except (FullTemporaryError, UnknownCodeError):
        raise
    except (
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        OSError,
        tf.errors.OpError,
    ) as error:
        raise TfdistError(
            f"Cannot read the run in `run_dir={path}`: {type(error).__name__}: {error} "
            "Train it again with this version of tfdist."
        ) from error
    return FinishedRun(path, options, task, summary, model, digest)


def _load_model(path: str) -> tuple[keras.Model, str]:
    """Returns the model and the SHA-256 of its file."""
    with temporary_directory() as directory:
        local = f"{directory}/model.keras"
        tf.io.gfile.copy(path, local)
        with open(local, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        return keras.saving.load_model(local, compile=False), digest
