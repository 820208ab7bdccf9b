"""A task's data: arrays or sources, whose batches are a pure function of seed and step."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tfdist.errors import TfdistError, make_unknown_name_error

if TYPE_CHECKING:
    from tfdist.data.source import Source

_DATASETS = ("shapes", "folder", "tfds:NAME")


def find_dataset(dataset: str, *, data_dir: str | None, holds: str) -> tuple[str, str]:
    """Returns the checked kind of a data set of images, and its name in TensorFlow Datasets."""
    kind, _, name = dataset.partition(":")
    if dataset not in _DATASETS[:2] and not (kind == "tfds" and name):
        raise make_unknown_name_error("`dataset`", dataset, _DATASETS)
    if kind == "folder" and not data_dir:
        raise TfdistError(
            "Cannot read `dataset=folder` without `data_dir`. Give the directory that holds "
            f"{holds}."
        )
    return kind, name


@dataclass(frozen=True)
class Data:
    """The training and validation data of a run.

    Attributes:
      train, val: sources of examples `(x, y)` or `(x, y, sample_weight)`, or tuples of arrays.
      info: what the model must know about the data, such as the class names; ready for JSON.
    """

    train: "Source | tuple[Any, ...]"
    val: "Source | tuple[Any, ...]"
    info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class DataPlan:
    """What is known about the data before it is read.

    Attributes:
      text: the line that a dry run prints.
      num_examples: the number of training examples; None if unknown before the data is read.
      element_spec: the structure of `tf.TensorSpec` of one example; None if unknown.
    """

    text: str
    info: Mapping[str, Any]
    num_examples: int | None
    element_spec: Any = None


@dataclass(frozen=True)
class SourceData(Data):
    """Data whose two parts are both sources."""

    train: "Source"
    val: "Source"


def to_sources(data: Any) -> SourceData:
    """Returns a task's data with arrays converted to sources; refuses what is neither."""
    if not isinstance(data, Data):
        raise TfdistError(f"make_data returned {type(data).__name__}, not tfdist.Data.")
    return SourceData(_to_source(data.train), _to_source(data.val), data.info)


def _to_source(part: Any) -> "Source":
    from tfdist.data.source import ArraySource, Source

    if isinstance(part, Source):
        return part
    if isinstance(part, tuple):
        return ArraySource.from_arrays(part)
    raise TfdistError(
        f"make_data returned a {type(part).__name__} in tfdist.Data. Give a tfdist.data.Source, or "
        "a tuple of arrays such as (x, y)."
    )
