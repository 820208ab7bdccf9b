"""The few examples, kept in a file, on which trials train repeatedly."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.data.source import ArraySource, BatchSource, Source

_COUNT = 8


class RepeatedSource(BatchSource):
    """A source that repeats a few examples, a structure of arrays [examples, ...]."""

    def __init__(self, examples: Any, *, num_examples: int):
        super().__init__(num_examples=num_examples)
        object.__setattr__(self, "_few", ArraySource.from_arrays(examples))

    @property
    def element_spec(self) -> Any:
        """A structure of `tf.TensorSpec` for one example."""
        return self._few.element_spec  # type: ignore[attr-defined]

    def load_batch(self, indices: tf.Tensor) -> Any:
        """Returns the examples at `indices` (int64 [batch]), stacked."""
        few: ArraySource = self._few  # type: ignore[attr-defined]
        return few.load_batch(indices % few.num_examples)


def save_examples(path: Path, source: Source) -> None:
    """Writes the first examples of a source."""
    count = min(_COUNT, source.num_examples)
    batch = source.load_batch(tf.range(count, dtype=tf.int64))
    with path.open("wb") as file:
        pickle.dump(tf.nest.map_structure(np.asarray, batch), file)


def load_examples(path: Path) -> Any:
    """Returns what `save_examples` wrote: a structure of arrays."""
    with path.open("rb") as file:
        return pickle.load(file)
