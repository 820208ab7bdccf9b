"""Trials: training steps in a separate process, which is stopped before the memory is full."""

import json
import pickle
import signal
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist import cluster, memory
from tfdist.data.source import ArraySource, BatchSource, Source
from tfdist.errors import TfdistError
from tfdist.launch.call import make_command, run_watched
from tfdist.launch.machine import find_sources
from tfdist.memory import FreeMemory
from tfdist.runs.batch_size.search import Usage
from tfdist.runs.options import TrainOptions
from tfdist.tasks.data import SourceData

SHARE = 0.9  # of the free memory; the rest is for checkpoints, validation and other programs

_WATCH_EVERY_S = 0.01
_COUNT = 8


@dataclass(frozen=True)
class Trial:
    """The result of a trial.

    Attributes:
      free: the free memory, of which it may use `SHARE`.
      found: what its process measured; empty if it did not fit.
    """

    usage: Usage | None
    free: FreeMemory
    problem: str = ""
    found: Mapping[str, Any] = field(default_factory=dict)


def run_trial(
    options: TrainOptions,
    global_batch_size: int,
    *,
    data: SourceData,
    free: FreeMemory,
    measure: str = "tfdist.runs.batch_size.measuring:measure",
    arguments: Mapping[str, Any] | None = None,
) -> Trial:
    """Trains some steps in a separate process, within the free memory.

    Args:
      data: the data of the run; the trial trains on its first examples.
      free: the free memory; the process is stopped when its resident memory exceeds `SHARE` of it.
      measure: the function that the process calls; see the default.
      arguments: further arguments of that function, ready for JSON.
    """
    from tfdist.runs.batch_size.trials import save_examples

    limit = int(SHARE * free.bytes)
    task = {
        "measure": measure,
        "arguments": dict(arguments or {}),
        "options": options.to_dict(),
        "size": global_batch_size,
        "info": dict(data.info),
    }
    with tempfile.TemporaryDirectory(prefix="tfdist-trial-") as name:
        directory = Path(name)
        examples = directory / "examples.pickle"
        (directory / "task.json").write_text(json.dumps({**task, "examples": str(examples)}))
        save_examples(examples, data.train)
        status, said = run_watched(
            [*make_command("tfdist.runs.batch_size.measuring:measure_trial"), name],
            directory,
            environ=find_sources(cluster.read_environment()),
            watch=lambda pid: memory.read_resident_memory(pid) <= limit,
            every_s=_WATCH_EVERY_S,
        )
        if status is None:
            return Trial(None, free, f"the trial was stopped at {format_bytes(limit)}")
        if status < 0:
            return Trial(None, free, f"the trial was ended by {signal.Signals(-status).name}")
        if status:
            return Trial(None, free, f"the trial failed: {said}")
        found = json.loads((directory / "result.json").read_text())
    if "refusal" in found:
        raise TfdistError(found["refusal"])
    if "problem" in found:
        return Trial(None, free, found["problem"])
    if found["gpu_limit"] is not None:
        free = FreeMemory(found["gpu_limit"], "on the smallest GPU")
        limit = int(SHARE * free.bytes)
    usage = Usage(peak=found["peak"], limit=limit)
    if usage.peak > limit:
        return Trial(None, free, f"it used {format_bytes(usage.peak)} of {format_bytes(limit)}")
    return Trial(usage, free, found=found)


def format_bytes(count: int) -> str:
    """Returns a readable number of bytes.

    >>> format_bytes(300 * 2**20), format_bytes(20 * 2**30)
    ('300 MiB', '20.0 GiB')
    """
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


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
