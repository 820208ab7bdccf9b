"""Scores predictions against the truth with confusion matrices and metrics."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.tasks.segmentation.inference.predictor import Predictor
from tfdist.tasks.segmentation.metrics import measure_confusion


def count_confusion(
    truth: np.ndarray, predicted: np.ndarray, *, num_classes: int, ignore_label: int | None
) -> np.ndarray:
    """Returns the confusion matrix, int64 [classes (truth), classes (prediction)], in pixels.

    Args:
      truth, predicted: uint8 labels of the same shape.
      num_classes: the number of classes; pixels whose truth is out of range do not count.
      ignore_label: pixels with this truth do not count either; or None.
    """
    counts = truth < num_classes
    if ignore_label is not None:
        counts &= truth != ignore_label
    cells = truth[counts].astype(np.int64) * num_classes + predicted[counts]
    return np.bincount(cells, minlength=num_classes**2).reshape(num_classes, num_classes)


def summarize_confusion(confusion: np.ndarray, class_names: Sequence[str]) -> dict[str, Any]:
    """Returns `pixel_accuracy`, `mean_iou`, `mean_dice` and `per_class_iou`.

    A class that is neither predicted nor in the truth has the IoU None; the means exclude it.
    """
    logs = {
        name: float(value)
        for name, value in measure_confusion(tf.constant(confusion), class_names).items()
    }
    union = confusion.sum(0) + confusion.sum(1)
    return {name: value for name, value in logs.items() if "/" not in name} | {
        "per_class_iou": {
            name: logs[f"iou/{name}"] if pixels else None
            for name, pixels in zip(class_names, union, strict=True)
        }
    }


def make_scores(
    confusion: np.ndarray, class_names: Sequence[str], *, num_images: int
) -> dict[str, Any]:
    """Returns a confusion matrix and its metrics, ready for JSON."""
    return {
        "images": num_images,
        **summarize_confusion(confusion, class_names),
        "class_names": list(class_names),
        "confusion": confusion.tolist(),
    }


def score_examples(
    predictor: Predictor,
    examples: Iterable[tuple[np.ndarray, np.ndarray]],
    *,
    ignore_label: int | None,
) -> Iterator[np.ndarray]:
    """Yields the confusion, int64 [classes, classes], of each example (image, truth), in order."""
    for truth, mask in predictor.predict_masks((truth, image) for image, truth in examples):
        yield count_confusion(
            truth, mask, num_classes=predictor.num_classes, ignore_label=ignore_label
        )


def format_scores(scores: dict[str, Any]) -> str:
    """Returns the result of `summarize_confusion` as a text table."""
    rows = [(name, iou) for name, iou in scores["per_class_iou"].items()]
    rows += [("mean IoU", scores["mean_iou"]), ("pixel accuracy", scores["pixel_accuracy"])]
    width = max(len(name) for name, _ in rows)
    return "\n".join(
        f"{name:<{width}}  {'-' if value is None else f'{value:.4f}'}" for name, value in rows
    )
