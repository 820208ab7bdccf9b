"""Chooses how images are resized for a model."""

from typing import TYPE_CHECKING

from absl import logging

from tfdist.errors import TfdistError

if TYPE_CHECKING:
    from tfdist.tasks.segmentation.inference.run import TrainedRun

Zoom = float | tuple[float, float] | None

AUTO = "auto"


def parse_zoom(text: str) -> float | None:
    """Returns the factor in a value of `--zoom`, or None for `auto`.

    >>> parse_zoom("0.5"), parse_zoom("auto")
    (0.5, None)

    Raises:
      TfdistError: it is neither.
    """
    if text == AUTO:
        return None
    try:
        return float(text)
    except ValueError:
        raise TfdistError(
            f"`zoom={text}` is neither a number nor auto. Give a factor, as in `zoom=0.5`."
        ) from None


def find_training_zoom(run: "TrainedRun") -> Zoom:
    """Returns the factors by which the images that a model was trained on had been resized.

    These are the factors of a training image of the median size, without augmentation, because
    the best epoch is chosen on images that are not augmented.

    Returns:
      The factors of the height and the width. None if the training images had many sizes: each
      of them was resized to `image_size`, whatever its size. 1.0, with a warning, if the run
      does not say.
    """
    if "original_size" not in run.info:
        logging.warning(
            "The run does not say how large its training images were: images keep their size. "
            "Set --zoom to the factor by which the training images were resized."
        )
        return 1.0
    original = run.info["original_size"]
    if original is None:
        return None
    return run.image_size[0] / original[0], run.image_size[1] / original[1]
