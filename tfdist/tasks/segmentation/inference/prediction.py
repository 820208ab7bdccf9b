"""Predicts image files and writes masks, overlays and statistics."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tfdist.errors import TfdistError
from tfdist.tasks.images.pixels import PLAIN, PixelFormat
from tfdist.tasks.images.reading import read_ahead, read_image
from tfdist.tasks.segmentation.inference.files import PredictionDirectory
from tfdist.tasks.segmentation.inference.predictor import Predictor
from tfdist.tasks.segmentation.inference.scores import (
    count_confusion,
    make_scores,
    summarize_confusion,
)
from tfdist.tasks.segmentation.label_map import LabelMap
from tfdist.tasks.segmentation.masks import check_mask, read_mask

_THREADS = 4  # which read images


@dataclass(frozen=True)
class Prediction:
    """The statistics of one predicted image.

    Attributes:
      pixels: int64 [classes], the number of pixels that are predicted to be of each class.
      confusion: int64 [classes (truth), classes], or None if there is no truth.
    """

    name: str
    pixels: np.ndarray
    confusion: np.ndarray | None


def predict_files(
    predictor: Predictor,
    images: Mapping[str, str],
    directory: PredictionDirectory,
    *,
    masks: Mapping[str, str] | None = None,
    ignore_label: int | None = None,
    label_map: LabelMap | None = None,
    pixels: PixelFormat = PLAIN,
    report: Callable[[TfdistError], None],
) -> Iterator[Prediction]:
    """Predicts the images that the directory does not hold yet, and yields one result per image.

    Args:
      ignore_label: the label in the truth of pixels that do not count.
      report: called with the error of a file that cannot be used. Such an image is left out; such
        a mask is left out of the metrics only.
    """

    def measure(name: str, predicted: np.ndarray) -> Prediction:
        pixels = np.bincount(predicted.ravel(), minlength=predictor.num_classes)
        if masks is None:
            return Prediction(name, pixels, None)
        try:
            truth = read_mask(masks[name], label_map=label_map)
            check_mask(
                masks[name],
                truth,
                predicted.shape,
                num_classes=predictor.num_classes,
                ignore_label=ignore_label,
            )
        except TfdistError as error:
            report(error)
            return Prediction(name, pixels, None)
        return Prediction(
            name,
            pixels,
            count_confusion(
                truth, predicted, num_classes=predictor.num_classes, ignore_label=ignore_label
            ),
        )

    done = [name for name in images if directory.holds(name)]
    for name in done:
        yield measure(name, directory.read_mask(name))
    missing = {name: path for name, path in images.items() if name not in set(done)}

    def read() -> Iterator[tuple[tuple[str, np.ndarray], np.ndarray]]:
        read_one = functools.partial(read_image, pixels=pixels)
        readings = read_ahead(read_one, missing.values(), threads=_THREADS)
        for name, reading in zip(missing, readings, strict=True):
            try:
                image = reading.result()
            except TfdistError as error:
                report(error)
                continue
            yield (name, image), image

    for (name, image), mask in predictor.predict_masks(read()):
        directory.write(name, image, mask)
        yield measure(name, mask)


def write_statistics(
    directory: PredictionDirectory, predictions: Sequence[Prediction], class_names: Sequence[str]
) -> None:
    """Writes `classes.csv`: the number of pixels of each image, and the fraction of each class."""
    rows: list[list[Any]] = [["image", "pixels", *class_names]]
    total = np.zeros(len(class_names), np.int64)
    for prediction in predictions:
        total += prediction.pixels
        rows.append(_make_class_row(prediction.name, prediction.pixels))
    rows.append(_make_class_row("(all)", total))
    directory.write_table("classes.csv", rows)


def write_scores(
    directory: PredictionDirectory, predictions: Sequence[Prediction], class_names: Sequence[str]
) -> dict[str, Any]:
    """Writes `metrics.csv`, a row per image, and `metrics.json`; returns the latter's contents."""
    means = ["pixel_accuracy", "mean_iou", "mean_dice"]
    rows: list[list[Any]] = [["image", *means, *(f"iou/{name}" for name in class_names)]]
    total = np.zeros((len(class_names), len(class_names)), np.int64)
    scored = [(p.name, p.confusion) for p in predictions if p.confusion is not None]
    for name, confusion in scored:
        total += confusion
        scores = summarize_confusion(confusion, class_names)
        rows.append([name, *(scores[m] for m in means), *scores["per_class_iou"].values()])
    directory.write_table("metrics.csv", rows)
    result = make_scores(total, class_names, num_images=len(scored))
    directory.write_json("metrics.json", result)
    return result


def _make_class_row(name: str, pixels: np.ndarray) -> list[Any]:
    count = int(pixels.sum())
    return [name, count, *(round(float(n) / max(count, 1), 6) for n in pixels)]
