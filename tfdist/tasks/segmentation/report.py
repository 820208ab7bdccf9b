"""Segmentation's part of a report."""

from collections.abc import Mapping, Sequence

from tfdist.records.recorded_run import RecordedRun
from tfdist.report import Section, make_bars, make_confusion, make_pictures
from tfdist.tasks.segmentation.pictures import make_palette

_IOU = "val_iou/"


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
