"""Segmentation's part of a report: samples, the IoU of every class, the confusion matrix."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from tfdist.records.recorded_run import RecordedRun
from tfdist.report import Section, make_bars, make_confusion, make_pictures
from tfdist.tasks.segmentation.pictures import make_comparison, make_palette

if TYPE_CHECKING:
    from tfdist.data.source import Source
    from tfdist.training.fit.trainer import Trainer

_IOU = "val_iou/"
_SAMPLES = 6


def make_sections(run: RecordedRun) -> Sequence[Section]:
    """Returns samples, the IoU of every class and the confusion matrix.

    Before the end of a run, these are the samples and the IoU of the last epoch.
    """
    ious = run.summary.get("per_class_iou") or _find_last(run)
    colors = _name_colors(list(ious))
    png = run.read("samples/predictions.png")
    samples = make_pictures([(png, "image, truth and prediction")])
    confusion = run.summary.get("confusion")
    return [
        Section("Samples of the validation data", samples),  # with a legend
        Section("IoU of each class, validation", make_bars(ious, colors=colors) if ious else ""),
        Section(
            "Confusion matrix, in pixels of the validation data",
            make_confusion(confusion, list(ious)) if confusion else "",
        ),
    ]


def draw_samples(trainer: "Trainer", source: "Source", *, class_names: Sequence[str]) -> np.ndarray:
    """Returns image, truth and prediction of some examples, uint8 [height, width, 3].

    They are spread over the source, because neighbors may be frames of one video. All workers
    call this.
    """
    import tensorflow as tf

    count = min(_SAMPLES, source.num_examples)
    chosen = np.linspace(0, source.num_examples - 1, count).round().astype(np.int64)
    examples = [source.load(tf.constant(index)) for index in chosen]
    images = np.stack([image.numpy() for image, _ in examples])
    truths = np.stack([mask.numpy() for _, mask in examples]).reshape(images.shape[:3])
    logits = trainer.predict(
        images, verbose=0, global_batch_size=max(count, trainer.engine.workers.num_replicas)
    )
    return make_comparison(
        images, truths.astype(np.int64), np.argmax(logits, -1), class_names=class_names
    )


def _find_last(run: RecordedRun) -> Mapping[str, float]:
    """Returns the IoU of every class in the last epoch with a validation."""
    for line in reversed(run.lines):
        found = {n.removeprefix(_IOU): value for n, value in line.items() if n.startswith(_IOU)}
        if found:
            return found
    return {}


def _name_colors(names: Sequence[str]) -> dict[str, str]:
    palette = make_palette(len(names))
    return {name: f"#{bytes(color).hex()}" for name, color in zip(names, palette, strict=True)}
