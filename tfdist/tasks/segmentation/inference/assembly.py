"""Turns the options of the commands that use a finished run into objects."""

import tensorflow as tf

from tfdist.data.source import SequentialSource, Source
from tfdist.errors import TfdistError
from tfdist.tasks.segmentation.inference.options import EvaluateRunOptions, WindowOptions
from tfdist.tasks.segmentation.inference.predictor import Predictor
from tfdist.tasks.segmentation.inference.run import TrainedRun
from tfdist.tasks.segmentation.inference.windows import Zoom, find_training_zoom, parse_zoom
from tfdist.tasks.segmentation.registry import make_examples
from tfdist.tasks.segmentation.task import parse_label_map


def build_predictor(
    run: TrainedRun,
    options: WindowOptions,
    strategy: tf.distribute.Strategy,
    *,
    original_size: bool = True,
) -> Predictor:
    """Returns the predictor for a run, of images as in its training or in their original size."""
    zoom: Zoom = parse_zoom(options.zoom)
    if zoom is None:
        zoom = find_training_zoom(run) if original_size else 1.0
    return Predictor(
        run.model,
        window=run.image_size,
        overlap=options.overlap,
        zoom=zoom,
        tta=options.tta,
        global_batch_size=options.global_batch_size,
        strategy=strategy,
    )


def build_examples(run: TrainedRun, options: EvaluateRunOptions) -> Source | SequentialSource:
    """Returns the examples to evaluate a run on: its own data set, or that of the options."""
    task = run.task
    num_examples = options.num_examples
    if num_examples is None:
        num_examples = task.train_examples if options.split == "train" else task.val_examples
    dataset = options.dataset or task.dataset
    if not run.pixels.is_plain and dataset != "folder":
        raise TfdistError(
            f"Cannot evaluate on `dataset={dataset}`: the run was trained on images of "
            f"{run.pixels.channels} channels of {run.pixels.dtype}. Give images like these, as "
            "`dataset=folder`."
        )
    label_map = options.label_map or (task.label_map if dataset == "folder" else ())
    return make_examples(
        dataset,
        split=options.split,
        image_size=run.image_size,
        data_dir=options.data_dir or task.data_dir,
        num_classes=task.num_classes or run.num_classes,
        ignore_label=run.ignore_label,
        label_map=parse_label_map(label_map),
        class_names=run.class_names,
        num_examples=num_examples,
        # Only for the run's own data: other data has splits of its own.
        val_fraction=task.val_fraction if options.data_dir in (None, task.data_dir) else 0.0,
        seed=run.options.training.seed,
        pixels=run.pixels,
        tile=0 if options.full_size or dataset != "folder" else task.tile,
        on_bad_example=task.on_bad_example,
    )
