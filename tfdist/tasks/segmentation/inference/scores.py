"""How predictions compare with the truth: confusion matrices and what follows from them."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.tasks.segmentation.inference.predictor import Predictor
from tfdist.tasks.segmentation.metrics import measure_confusion


def count_confusion(
    truth: np.ndarray, predicted: np.ndarray, *, num_classes: int, ignore_label: int | None
) -> np.ndarray:
    """Returns int64 [classes (truth), classes (prediction)]: how many pixels are which.

    Args:
      truth, predicted: uint8 labels of one shape.
      num_classes: pixels whose truth is not below it do not count.
      ignore_label: nor do those whose truth this is.
    """
    counts = truth < num_classes
    if ignore_label is not None:
        counts &= truth != ignore_label
    cells = truth[counts].astype(np.int64) * num_classes + predicted[counts]
    return np.bincount(cells, minlength=num_classes**2).reshape(num_classes, num_classes)


def summarize_confusion(confusion: np.ndarray, class_names: Sequence[str]) -> dict[str, Any]:
    """Returns `pixel_accuracy`, `mean_iou`, `mean_dice` and `per_class_iou`.

    A class that is neither predicted nor in the truth has no IoU (None) and is in no mean.
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
    """Returns everything that is known of a confusion matrix, ready for JSON."""
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
    """Yields the confusion matrix of each example, int64 [classes, classes], in order.

    Args:
      predictor: what is scored.
      examples: (image uint8 [height, width, 3], truth uint8 [height, width]).
      ignore_label: label that does not count, or None.
    """
    for truth, mask in predictor.predict_masks((truth, image) for image, truth in examples):
        yield count_confusion(
            truth, mask, num_classes=predictor.num_classes, ignore_label=ignore_label
        )


def format_scores(scores: dict[str, Any]) -> str:
    """Returns `summarize_confusion`'s result as a table to read."""
    rows = [(name, iou) for name, iou in scores["per_class_iou"].items()]
    rows += [("mean IoU", scores["mean_iou"]), ("pixel accuracy", scores["pixel_accuracy"])]
    width = max(len(name) for name, _ in rows)
    return "\n".join(
        f"{name:<{width}}  {'-' if value is None else f'{value:.4f}'}" for name, value in rows
    )
