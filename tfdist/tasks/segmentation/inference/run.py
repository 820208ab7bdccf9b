"""A finished run of segmentation: its options, its classes and its model."""

from dataclasses import dataclass

import keras

from tfdist.errors import TfdistError
from tfdist.runs.options import TrainOptions
from tfdist.tasks.finished import read_finished
from tfdist.tasks.segmentation.task import Segmentation


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
      TfdistError: there is no run, it is not finished, its files cannot be read, or it is one of
        another task.
    """
    run = read_finished(path)
    if not isinstance(run.task, Segmentation):
        raise TfdistError(
            f"The run in `run_dir={path}` is one of `task={run.options.task.task}`, which this "
            "command is not for."
        )
    return TrainedRun(
        path=path,
        options=run.options,
        task=run.task,
        class_names=tuple(run.summary["per_class_iou"]),
        model=run.model,
        model_sha256=run.model_sha256,
    )
