"""How images are resized for a model and cut into overlapping windows, which are blended back."""

from typing import TYPE_CHECKING

import numpy as np
from absl import logging

from tfdist.errors import TfdistError
from tfdist.tasks.segmentation.tiles import plan_starts

Zoom = float | tuple[float, float] | None

AUTO = "auto"


def check_overlap(overlap: float) -> None:
    """Checks that the overlap of windows is in [0, 1)."""
    if not 0 <= overlap < 1:
        raise TfdistError(f"Cannot overlap windows by {overlap}: give an `overlap` in [0, 1).")


def make_weights(window: tuple[int, int]) -> np.ndarray:
    """Returns the weights of a window's pixels in the blend: float32 [height, width], above 0.

    They are highest in the middle, where the model sees most of a pixel's surroundings, and fall
    smoothly toward the border, so that the blend has no seams.

    Source: Pielawski and Wählby 2020 (doi:10.1371/journal.pone.0229839): Hann windows.
    """
    height, width = (np.sin(np.pi * (np.arange(n) + 0.5) / n) ** 2 for n in window)
    return np.outer(height, width).astype(np.float32)


class Canvas:
    """The windows of one image, and the class probabilities blended so far.

    An image smaller than a window is padded with its mirror image.

    Args:
      image: [height, width, channels].
    """

    def __init__(
        self, image: np.ndarray, *, window: tuple[int, int], overlap: float, num_classes: int
    ):
        self._size = image.shape[:2]
        self._window = window
        missing = [max(0, w - n) for n, w in zip(self._size, window, strict=True)]
        margins = [(m // 2, m - m // 2) for m in missing]
        self._margins = margins
        self._image = np.pad(image, (*margins, (0, 0)), mode="symmetric")
        padded = self._image.shape[:2]
        rows, columns = (plan_starts(n, w, overlap) for n, w in zip(padded, window, strict=True))
        self.places = [(row, column) for row in rows for column in columns]
        self._missing = len(self.places)
        self._sum = np.zeros((*padded, num_classes), np.float32)
        self._weight = np.zeros((*padded, 1), np.float32)

    @property
    def dtype(self) -> np.dtype:
        """The type of the image's values."""
        return self._image.dtype

    @property
    def is_complete(self) -> bool:
        """Whether every window has been added."""
        return self._missing == 0

    def cut(self, place: tuple[int, int]) -> np.ndarray:
        """Returns the window at a position: [height, width, channels]."""
        return self._image[self._slices(place)]

    def add(self, place: tuple[int, int], values: np.ndarray, weights: np.ndarray) -> None:
        """Adds a window to the blend.

        Args:
          place: one of `places`, each of which must be added once.
          values: float32 [height, width, classes].
          weights: float32 [height, width].
        """
        area = self._slices(place)
        self._sum[area] += values * weights[..., None]
        self._weight[area] += weights[..., None]
        self._missing -= 1

    def blend(self) -> np.ndarray:
        """Returns the weighted mean of the windows: float32 [height, width, classes]."""
        area = tuple(
            slice(before, before + n)
            for (before, _), n in zip(self._margins, self._size, strict=True)
        )
        return self._sum[area] / self._weight[area]

    def _slices(self, place: tuple[int, int]) -> tuple[slice, ...]:
        return tuple(slice(p, p + w) for p, w in zip(place, self._window, strict=True))


if TYPE_CHECKING:
    from tfdist.tasks.segmentation.inference.run import TrainedRun


def parse_zoom(text: str) -> float | None:
    """Returns the factor in a value of `--zoom`, or None for `auto`.

    >>> parse_zoom("0.5"), parse_zoom("auto")
    (0.5, None)
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
