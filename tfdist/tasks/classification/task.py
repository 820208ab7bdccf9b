"""The classification task, which assigns a class to every image."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from tfdist.errors import TfdistError
from tfdist.imports import import_named
from tfdist.options import inherit, option
from tfdist.tasks.base import Task
from tfdist.tasks.data import Data, DataPlan, find_dataset
from tfdist.tasks.segmentation.task import Segmentation

if TYPE_CHECKING:
    import keras

    from tfdist.records.recorded_run import RecordedRun
    from tfdist.records.run_directory import RunDirectory
    from tfdist.report import Section
    from tfdist.tasks.classification.sources import Mirror
    from tfdist.training.fit.trainer import Trainer

_TOP = 5


@dataclass(frozen=True, kw_only=True)
class Classification(Task):
    """Image classification."""

    name: ClassVar[str] = "classification"
    monitor: ClassVar[str] = "val_accuracy"

    dataset: str = option("shapes", "shapes (drawn), folder, or tfds:NAME", metavar="NAME")
    data_dir: str | None = option(
        None,
        "folder: directory of SPLIT/CLASS/*.jpg; tfds: of the data sets",
        metavar="DIR",
        must_exist="It must hold SPLIT/CLASS/*.jpg.",
        must_exist_if=("dataset", "folder"),
    )
    class_names: tuple[str, ...] = option(
        (), "folder: directories of the classes, in order; sorted by default", metavar="cat,dog"
    )
    image_size: tuple[int, int] = option(
        (96, 96), "height and width in pixels; images are resized bilinearly", metavar="H,W"
    )
    train_examples: int | None = inherit(Segmentation, "train_examples", minimum=1)
    val_examples: int | None = inherit(Segmentation, "val_examples", minimum=1)
    val_fraction: float = inherit(Segmentation, "val_fraction")
    flip: bool = inherit(Segmentation, "flip")
    model: str = option(
        "small_cnn",
        "small_cnn, a network of keras.applications such as MobileNetV2, or "
        "package.module:function, which is called with image_size and num_classes",
        metavar="NAME|package.module:function",
    )
    pretrained: bool = option(False, "start from ImageNet weights (keras.applications only)")
    cache: str = inherit(Segmentation, "cache")

    def check(self) -> None:
        self._find_dataset()

    def make_data(self, *, seed: int, quiet: bool) -> Data:
        """Returns the sources, cached as the options say."""
        from tfdist.data.cache import cache_source

        train, val = (
            cache_source(source, self.cache, quiet=quiet) for source in self._make_sources(seed)
        )
        return Data(train, val, dict(train.info))

    def describe_data(self, *, seed: int) -> DataPlan:
        """Returns what is known about the data without reading the images."""
        from tfdist.tasks.classification.sources import list_unprepared_classes

        kind, _, name = self.dataset.partition(":")
        if kind == "tfds" and (names := list_unprepared_classes(name, self.data_dir)):
            text = f"{self.dataset}, {len(names)} classes: not here yet, training will download it"
            return DataPlan(text, {"class_names": names}, None)
        train, val = self._make_sources(seed)
        names = train.info["class_names"]
        text = (
            f"{self.dataset}, {train.num_examples} training and {val.num_examples} validation "
            f"examples of {self.image_size[0]}x{self.image_size[1]}, {len(names)} classes"
        )
        return DataPlan(text, dict(train.info), train.num_examples, train.element_spec)

    def build_model(self, info: Mapping[str, Any], *, seed: int) -> "keras.Model":
        """Returns the network, which maps images in [0, 255] to logits."""
        import keras

        num_classes = len(info["class_names"])
        if ":" in self.model:
            build: Any = import_named("model", self.model)
            return build(image_size=self.image_size, num_classes=num_classes)
        keras.utils.set_random_seed(seed)
        inputs = keras.Input((*self.image_size, 3))
        if self.model == "small_cnn":
            x = keras.layers.Rescaling(1 / 127.5, offset=-1.0)(inputs)
            for filters in (32, 64, 128):
                x = keras.layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
                x = keras.layers.BatchNormalization(momentum=0.9)(x)
                x = keras.layers.MaxPooling2D()(keras.layers.ReLU()(x))
            x = keras.layers.GlobalAveragePooling2D()(x)
        else:
            x = self._make_encoder(inputs)
        outputs = keras.layers.Dense(num_classes, dtype="float32", name="logits")(x)
        return keras.Model(inputs, outputs, name=self.model.lower())

    def compile_model(
        self, model: "keras.Model", optimizer: "keras.optimizers.Optimizer", info: Mapping[str, Any]
    ) -> None:
        """Compiles the model with cross-entropy, accuracy and, above 5 classes, top-5 accuracy."""
        import keras

        metrics: list[Any] = [keras.metrics.SparseCategoricalAccuracy(name="accuracy")]
        if len(info["class_names"]) > _TOP:
            metrics.append(keras.metrics.SparseTopKCategoricalAccuracy(_TOP, name="top_5_accuracy"))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer=optimizer, loss=loss, metrics=metrics, jit_compile=False)

    def make_augmentation(self, info: Mapping[str, Any]) -> "Mirror | None":
        """Returns the mirroring if `flip` is set, else None."""
        from tfdist.tasks.classification.sources import Mirror

        return Mirror() if self.flip else None

    def describe_model(self) -> str:
        return self.model

    def without_downloads(self) -> Self:
        return dataclasses.replace(self, pretrained=False)

    def evaluate(self, trainer: "Trainer", data: Data, *, global_batch_size: int) -> dict[str, Any]:
        """Returns the metrics, the confusion matrix, every class's accuracy and some examples."""
        import numpy as np
        import tensorflow as tf

        from tfdist.tasks.classification.report import choose_examples

        summary = super().evaluate(trainer, data, global_batch_size=global_batch_size)
        source: Any = data.val
        logits = trainer.predict(source, batch_size=global_batch_size, verbose=0)
        batches = tf.data.Dataset.range(source.num_examples).batch(global_batch_size)
        truth = np.concatenate([source.load_batch(indices)[1].numpy() for indices in batches])
        names = data.info["class_names"]
        confusion = np.zeros((len(names), len(names)), np.int64)
        np.add.at(confusion, (truth, np.argmax(logits, -1)), 1)
        counts = confusion.sum(1)
        per_class = {
            name: float(confusion[i, i] / counts[i]) if counts[i] else None
            for i, name in enumerate(names)
        }
        return {
            **summary,
            "per_class_accuracy": per_class,
            "confusion": confusion.tolist(),
            "examples": choose_examples(logits, truth, names),
        }

    def describe_result(self, summary: Mapping[str, Any]) -> str:
        """Returns the validation accuracy as text."""
        return f"Validation accuracy {summary['val_accuracy']:.4f}"

    def write_pictures(
        self, run: "RunDirectory", trainer: "Trainer", data: Data, summary: Mapping[str, Any]
    ) -> None:
        """Writes the validation examples that are predicted best and worst."""
        from tfdist.tasks.classification.report import write_examples

        if trainer.is_chief:
            write_examples(run, data.val, summary["examples"])

    def make_report(self, run: "RecordedRun") -> "Sequence[Section]":
        """Returns the accuracy of every class, the confusion matrix, and examples."""
        from tfdist.tasks.classification.report import make_sections

        return make_sections(run)

    def _find_dataset(self) -> tuple[str, str]:
        return find_dataset(self.dataset, data_dir=self.data_dir, holds="SPLIT/CLASS/*.jpg")

    def _make_sources(self, seed: int) -> list[Any]:
        from tfdist.tasks.classification.sources import (
            make_class_folder,
            make_class_tfds,
            make_drawn,
        )

        counts = {"train": self.train_examples, "val": self.val_examples}
        if self.dataset == "shapes":
            return [make_drawn(s, self.image_size, count, seed) for s, count in counts.items()]
        kind, name = self._find_dataset()
        if kind == "tfds":
            return [
                make_class_tfds(
                    name, split, self.image_size, data_dir=self.data_dir, max_examples=count
                )
                for split, count in counts.items()
            ]
        assert self.data_dir
        names = self.class_names
        train = make_class_folder(
            self.data_dir,
            "train",
            self.image_size,
            class_names=names,
            max_examples=counts["train"],
            val_fraction=self.val_fraction,
        )
        val = make_class_folder(
            self.data_dir,
            "val",
            self.image_size,
            class_names=train.class_names,
            max_examples=counts["val"],
            val_fraction=self.val_fraction,
        )
        return [train, val]

    def _make_encoder(self, inputs: "keras.KerasTensor") -> Any:
        import keras

        build = getattr(keras.applications, self.model, None)
        if build is None or not isinstance(build, type(keras.applications.MobileNetV2)):
            raise TfdistError(
                f"Unknown `model={self.model}`. Valid: small_cnn, package.module:function, and the "
                "networks of keras.applications, such as MobileNetV2."
            )
        module = getattr(keras.applications, build.__module__.rpartition(".")[2])
        weights = "imagenet" if self.pretrained else None
        x = module.preprocess_input(inputs)
        network = build(include_top=False, weights=weights, input_tensor=x, pooling="avg")
        return network.output
