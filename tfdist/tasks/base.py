"""What a task is: its options, its data and its model, and what a run shows of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Self

from tfdist.options import OptionGroup

if TYPE_CHECKING:
    import keras

    from tfdist.data.pipeline import BatchAugmentation
    from tfdist.data.source import Source
    from tfdist.training.run_directory import RunDirectory
    from tfdist.training.trainer import Trainer


@dataclass(frozen=True)
class Data:
    """The data of a run.

    Attributes:
      train, val: sources of examples `(x, y)` or `(x, y, sample_weight)`, or arrays of them.
      info: what the model must know of the data, ready for JSON, such as the number of classes.
    """

    train: "Source | tuple[Any, ...]"
    val: "Source | tuple[Any, ...]"
    info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class DataPlan:
    """What is known of the data before they are read.

    Attributes:
      text: a line for a dry run.
      info: as of `Data`.
      num_examples: of training; None if only reading tells.
      element_spec: structure of `tf.TensorSpec`, of one example; None if only reading tells.
    """

    text: str
    info: Mapping[str, Any]
    num_examples: int | None
    element_spec: Any = None


@dataclass(frozen=True, kw_only=True)
class Task(OptionGroup):
    """What is trained. The fields of a subclass, made with `tfdist.option`, are its flags.

    A subclass is a frozen dataclass that says how data and model are made from its fields.

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
      name: as `--task` takes it; the class's own name by default.
      monitor: the log by which the best epoch is known.
      presets: name -> flags that stand for it.
      pictures: names of what `write_pictures` writes.
      commands: what `tfdist.evaluate`, `predict` and `export` do for its runs, each a
        `tfdist.tasks.commands.Command` named as `package.module:NAME`.
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
          seed: of the run.
          quiet: whether nothing is to be printed.

        Raises:
          TfdistError: they are not there, or do not fit the options.
        """
        raise NotImplementedError

    def build_model(self, info: Mapping[str, Any], *, seed: int) -> "keras.Model":
        """Returns the model, not compiled.

        Args:
          info: of the data.
          seed: of the initial weights.
        """
        raise NotImplementedError

    def compile_model(
        self, model: "keras.Model", optimizer: "keras.optimizers.Optimizer", info: Mapping[str, Any]
    ) -> None:
        """Compiles the model with the run's optimizer, and the task's loss and metrics."""
        raise NotImplementedError

    @property
    def is_higher_better(self) -> bool:
        """Whether the largest value of `monitor` is the best; for losses and errors it is not."""
        return not any(word in self.monitor for word in ("loss", "error"))

    def check(self) -> None:
        """Refuses what the options' own limits let through.

        Raises:
          TfdistError: a value that cannot be understood.
        """

    def make_augmentation(self, info: Mapping[str, Any]) -> "BatchAugmentation | None":
        """Returns the seeded transformation of the training examples, if there is one.

        Args:
          info: of the data.
        """
        return None

    def describe_data(self, *, seed: int) -> DataPlan:
        """Returns what is known of the data; they may be read, but nothing is written."""
        from tfdist.tasks.sources import to_sources

        data = to_sources(self.make_data(seed=seed, quiet=True))
        number = data.train.num_examples
        text = f"{number} training and {data.val.num_examples} validation examples"
        return DataPlan(text, data.info, number, data.train.element_spec)

    def describe_model(self) -> str:
        """Returns a word for the model."""
        return self.name or type(self).__name__

    def without_downloads(self) -> Self:
        """Returns the task of a model of the same shapes, for which nothing is downloaded."""
        return self

    def evaluate(self, trainer: "Trainer", data: Data, *, global_batch_size: int) -> dict[str, Any]:
        """Returns what `summary.json` says of the best model; all workers call it."""
        arrays = data.val if isinstance(data.val, tuple) else (data.val,)
        logs = trainer.evaluate(
            *arrays, global_batch_size=global_batch_size, verbose=0, return_dict=True
        )
        return {f"val_{name}": value for name, value in logs.items()}

    def describe_result(self, summary: Mapping[str, Any]) -> str:
        """Returns the start of the line that ends a run."""
        return f"{self.monitor} {summary[self.monitor]:.4f}"

    def write_pictures(
        self, run: "RunDirectory", trainer: "Trainer", data: Data, history: Mapping[str, Any]
    ) -> None:
        """Writes the pictures of a finished run; all workers call it, and the chief writes."""

    def to_portable(self, model: "keras.Model") -> "keras.Model":
        """Returns the model that is saved, of Keras's own layers where there are some."""
        return model
