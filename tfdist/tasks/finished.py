"""A finished run of `tfdist.train`: its options, its task and its model."""

import hashlib
import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from tfdist.errors import TfdistError
from tfdist.runs.options import TrainOptions
from tfdist.tasks.base import Task
from tfdist.training.run_directory import RunDirectory


@dataclass(frozen=True)
class FinishedRun:
    """What a finished run left.

    Attributes:
      path: the run's directory.
      options: what it was trained with.
      task: what was trained.
      summary: `summary.json`.
      model: the best one, not compiled.
      model_sha256: of the model's file.
    """

    path: str
    options: TrainOptions
    task: Task
    summary: Mapping[str, Any]
    model: keras.Model
    model_sha256: str


def read_finished(path: str) -> FinishedRun:
    """Reads a run's directory, on any file system of `tf.io.gfile`.

    Variables are made in the strategy's scope that is open.

    Raises:
      TfdistError: there is no run, it is not finished, or its files cannot be read.
    """
    run = RunDirectory(path)
    if not tf.io.gfile.exists(f"{path}/options.json"):
        raise TfdistError(
            f"Cannot find a run in `run_dir={path}`: it has no options.json. Name a directory "
            "that tfdist.train has filled."
        )
    if not (tf.io.gfile.exists(run.model) and tf.io.gfile.exists(f"{path}/summary.json")):
        raise TfdistError(
            f"The run in `run_dir={path}` is not finished: it has no model.keras or no "
            "summary.json. Let the tfdist.train command that began it go on to its end."
        )
    try:
        options = TrainOptions.from_dict(_read_json(f"{path}/options.json"))
        task = options.task.select()  # Before the model: its module registers what it is made of.
        summary = _read_json(f"{path}/summary.json")
        model, digest = _load_model(run.model)
    except (KeyError, TypeError, ValueError, OSError, tf.errors.OpError) as error:
        raise TfdistError(
            f"Cannot read the run in `run_dir={path}`: {type(error).__name__}: {error} "
            "Train it again with this version of tfdist."
        ) from error
    return FinishedRun(path, options, task, summary, model, digest)


def _read_json(path: str) -> dict[str, Any]:
    with tf.io.gfile.GFile(path) as file:
        return json.loads(file.read())


def _load_model(path: str) -> tuple[keras.Model, str]:
    """Returns the model and its file's hash."""
    with tempfile.TemporaryDirectory() as directory:
        local = f"{directory}/model.keras"
        tf.io.gfile.copy(path, local)
        with open(local, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        return keras.saving.load_model(local, compile=False), digest
