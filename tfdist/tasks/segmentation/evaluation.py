"""Evaluates a run's model for the summary: metrics per class, and pictures."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.curves import make_curves, stack_curves
from tfdist.data.source import Source
from tfdist.tasks.segmentation.pictures import make_comparison
from tfdist.training.run_directory import RunDirectory
from tfdist.training.trainer import Trainer


def evaluate_segmentation(
    trainer: Trainer, source: Source, *, class_names: Sequence[str], global_batch_size: int
) -> dict[str, Any]:
    """Returns `val_loss`, `val_mean_iou`, `val_pixel_accuracy`, ... and `per_class_iou`.

    Args:
      trainer: a trainer whose model has a `SegmentationMetrics`.
      source: the examples.
      class_names: the keys of `per_class_iou`.
      global_batch_size: examples per step.
    """
    logs = trainer.evaluate(
        source, global_batch_size=global_batch_size, verbose=0, return_dict=True
    )
    summary: dict[str, Any] = {
        f"val_{name}": value for name, value in logs.items() if "/" not in name
    }
    summary["per_class_iou"] = {name: logs[f"iou/{name}"] for name in class_names}
    return summary


def write_samples(
    run: RunDirectory, trainer: Trainer, source: Source, *, num_examples: int, num_classes: int
) -> str | None:
    """Writes `samples/predictions.png`: image, truth and prediction of the first examples.

    All workers predict; only the chief writes, and returns the path.
    """
    count = min(num_examples, source.num_examples)
    examples = [source.load(tf.constant(index, tf.int64)) for index in range(count)]
    images = np.stack([image.numpy() for image, _ in examples])
    truths = np.stack([mask.numpy() for _, mask in examples]).reshape(images.shape[:3])
    logits = trainer.predict(
        images, global_batch_size=max(count, trainer.engine.workers.num_replicas)
    )
    if not trainer.is_chief:
        return None
    png = make_comparison(
        images, truths.astype(np.int64), np.argmax(logits, -1), num_classes=num_classes
    )
    return run.write_picture("samples/predictions.png", png)


def write_curves(run: RunDirectory, history: Mapping[str, Sequence[float]]) -> str | None:
    """Writes `curves.svg`: the losses and the mean IoU of every epoch.

    Args:
      run: the run's directory.
      history: log -> one value per epoch.

    Returns:
      The path, or None if the history has no validation loss.
    """
    if not history.get("val_loss"):
        return None
    pictures = [
        make_curves({name: history[name] for name in (of, f"val_{of}")})
        for of in ("loss", "mean_iou")
    ]
    return run.write_picture("curves.svg", stack_curves(pictures).encode())
