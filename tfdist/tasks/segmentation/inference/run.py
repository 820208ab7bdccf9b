"""A finished segmentation run: its options, its classes and its model."""

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfdist.errors import TfdistError
from tfdist.models.portable import to_fused_layers
from tfdist.tasks.finished import FinishedRun, read_finished
from tfdist.tasks.images.pixels import PixelFormat
from tfdist.tasks.segmentation.task import Segmentation


@dataclass(frozen=True)
class TrainedRun(FinishedRun):
    """A finished segmentation run of `tfdist.train`; `tfdist.load_run` reads it.

    Its model maps float [batch, height, width, channels], in [0, 255], to logits
    [batch, height, width, classes].

    Attributes:
      class_names: one name per class.
      info: what the model knows about its data; see `tfdist.tasks.base.Data`.
    """

    task: Segmentation
    class_names: tuple[str, ...]
    info: Mapping[str, Any]

    @property
    def image_size(self) -> tuple[int, int]:
        """(height, width) in pixels of the images that the model was trained on."""
        return self.task.image_size

    @property
    def pixels(self) -> PixelFormat:
        """The values of the images that the model was trained on."""
        return PixelFormat.from_info(self.info)

    @property
    def num_classes(self) -> int:
        """The number of classes."""
        return len(self.class_names)

    @property
    def ignore_label(self) -> int | None:
        """The label of pixels that metrics ignore, or None."""
        return self.task.ignore_label


def load_run(
    run_dir: str, *, strategy: tf.distribute.Strategy | None = None, trust_task: bool = False
) -> TrainedRun:
    """Returns a finished run with its model.

    Args:
      run_dir: a run directory of `tfdist.train`, on any file system of `tf.io.gfile`.
      strategy: creates the model's variables in its scope; the current strategy by default.
      trust_task: whether to execute any code that the run's options name; by default, only code
        that a command line has named on this machine.

    Raises:
      TfdistError: there is no run, it is not finished, its files cannot be read, its options name
        other code, or it is a run of another task.
    """
    path = os.path.expanduser(run_dir)
    with (strategy or tf.distribute.get_strategy()).scope():
        run = read_finished(path, trust_task=trust_task)
        if not isinstance(run.task, Segmentation):
            raise TfdistError(
                f"Cannot use the run in `run_dir={path}`: it is of `task={run.options.task.task}`, "
                "not of segmentation. Name another run."
            )
        names, info = run.summary.get("per_class_iou"), run.summary.get("info", {})
        if not isinstance(names, dict) or not isinstance(info, dict) or not _is_whole(info):
            raise TfdistError(
                f"Cannot use the run in `run_dir={path}`: its summary.json is incomplete or was "
                "changed. Run its tfdist.train command again, which writes that file."
            )
        fused = dataclasses.replace(run, model=to_fused_layers(run.model))
        return TrainedRun(**vars(fused), class_names=tuple(names), info=info)


def _is_whole(info: Mapping[str, Any]) -> bool:
    """Returns whether the size and the values of the training images can be read, if known."""
    try:
        PixelFormat.from_info(info)
    except (KeyError, TypeError, ValueError):
        return False
    size = info.get("original_size")
    return size is None or (isinstance(size, list) and list(map(type, size)) == [int, int])
