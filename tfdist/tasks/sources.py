"""Converts a task's data to sources, whose batches are a pure function of seed and step."""

import dataclasses
from typing import Any

from tfdist.data.source import ArraySource, Source
from tfdist.errors import TfdistError
from tfdist.tasks.base import Data


@dataclasses.dataclass(frozen=True)
class SourceData(Data):
    """Data whose two parts are both sources."""

    train: Source
    val: Source


def to_sources(data: Any) -> SourceData:
    """Returns a task's data with arrays converted to sources.

    Raises:
      TfdistError: the task's data is neither sources nor tuples of arrays.
    """
    if not isinstance(data, Data):
        raise TfdistError(f"make_data returned {type(data).__name__}, not tfdist.Data.")
    return SourceData(_to_source(data.train), _to_source(data.val), data.info)


def _to_source(part: Any) -> Source:
    if isinstance(part, Source):
        return part
    if isinstance(part, tuple):
        return ArraySource.from_arrays(part)
    raise TfdistError(
        f"make_data returned a {type(part).__name__} in tfdist.Data. Give a tfdist.data.Source, or "
        "a tuple of arrays such as (x, y)."
    )
