"""The base class of tasks, which defines a task's options, data, model and reports."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from tfdist.options import OptionGroup
from tfdist.tasks.data import Data, DataPlan, to_sources

if TYPE_CHECKING:
    import keras
    import numpy as np

    from tfdist.data.pipeline import BatchAugmentation
    from tfdist.records.recorded_run import RecordedRun
    from tfdist.records.run_directory import RunDirectory
    from tfdist.report import Section
    from tfdist.training.fit.trainer import Trainer


@dataclass(frozen=True, kw_only=True)
class Task(OptionGroup):
    """The base class of tasks. The fields of a subclass, made with `tfdist.option`, are its flags.

    A subclass is a frozen dataclass whose methods make the data and the model from its fields.

    Example:

        @dataclass(frozen=True, kw_only=True)
        class Digits(tfdist.Task):
            \"\"\"Handwritten digits.\"\"\"

            monitor = "val_accuracy"
            units: int = tfdist.option(64, "units of the hidden layer", minimum=1)

            def make_data(self, *, seed, quiet):
                (x, y), (x_val, y_val) = keras.datasets.mnist.load_data()
                return tfdist.Data((x / 255.0, y), (x_val / 255.0, y_val))

            def build_model(self, info, *, seed):
                return keras.Sequential([keras.layers.Flatten(), ...])

            def compile_model(self, model, optimizer, info):
                model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])

    `python -m tfdist.train --task=digits.py:Digits --units=128` trains it.

    Attributes:
      name: what `--task` calls one of tfdist's own tasks; if empty, messages use the class's name.
      monitor: the logged value that decides which epoch is the best.
      presets: name -> the flags that it stands for.
      pictures: the names of the files that `write_pictures` writes.
      commands: what `tfdist.evaluate`, `predict` and `export` do for the task's runs:
        command -> `package.module:NAME` of a `tfdist.tasks.commands.Command`.
    """

    name: ClassVar[str] = ""
    monitor: ClassVar[str] = "val_loss"
    presets: ClassVar[Mapping[str, Sequence[str]]] = {}
    pictures: ClassVar[tuple[str, ...]] = ()
    commands: ClassVar[Mapping[str, str]] = {
        "evaluate": "tfdist.tasks.commands:EVALUATE",
        "predict": "tfdist.tasks.commands:PREDICT",
        "export": "tfdist.tasks.commands:EXPORT",
    }

    def make_data(self, *, seed: int, quiet: bool) -> Data:
        """Returns the data of a run.

        Args:
          seed: the seed of the run.

        Raises:
          TfdistError: the data is missing, or does not fit the options.
        """
        raise NotImplementedError

    def build_model(self, info: Mapping[str, Any], *, seed: int) -> "keras.Model":
        """Returns the model, uncompiled; `info` is that of the data."""
        raise NotImplementedError

    def compile_model(
        self, model: "keras.Model", optimizer: "keras.optimizers.Optimizer", info: Mapping[str, Any]
    ) -> None:
        """Compiles the model with the run's optimizer, and the task's loss and metrics."""
        raise NotImplementedError

    @property
    def is_higher_better(self) -> bool:
        """Whether a higher value of `monitor` is better; False for losses and errors."""
        return not any(word in self.monitor for word in ("loss", "error"))

    def check(self) -> None:
        """Checks what the limits of the single options cannot express.

        Raises:
          TfdistError: a value is invalid.
        """

    def make_augmentation(self, info: Mapping[str, Any]) -> "BatchAugmentation | None":
        """Returns the seeded augmentation of training examples; `info` is that of the data."""
        return None

    def describe_data(self, *, seed: int) -> DataPlan:
        """Returns what is known about the data; may read the data, but writes nothing."""
        data = to_sources(self.make_data(seed=seed, quiet=True))
        number = data.train.num_examples
        text = f"{number} training and {data.val.num_examples} validation examples"
        return DataPlan(text, data.info, number, data.train.element_spec)

    def describe_model(self) -> str:
        """Returns a short name for the model."""
        return self.name or type(self).__name__

    def without_downloads(self) -> Self:
        """Returns the task with a model of the same shapes that downloads nothing."""
        return self

    def evaluate(self, trainer: "Trainer", data: Data, *, global_batch_size: int) -> dict[str, Any]:
        """Returns what `summary.json` says about the best model; all workers call this."""
        arrays = data.val if isinstance(data.val, tuple) else (data.val,)
        logs = trainer.evaluate(
            *arrays, global_batch_size=global_batch_size, verbose=0, return_dict=True
        )
        return {f"val_{name}": value for name, value in logs.items()}

    def describe_result(self, summary: Mapping[str, Any]) -> str:
        """Returns the beginning of the line that a run prints at its end."""
        return f"{self.monitor} {summary[self.monitor]:.4f}"

    def write_pictures(
        self, run: "RunDirectory", trainer: "Trainer", data: Data, summary: Mapping[str, Any]
    ) -> None:
        """Writes the pictures of a finished run; all workers call this, only the chief writes.

        Args:
          summary: the result of `evaluate`.
        """

    def make_report(self, run: "RecordedRun") -> "Sequence[Section]":
        """Returns the task's sections of `report.html`; by default its pictures.

        It is called after each epoch, and sees what the run has recorded, not the model.
        """
        from tfdist.report import Section, make_pictures

        pictures = ((run.read(name), name) for name in self.pictures)
        return [Section("Pictures", make_pictures(pictures))]

    def draw(self, trainer: "Trainer", data: Data) -> "Mapping[str, np.ndarray]":
        """Returns pictures of predictions, such as `predictions` for `samples/predictions.png`.

        It is called after epochs (`--sample_every`) by all workers.

        Returns:
          Name -> uint8 [height, width, 1 or 3].
        """
        return {}

    def to_portable(self, model: "keras.Model") -> "keras.Model":
        """Returns the model to save, with Keras's own layers where they can replace others."""
        return model
