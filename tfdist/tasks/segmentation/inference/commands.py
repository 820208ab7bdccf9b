"""Evaluation, prediction and export for finished segmentation runs."""

import dataclasses
import functools
import sys
from typing import TYPE_CHECKING

import numpy as np

from tfdist.cli.command import EXIT_FAILED
from tfdist.errors import TfdistError
from tfdist.tasks.commands import (
    Command,
    ExportOptions,
    ExportRunOptions,
    check_export,
    report_evaluation,
    run_export,
    start_devices,
)
from tfdist.tasks.segmentation.dataset_name import check_dataset
from tfdist.tasks.segmentation.inference.options import EvaluateOptions, PredictOptions
from tfdist.tasks.segmentation.task import parse_label_map

if TYPE_CHECKING:
    from tfdist.tasks.segmentation.inference.prediction import Prediction


def check_evaluation(options: EvaluateOptions) -> None:
    """Checks the name of the data set, if one is given."""
    if options.run.dataset:
        check_dataset(options.run.dataset, data_dir="of the run", num_classes=1)


def run_evaluation(options: EvaluateOptions) -> int:
    """Scores a run's model on every example of a split, prints the metrics and writes them."""
    from tfdist.data.cache import read_examples
    from tfdist.data.progress import show_progress
    from tfdist.tasks.segmentation.folder import FolderSource
    from tfdist.tasks.segmentation.inference import assembly, scores
    from tfdist.tasks.segmentation.inference.run import load_run
    from tfdist.tasks.segmentation.tfds_source import TfdsSource

    chosen = options.run
    strategy = start_devices(options.devices)
    run = load_run(chosen.run_dir, strategy=strategy, trust_task=chosen.trust_task)
    source = assembly.build_examples(run, chosen)
    full = source if chosen.full_size and isinstance(source, FolderSource | TfdsSource) else None
    predictor = assembly.build_predictor(
        run, options.windows, strategy, original_size=full is not None
    )
    num_classes = len(source.info["class_names"])
    if num_classes != run.num_classes:
        raise TfdistError(
            f"Cannot evaluate a model of {run.num_classes} classes on a data set of "
            f"{num_classes} classes. Name another --dataset."
        )
    total = np.zeros((run.num_classes, run.num_classes), np.int64)
    confusions = scores.score_examples(
        predictor,
        full.read_examples(original_size=True) if full else read_examples(source),
        ignore_label=run.ignore_label,
    )
    for confusion in show_progress(
        confusions, source.num_examples, unit="image", quiet=chosen.quiet
    ):
        total += confusion
    result = scores.make_scores(total, run.class_names, num_images=source.num_examples)
    text = f"{scores.format_scores(result)}\n{source.num_examples} images of {chosen.split}. "
    return report_evaluation(options, run.path, result, text)


def check_prediction(options: PredictOptions) -> None:
    """Checks that the images and the output are given."""
    chosen = options.run
    if not chosen.images or not chosen.output:
        missing = "--output" if chosen.images else "--images"
        raise TfdistError(f"Cannot predict without {missing}. Give --images and --output.")


def run_prediction(options: PredictOptions) -> int:
    """Predicts the images that `--output` does not hold yet.

    Returns:
      0, or 1 if files could not be read, which were reported and left out.
    """
    from tfdist.data.progress import show_progress
    from tfdist.tasks.segmentation.inference import assembly, files, prediction
    from tfdist.tasks.segmentation.inference.run import load_run
    from tfdist.tasks.segmentation.inference.scores import format_scores
    from tfdist.tasks.segmentation.pictures import make_palette

    chosen = options.run
    check_prediction(options)
    assert chosen.images
    assert chosen.output
    images = files.list_images(chosen.images)
    masks = files.find_masks(images, chosen.masks) if chosen.masks else None
    label_map = parse_label_map(chosen.label_map)
    strategy = start_devices(options.devices)
    run = load_run(chosen.run_dir, strategy=strategy, trust_task=chosen.trust_task)
    label_map = label_map or parse_label_map(run.task.label_map)
    predictor = assembly.build_predictor(run, options.windows, strategy)
    palette = make_palette(run.num_classes)
    directory = files.PredictionDirectory(chosen.output, palette, run.class_names)
    windows = options.windows
    directory.open(
        {"images": chosen.images, "model_sha256": run.model_sha256}
        | {
            item.name: getattr(windows, item.name)
            for item in dataclasses.fields(windows)
            if item.metadata.get("result", True)
        }
    )
    problems: list[TfdistError] = []

    def report(error: TfdistError) -> None:
        problems.append(error)
        print(f"{'' if chosen.quiet else chr(10)}tfdist: {error}", file=sys.stderr)

    predictions: list[Prediction] = []
    for result in show_progress(
        prediction.predict_files(
            predictor,
            images,
            directory,
            masks=masks,
            ignore_label=run.ignore_label,
            label_map=label_map,
            pixels=run.pixels,
            report=report,
        ),
        len(images),
        unit="image",
        quiet=chosen.quiet,
    ):
        predictions.append(result)
    predictions.sort(key=lambda result: result.name)
    prediction.write_statistics(directory, predictions, run.class_names)
    if masks is not None:
        scores = prediction.write_scores(directory, predictions, run.class_names)
        if not chosen.quiet:
            print(format_scores(scores))
    if not chosen.quiet:
        print(
            f"{len(predictions)} of {len(images)} images are in {chosen.output}: masks/, "
            f"overlays/, classes.csv{', metrics.csv, metrics.json' if masks else ''}."
        )
    return EXIT_FAILED if problems else 0


def _write_servable(options: ExportRunOptions, path: str) -> str:
    from tfdist.tasks.segmentation.inference.run import load_run
    from tfdist.tasks.segmentation.inference.servable import (
        ENCODED_SIGNATURE,
        TENSOR_SIGNATURE,
        save_servable,
    )

    run = load_run(options.run_dir, trust_task=options.trust_task)
    save_servable(run, path)
    height, width = run.image_size
    return (
        f"signatures {ENCODED_SIGNATURE} (image_bytes -> mask_png) and "
        f"{TENSOR_SIGNATURE} (images -> original_mask), both also -> mask, probabilities "
        f"({height}x{width}, {run.num_classes} classes)."
    )


EVALUATE = Command(EvaluateOptions, run_evaluation, check_evaluation)
PREDICT = Command(PredictOptions, run_prediction, check_prediction)
EXPORT = Command(ExportOptions, functools.partial(run_export, write=_write_servable), check_export)
