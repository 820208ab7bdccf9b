"""Turns options into the objects that commands work with."""

import dataclasses
import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import keras
import tensorflow as tf

from tfdist import devices, models
from tfdist.data.cache import SequentialSource
from tfdist.data.source import Source
from tfdist.errors import TfdistError
from tfdist.models.portable import to_fused_layers, to_keras_layers
from tfdist.runs.options import TrainOptions, parse_label_map
from tfdist.strategies.registry import (
    AUTO,
    choose_local_strategy,
    make_strategy,
)
from tfdist.tasks.segmentation.augment import Augmentation
from tfdist.tasks.segmentation.class_weights import count_classes, make_class_weights
from tfdist.tasks.segmentation.inference.options import (
    DeviceOptions,
    EvaluateRunOptions,
    WindowOptions,
)
from tfdist.tasks.segmentation.inference.predictor import Predictor
from tfdist.tasks.segmentation.inference.run import TrainedRun, read_run
from tfdist.tasks.segmentation.losses import make_loss
from tfdist.tasks.segmentation.metrics import SegmentationMetrics
from tfdist.tasks.segmentation.registry import make_examples, make_source
from tfdist.training.optimizers import make_optimizer
from tfdist.training.trainer import Trainer


@dataclass(frozen=True)
class Data:
    """The sources of a run.

    Attributes:
      train, val: the splits.
      num_classes: classes of the labels.
      class_names: a name a class.
    """

    train: Source
    val: Source
    num_classes: int
    class_names: tuple[str, ...]


def resolve_options(options: TrainOptions) -> TrainOptions:
    """Returns the options with everything that depends on the machine decided."""
    precision = devices.choose_precision(options.training.precision)
    return dataclasses.replace(
        options, training=dataclasses.replace(options.training, precision=precision)
    )


def configure_process(options: TrainOptions) -> None:
    """Sets devices, memory, precision and seeds, before anything else is made."""
    devices.configure_virtual_devices(options.strategy.virtual_devices)
    devices.configure_memory_growth()
    devices.configure_allocator()
    devices.configure_precision(options.training.precision)
    devices.configure_determinism(
        options.training.seed, deterministic=options.training.deterministic
    )


def start_devices(options: DeviceOptions) -> tf.distribute.Strategy:
    """Sets the devices of a process that uses a finished run, and returns its strategy."""
    devices.configure_virtual_devices(options.virtual_devices)
    devices.configure_memory_growth()
    name = choose_local_strategy() if options.strategy == AUTO else options.strategy
    return make_strategy(name, devices=list(options.devices) or None)


def load_run(run_dir: str, *, strategy: tf.distribute.Strategy | None = None) -> TrainedRun:
    """Returns a finished run with its model.

    Args:
      run_dir: what `tfdist.train` filled, on any file system of `tf.io.gfile`.
      strategy: where the model's variables are made; one device by default.

    Raises:
      TfdistError: there is no run, it is not finished, or its files cannot be read.
    """
    with (strategy or tf.distribute.get_strategy()).scope():
        run = read_run(os.path.expanduser(run_dir))
        return dataclasses.replace(run, model=to_fused_layers(run.model))


def save_model(trainer: Trainer, path: str) -> None:
    """Writes a run's model, of Keras's own layers, as a `.keras` file; all workers call it."""
    trainer.save_model(path, convert=to_keras_layers)


def build_predictor(
    run: TrainedRun, options: WindowOptions, strategy: tf.distribute.Strategy
) -> Predictor:
    """Returns what predicts with a run's model, loaded under the strategy."""
    return Predictor(
        run.model,
        window=run.image_size,
        overlap=options.overlap,
        zoom=options.zoom,
        tta=options.tta,
        global_batch_size=options.global_batch_size,
        strategy=strategy,
    )


def build_examples(run: TrainedRun, options: EvaluateRunOptions) -> Source | SequentialSource:
    """Returns the examples that a run is evaluated on: its own data set, or what is named."""
    data = run.options.data
    num_examples = options.num_examples
    if num_examples is None:
        num_examples = data.train_examples if options.split == "train" else data.val_examples
    dataset = options.dataset or data.dataset
    label_map = options.label_map or (data.label_map if dataset == "folder" else ())
    return make_examples(
        dataset,
        split=options.split,
        image_size=run.image_size,
        data_dir=options.data_dir or data.data_dir,
        num_classes=data.num_classes or run.num_classes,
        ignore_label=run.ignore_label,
        label_map=parse_label_map(label_map),
        class_names=run.class_names,
        num_examples=num_examples,
        seed=run.options.training.seed,
        on_bad_example=data.on_bad_example,
    )


def build_data(options: TrainOptions) -> Data:
    """Returns the training and validation sources, read and cached as the options say."""
    data = options.data
    make = functools.partial(
        make_source,
        data.dataset,
        image_size=data.image_size,
        data_dir=data.data_dir,
        num_classes=data.num_classes,
        ignore_label=data.ignore_label,
        label_map=parse_label_map(data.label_map),
        class_names=data.class_names or None,
        seed=options.training.seed,
        on_bad_example=data.on_bad_example,
        cache=data.cache,
        quiet=options.run.quiet,
    )
    train = make(split="train", num_examples=data.train_examples)
    val = make(split="val", num_examples=data.val_examples)
    if train.num_classes is None:
        raise TfdistError(f"--dataset={data.dataset} does not say its classes. Give --num_classes.")
    return Data(
        train=train,
        val=val,
        num_classes=train.num_classes,
        class_names=tuple(train.class_names or map(str, range(train.num_classes))),
    )


def leave_out_pretrained(options: TrainOptions) -> TrainOptions:
    """Returns the options of a model of the same shapes, for which nothing is downloaded."""
    return dataclasses.replace(options, model=dataclasses.replace(options.model, pretrained=False))


def build_augmentation(options: TrainOptions) -> Augmentation:
    """Returns the training examples' augmentation."""
    data = options.data
    return Augmentation(
        flip=data.flip, scale=data.scale, colour=data.colour, ignore_label=data.ignore_label
    )


def find_class_weights(options: TrainOptions, source: Source) -> Sequence[float] | None:
    """Returns a factor a class, from the training labels, or None."""
    if options.data.class_weights == "none":
        return None
    return [float(w) for w in make_class_weights(count_classes(source), options.data.class_weights)]


def make_build_model(
    options: TrainOptions,
    *,
    num_classes: int,
    class_names: Sequence[str],
    class_weights: Sequence[float] | None,
    total_steps: int,
) -> Callable[[], keras.Model]:
    """Returns a function that builds and compiles the run's model."""

    def build_model() -> keras.Model:
        chosen = options.model
        try:
            model = models.make_model(
                chosen.model,
                image_size=options.data.image_size,
                num_classes=num_classes,
                base_filters=chosen.base_filters,
                depth=chosen.depth,
                norm=chosen.norm,
                pretrained=chosen.pretrained,
                seed=options.training.seed,
            )
        except ValueError as error:
            raise TfdistError(str(error)) from error
        model.compile(
            optimizer=make_optimizer(options.training, total_steps=total_steps),
            loss=make_loss(
                options.training.loss,
                ignore_label=options.data.ignore_label,
                class_weights=class_weights,
            ),
            metrics=[
                SegmentationMetrics(
                    num_classes,
                    ignore_label=options.data.ignore_label,
                    class_names=class_names,
                )
            ],
        )
        return model

    return build_model
