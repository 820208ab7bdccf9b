"""A finished run: its options, its classes and its model."""

import hashlib
import json
import tempfile
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from tfdist.errors import TfdistError
from tfdist.runs.options import TrainOptions
from tfdist.tasks.segmentation.task import Segmentation
from tfdist.training.run_directory import RunDirectory


@dataclass(frozen=True)
class TrainedRun:
    """What a finished run of `tfdist.train` left; `tfdist.load_run` reads it.

    Attributes:
      path: the run's directory.
      options: what it was trained with.
      task: the part of them that says what.
      class_names: a name a class.
      model: from float [batch, height, width, 3], in [0, 255], to logits
        [batch, height, width, classes].
      model_sha256: of the model's file.
    """

    path: str
    options: TrainOptions
    task: Segmentation
    class_names: tuple[str, ...]
    model: keras.Model
    model_sha256: str

    @property
    def image_size(self) -> tuple[int, int]:
        """(height, width) in pixels of the images it was trained on."""
        return self.task.image_size

    @property
    def num_classes(self) -> int:
        """How many classes it tells apart."""
        return len(self.class_names)

    @property
    def ignore_label(self) -> int | None:
        """The label of pixels that count in no metric, or None."""
        return self.task.ignore_label


def read_run(path: str) -> TrainedRun:
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
        class_names = tuple(_read_json(f"{path}/summary.json")["per_class_iou"])
        model, digest = _load_model(run.model)
    except (KeyError, TypeError, ValueError, OSError, tf.errors.OpError) as error:
        raise TfdistError(
            f"Cannot read the run in `run_dir={path}`: {type(error).__name__}: {error} "
            "Train it again with this version of tfdist."
        ) from error
    task = options.task.select()
    if not isinstance(task, Segmentation):
        raise TfdistError(f"The run in `run_dir={path}` is one of `task={options.task.task}`.")
    return TrainedRun(
        path=path,
        options=options,
        task=task,
        class_names=class_names,
        model=model,
        model_sha256=digest,
    )


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
