"""The segmentation task, which assigns a class to every pixel of an image."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from tfdist.errors import TfdistError
from tfdist.imports import import_named
from tfdist.models import MODELS
from tfdist.options import option
from tfdist.tasks.base import Task
from tfdist.tasks.data import Data, DataPlan
from tfdist.tasks.images.pixels import PixelFormat, check_value_range
from tfdist.tasks.segmentation.dataset_name import check_dataset
from tfdist.tasks.segmentation.presets import PRESETS

if TYPE_CHECKING:
    import keras
    import numpy as np

    from tfdist.records.recorded_run import RecordedRun
    from tfdist.records.run_directory import RunDirectory
    from tfdist.report import Section
    from tfdist.tasks.segmentation.augment import Augmentation
    from tfdist.training.fit.trainer import Trainer


@dataclass(frozen=True, kw_only=True)
class Segmentation(Task):
    """Semantic segmentation."""

    name: ClassVar[str] = "segmentation"
    monitor: ClassVar[str] = "val_mean_iou"
    presets: ClassVar[Mapping[str, Sequence[str]]] = PRESETS
    pictures: ClassVar[tuple[str, ...]] = ("samples/predictions.png",)
    commands: ClassVar[Mapping[str, str]] = {
        "evaluate": "tfdist.tasks.segmentation.inference.commands:EVALUATE",
        "predict": "tfdist.tasks.segmentation.inference.commands:PREDICT",
        "export": "tfdist.tasks.segmentation.inference.commands:EXPORT",
    }

    dataset: str = option(
        "shapes", "shapes (drawn as it is read), folder, or tfds:NAME", metavar="NAME"
    )
    data_dir: str | None = option(
        None,
        "folder: directory of SPLIT/images and SPLIT/masks; tfds: of the data sets (maybe gs://)",
        metavar="DIR",
        must_exist="It must hold SPLIT/images and SPLIT/masks.",
        must_exist_if=("dataset", "folder"),
    )
    num_classes: int | None = option(None, "classes; as in the data set by default", metavar="N")
    ignore_label: int | None = option(
        None, "label of pixels that losses and metrics ignore", metavar="LABEL"
    )
    label_map: tuple[str, ...] = option(
        (),
        "folder: the class that a value or color in the masks stands for, as in 255:1 or "
        "#ff0000:1; values that are not listed stand for themselves, colors must all be listed",
        metavar="FROM:TO,FROM:TO",
    )
    class_names: tuple[str, ...] = option((), "names of the classes", metavar="sky,road")
    image_size: tuple[int, int] = option(
        (96, 96),
        "height and width in pixels; images are resized bilinearly, masks to the nearest label",
        metavar="H,W",
    )
    stored_size: tuple[int, ...] = option(
        (),
        "height and width at which training images are kept, so that zooming in shows details "
        "instead of a blur; image_size by default",
        metavar="H,W",
    )
    train_examples: int | None = option(
        None, "number of training examples; a maximum except for shapes", metavar="N"
    )
    val_examples: int | None = option(
        None, "number of validation examples; a maximum except for shapes", metavar="N"
    )
    val_fraction: float = option(
        0.0,
        "folder: fraction of the training examples to use for validation, chosen by name, if there "
        "is no directory val; 0 for none",
        minimum=0,
    )
    value_range: tuple[float, ...] = option(
        (),
        "folder: the values that are black and white, such as 0,4095 for 12 bits; by default those "
        "of the files' integers, such as 0,65535",
        metavar="MIN,MAX",
    )
    tile: int = option(
        0,
        "folder: train on tiles of so many pixels, which cover each image, instead of whole images",
        minimum=0,
    )
    flip: bool = option(True, "mirror half of the training examples")
    scale: tuple[float, float] = option(
        (0.75, 1.5),
        "zoom training examples by a factor in this range, then crop",
        metavar="MIN,MAX",
    )
    color: float = option(
        0.2, "strength in [0, 1) of changes to brightness, contrast and saturation"
    )
    class_weights: str = option(
        "none",
        "weight classes by how rare their pixels are",
        choices=("none", "sqrt", "median_frequency"),
    )
    logit_adjustment: float = option(
        0.0,
        "add this times the logarithm of the class weights to the logits in the loss, so that rare "
        "classes are not predicted too often",
        minimum=0,
    )
    on_bad_example: str = option(
        "fail",
        "folder: what to do with an image or mask that cannot be used; skip reads all files at the "
        "start, reports the bad ones and leaves them out",
        choices=("fail", "skip"),
    )
    cache: str = option(
        "auto",
        "where to keep decoded and resized examples",
        choices=("auto", "memory", "disk", "none"),
        result=False,
    )
    model: str = option(
        "unet",
        "network, or package.module:function, which is called with image_size and num_classes",
        choices=tuple(MODELS),
        is_open=True,
    )
    base_filters: int = option(
        32, "filters of the first level; every level doubles them", minimum=1
    )
    depth: int = option(
        4, "levels below the first; image sizes must be multiples of 2**depth", minimum=1
    )
    norm: str = option(
        "sync_batch",
        "normalization; sync_batch computes its statistics over the global batch",
        choices=("sync_batch", "batch", "group", "none"),
    )
    dropout: float = option(
        0.0, "fraction of the features between encoder and decoder to drop in training", minimum=0
    )
    pretrained: bool = option(False, "start the encoder from ImageNet weights (downloads them)")
    freeze_encoder: bool = option(
        False, "keep the weights and statistics of the encoder as they are at the start"
    )
    loss: str = option(
        "cross_entropy",
        "loss function",
        choices=("cross_entropy", "dice", "cross_entropy_dice", "focal"),
    )

    def check(self) -> None:
        """Checks the label map, the size of stored images, and the logit adjustment."""
        parse_label_map(self.label_map)
        check_dataset(self.dataset, data_dir=self.data_dir, num_classes=self.num_classes)
        check_value_range(self.value_range)
        if (self.value_range or self.tile) and self.dataset != "folder":
            name = "value_range" if self.value_range else "tile"
            raise TfdistError(f"`{name}` is only for `dataset=folder`. Leave it out.")
        if self.tile and self.on_bad_example == "skip":
            raise TfdistError(
                "`on_bad_example=skip` leaves out whole images, not tiles. Leave out `tile`, or "
                "remove the bad images."
            )
        stored, size = self.stored_size or self.image_size, self.image_size
        if len(stored) != 2 or stored[0] < size[0] or stored[1] < size[1]:
            text = ",".join(map(str, stored))
            raise TfdistError(
                f"`stored_size={text}` must be a height and a width that are not below those of "
                f"`image_size={size[0]},{size[1]}`."
            )
        if self.logit_adjustment and self.class_weights == "none":
            raise TfdistError(
                "`logit_adjustment` requires class weights. Set `class_weights` to sqrt or "
                "median_frequency, or leave out `logit_adjustment`."
            )

    def make_data(self, *, seed: int, quiet: bool) -> Data:
        """Returns the sources, read and cached as the options say."""
        from tfdist.tasks.segmentation.class_weights import count_classes, make_class_weights
        from tfdist.tasks.segmentation.examples import reduce_source
        from tfdist.tasks.segmentation.registry import make_source

        def make(split: str, **changes: Any) -> Any:
            options = {**self._describe_source(seed), "cache": self.cache, "quiet": quiet}
            return make_source(self.dataset, split=split, **{**options, **changes})

        train = make(
            "train",
            num_examples=self.train_examples,
            image_size=self.stored_size or self.image_size,
            measure_size=True,
        )
        pixels = PixelFormat.from_info(train.info)
        val = make("val", num_examples=self.val_examples, pixels=pixels)
        if self.stored_size:
            train = reduce_source(train, self.image_size, is_rounded=pixels.is_kept)
        info = dict(train.info)
        if self.class_weights != "none":
            weights = make_class_weights(count_classes(train), self.class_weights)
            info["class_weights"] = [float(weight) for weight in weights]
        return Data(train, val, info)

    def describe_data(self, *, seed: int) -> DataPlan:
        """Returns what is known about the data without reading it."""
        from tfdist.tasks.segmentation.registry import make_examples
        from tfdist.tasks.segmentation.tfds_source import is_prepared

        size = f"{self.image_size[0]}x{self.image_size[1]}"
        kind, _, name = self.dataset.partition(":")
        if kind == "tfds" and not is_prepared(name, self.data_dir):
            text = f"{self.dataset}, resized to {size}: not here yet, training will download it"
            classes = self.num_classes or len(self.class_names) or 2
            names = list(self.class_names or map(str, range(classes)))
            planned = {"class_names": names, "ignore_label": self.ignore_label}
            return DataPlan(text, planned, None)
        options = {"dataset": self.dataset, **self._describe_source(seed)}
        train = make_examples(split="train", num_examples=self.train_examples, **options)
        info = dict(train.info)
        pixels = PixelFormat.from_info(info)
        val = make_examples(split="val", num_examples=self.val_examples, pixels=pixels, **options)
        text = (
            f"{self.dataset}, {train.num_examples} training and {val.num_examples} validation "
            f"examples of {size}, {len(info['class_names'])} classes"
        )
        return DataPlan(text, info, train.num_examples, train.element_spec)

    def build_model(self, info: Mapping[str, Any], *, seed: int) -> "keras.Model":
        """Returns the network, which maps images in [0, 255] to logits."""
        from tfdist.models.stages import freeze_encoder

        num_classes, channels = len(info["class_names"]), PixelFormat.from_info(info).channels
        if ":" in self.model:
            build: Any = import_named("model", self.model)
            more = {} if channels == 3 else {"channels": channels}
            model = build(image_size=self.image_size, num_classes=num_classes, **more)
        else:
            model = self._make_model(num_classes, channels, seed)
        if self.freeze_encoder:
            try:
                freeze_encoder(model)
            except ValueError as error:
                raise TfdistError(str(error)) from error
        return model

    def compile_model(
        self, model: "keras.Model", optimizer: "keras.optimizers.Optimizer", info: Mapping[str, Any]
    ) -> None:
        """Compiles the model with the chosen loss and the segmentation metrics."""
        from tfdist.tasks.segmentation.losses import make_loss
        from tfdist.tasks.segmentation.metrics import SegmentationMetrics

        names, ignore_label = info["class_names"], info["ignore_label"]
        weights = info.get("class_weights")
        if weights is None and self.class_weights != "none":
            weights = [1.0] * len(names)  # the data has not been read yet
        model.compile(
            optimizer=optimizer,
            loss=make_loss(
                self.loss,
                ignore_label=ignore_label,
                class_weights=weights,
                logit_adjustment=self.logit_adjustment,
            ),
            metrics=[SegmentationMetrics(len(names), ignore_label=ignore_label, class_names=names)],
            jit_compile=False,  # XLA is the user's choice: on a GPU, it compiled for over 90 s
        )

    def make_augmentation(self, info: Mapping[str, Any]) -> "Augmentation":
        """Returns the flips, zooms and color changes."""
        from tfdist.tasks.segmentation.augment import Augmentation

        return Augmentation(
            flip=self.flip,
            scale=self.scale,
            color=self.color,
            ignore_label=info["ignore_label"],
            size=self.image_size,
        )

    def describe_model(self) -> str:
        return self.model

    def without_downloads(self) -> Self:
        return dataclasses.replace(self, pretrained=False)

    def evaluate(self, trainer: "Trainer", data: Data, *, global_batch_size: int) -> dict[str, Any]:
        """Returns the metrics, the intersection over union of every class, and the confusion."""
        logs = super().evaluate(trainer, data, global_batch_size=global_batch_size)
        names = data.info["class_names"]
        per_class = {name: logs[f"val_iou/{name}"] for name in names}
        shape = (len(names), len(names))
        confusion = next(v for v in trainer.engine.read_metrics() if v.shape == shape)
        summary = {name: value for name, value in logs.items() if "/" not in name}
        skipped = data.train.num_skipped + data.val.num_skipped  # type: ignore[union-attr]
        return {
            **summary,
            "per_class_iou": per_class,
            "confusion": confusion.tolist(),
            "skipped_examples": skipped,
        }

    def describe_result(self, summary: Mapping[str, Any]) -> str:
        """Returns the mean IoU and the pixel accuracy as text."""
        return (
            f"Validation mean IoU {summary['val_mean_iou']:.4f}, pixel accuracy "
            f"{summary['val_pixel_accuracy']:.4f}"
        )

    def write_pictures(
        self, run: "RunDirectory", trainer: "Trainer", data: Data, summary: Mapping[str, Any]
    ) -> None:
        """Writes samples of the validation data with their predictions."""
        for name, picture in self.draw(trainer, data).items():
            if trainer.is_chief:
                run.write_png(f"samples/{name}.png", picture)

    def make_report(self, run: "RecordedRun") -> "Sequence[Section]":
        """Returns samples, the IoU of every class and the confusion matrix."""
        from tfdist.tasks.segmentation.report import make_sections

        return make_sections(run)

    def draw(self, trainer: "Trainer", data: Data) -> "Mapping[str, np.ndarray]":
        """Returns the samples with their predictions."""
        from tfdist.tasks.segmentation.report import draw_samples

        val: Any = data.val
        return {"predictions": draw_samples(trainer, val, class_names=data.info["class_names"])}

    def to_portable(self, model: "keras.Model") -> "keras.Model":
        from tfdist.models.portable import to_keras_layers

        return to_keras_layers(model)

    def _make_model(self, num_classes: int, channels: int, seed: int) -> "keras.Model":
        from tfdist import models

        try:
            return models.make_model(
                self.model,
                image_size=self.image_size,
                num_classes=num_classes,
                channels=channels,
                base_filters=self.base_filters,
                depth=self.depth,
                norm=self.norm,
                dropout=self.dropout,
                pretrained=self.pretrained,
                seed=seed,
            )
        except ValueError as error:
            raise TfdistError(str(error)) from error

    def _describe_source(self, seed: int) -> dict[str, Any]:
        return {
            "image_size": self.image_size,
            "data_dir": self.data_dir,
            "num_classes": self.num_classes,
            "ignore_label": self.ignore_label,
            "label_map": parse_label_map(self.label_map),
            "class_names": self.class_names or None,
            "val_fraction": self.val_fraction,
            "seed": seed,
            "value_range": self.value_range,
            "tile": self.tile,
            "on_bad_example": self.on_bad_example,
        }


def parse_label_map(pairs: Sequence[str]) -> dict[int | str, int]:
    """Parses the entries of `--label_map` into value or color -> class.

    >>> parse_label_map(["255:1", "128:2"])
    {255: 1, 128: 2}
    >>> parse_label_map(["#FF0000:1"])
    {'#ff0000': 1}

    Raises:
      TfdistError: an entry is not FROM:TO, FROM is above 65535 or TO above 255, FROM is given
        twice, or values and colors are mixed.
    """
    label_map: dict[int | str, int] = {}
    for pair in pairs:
        match = re.fullmatch(r"(\d{1,5}|#[0-9a-fA-F]{6}):(\d{1,3})", pair.strip())
        is_value = match is not None and match[1].isdigit()
        if match is None or int(match[2]) > 255 or (is_value and int(match[1]) > 65535):
            raise TfdistError(
                f"--label_map={pair} is not FROM:TO, a value from 0 to 65535 or a color, and then "
                "its class. Write --label_map=255:1, or --label_map=#000000:0,#ff0000:1."
            )
        found: int | str = match[1].lower() if match[1].startswith("#") else int(match[1])
        if found in label_map:
            raise TfdistError(f"--label_map names {found} twice. Give it one class.")
        label_map[found] = int(match[2])
    if len({type(found) for found in label_map}) > 1:
        raise TfdistError(
            f"--label_map={','.join(pairs)} mixes values and colors. Give only values, or only "
            "colors."
        )
    return label_map
