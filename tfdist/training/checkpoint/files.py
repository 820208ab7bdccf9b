"""Checkpoints: one directory per step, which is complete once its `state.json` exists."""

import contextlib
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from tfdist.errors import TfdistError, shorten_error
from tfdist.reading import parse_object
from tfdist.records.durable_files import make_directories, read_file, sync_to_disk, write_atomically
from tfdist.records.pattern_paths import name_literally
from tfdist.training.checkpoint.structure import Structure

_NAME = re.compile(r"step-(\d+)(?:\.(\d+))?")
_CHUNK_BYTES = 1 << 24
# The errors that reading a damaged checkpoint may raise.
_DAMAGES = (tf.errors.OpError, OSError, ValueError, KeyError, TypeError)
FORMAT = 2
"""The format that is written. 1: a record has no number, and arrays are named variable/00012.
2: it has one, and the arrays of variables are named after their paths."""


@dataclass(frozen=True)
class Checkpoint:
    """The contents of a checkpoint.

    Attributes:
      best_step: the step of the checkpoint to keep as the best so far, if any.
      structure: describes the variables whose values the arrays are, if there are any.
      begun_from: a hash of the state that training began from; None if it does not matter.
    """

    step: int
    arrays: Mapping[str, np.ndarray | tf.Tensor]
    state: Mapping[str, Any]
    best_step: int | None = None
    structure: Structure | None = None
    begun_from: str | None = None


@dataclass(frozen=True, order=True)
class _Entry:
    """A checkpoint's directory. Of two with the same step, the later attempt is newer."""

    step: int
    attempt: int
    path: str
    is_complete: bool


class CheckpointStore:
    """The checkpoints under one directory.

    The arrays are written first, in TensorFlow's format (`tf.train.load_checkpoint` reads it).
    Then `state.json` is written beside them under a temporary name and renamed, so that an
    unfinished checkpoint never looks complete. It holds a SHA-256 of every file and of itself. On
    a local file system, everything is on disk before the rename. This works on every file system
    of `tf.io.gfile`, including those that cannot rename a directory.

    A checkpoint is deleted only after the one that replaces it is complete. A second checkpoint
    of the same step therefore gets its own directory, such as `step-000000090.1`.

    Args:
      keep: how many of the newest checkpoints to keep; the best one is kept as well.
    """

    def __init__(self, directory: str, *, keep: int = 3):
        self.directory = directory
        self._keep = keep
        # Paths of checkpoints newer than the one `read_newest` returned: training went back.
        self._stale: frozenset[str] = frozenset()

    def write(self, checkpoint: Checkpoint) -> str:
        """Writes a checkpoint, removes those no longer kept, and returns its path."""
        path = None
        try:
            path = self._make_directory(checkpoint.step)
            self._write_files(path, checkpoint)
        except (OSError, tf.errors.OpError) as error:
            if path:
                self._delete_quietly(path)
            raise OSError(
                f"Cannot write the checkpoint {path or self._path(checkpoint.step)}: "
                f"{shorten_error(error)}. "
                "Free some space or check the permissions, then run the same command again."
            ) from error
        self._delete_superseded(checkpoint)
        return path

    def read(self, step: int) -> Checkpoint:
        """Reads one checkpoint, and raises an error if any byte of it is damaged."""
        entries = [entry for entry in self._list_complete() if entry.step == step]
        for entry in reversed(entries[1:]):
            with contextlib.suppress(*_DAMAGES):
                return _read(entry.path)
        return _read(entries[0].path if entries else self._path(step))

    def read_newest(self, begun_from: str | None = None) -> Checkpoint | None:
        """Reads the newest intact checkpoint with finite weights, if there is one.

        Skips the others with a warning; they are removed when the next checkpoint is complete.

        Args:
          begun_from: the hash of the state that training begins from now; those of a training that
            began from another one are skipped. None to use all.

        Raises:
          TfdistError: there are checkpoints, but none is intact and has finite weights, or one has
            a format that cannot be read.
        """
        entries = self._list_complete()
        passed_over: list[str] = []
        is_other = False
        for entry in reversed(entries):
            try:
                found = _read(entry.path)
                is_other = None not in (begun_from, found.begun_from) and (
                    begun_from != found.begun_from
                )
                if is_other:
                    break  # and so are the older ones
                problem = _describe_nonfinite(found)
            except TfdistError:
                raise
            except _DAMAGES as error:
                problem = f"is damaged ({shorten_error(error)})"
            if not problem:
                self._stale = frozenset(passed_over)
                return found
            logging.warning(
                "The checkpoint of step %d %s: using the one before it.", entry.step, problem
            )
            passed_over.append(entry.path)
        if is_other:
            logging.warning(
                "The checkpoints in %s belong to a training that began from another state of the "
                "model: this one begins anew, and replaces them.",
                self.directory,
            )
            self._stale = frozenset(entry.path for entry in entries)
            return None
        if entries:
            raise TfdistError(
                f"None of the {len(entries)} checkpoints in {self.directory} is intact and has "
                "finite weights. "
                "Remove them to start over, or give another `run_dir` or checkpoint_dir."
            )
        return None

    def list_steps(self) -> list[int]:
        """Returns the steps of the complete checkpoints, oldest first.

        Leaves out those that `read_newest` has skipped.
        """
        entries = self._list_complete()
        return sorted({entry.step for entry in entries if entry.path not in self._stale})

    def _path(self, step: int, *, attempt: int = 0) -> str:
        return f"{self.directory}/step-{step:09d}{f'.{attempt}' if attempt else ''}"

    def _list_entries(self) -> list[_Entry]:
        """Returns all directories of checkpoints, oldest first."""
        if not tf.io.gfile.exists(self.directory):
            return []
        names = [name.rstrip("/") for name in tf.io.gfile.listdir(self.directory)]
        entries = []
        for match in filter(None, map(_NAME.fullmatch, names)):
            path = f"{self.directory}/{match[0]}"
            is_complete = tf.io.gfile.exists(f"{path}/state.json")
            entries.append(_Entry(int(match[1]), int(match[2] or 0), path, is_complete))
        return sorted(entries)

    def _list_complete(self) -> list[_Entry]:
        return [entry for entry in self._list_entries() if entry.is_complete]

    def _delete_superseded(self, written: Checkpoint) -> None:
        """Deletes the checkpoints that need not be kept now that a new one is complete."""
        entries = self._list_complete()
        newest = {entry.step: entry.path for entry in entries if entry.path not in self._stale}
        kept = {newest[step] for step in sorted(newest)[-self._keep :]}
        if written.best_step is not None:
            kept.add(newest.get(written.best_step, ""))
        for entry in entries:
            if entry.path not in kept:
                self._delete_quietly(entry.path)
        self._stale = frozenset()

    def _make_directory(self, step: int) -> str:
        """Creates a directory for a checkpoint, and deletes all incomplete checkpoints."""
        for entry in self._list_entries():
            if not entry.is_complete:
                self._delete_quietly(entry.path)
        attempts = [entry.attempt for entry in self._list_entries() if entry.step == step]
        path = self._path(step, attempt=max(attempts, default=-1) + 1)
        make_directories(path)
        return path

    def _write_files(self, path: str, checkpoint: Checkpoint) -> None:
        names = list(checkpoint.arrays)
        with tf.device("CPU:0"):
            tf.raw_ops.SaveV2(
                prefix=f"{path}/variables",
                tensor_names=names,
                shape_and_slices=[""] * len(names),
                tensors=[tf.convert_to_tensor(array) for array in checkpoint.arrays.values()],
            )
        names = sorted(tf.io.gfile.listdir(path))
        record = {
            "format": FORMAT,
            "step": checkpoint.step,
            "files": {name: _hash_file(f"{path}/{name}") for name in names},
            "arrays": {n: array.dtype.name for n, array in checkpoint.arrays.items()},
            "state": dict(checkpoint.state),
            "best_step": checkpoint.best_step,
            "structure": checkpoint.structure and checkpoint.structure.to_json(),
            "begun_from": checkpoint.begun_from,
        }
        for name in names:
            sync_to_disk(f"{path}/{name}")
        sync_to_disk(path)
        text = json.dumps(record)
        write_atomically(
            f"{path}/state.json", json.dumps({"sha256": _hash_text(text), "record": record})
        )

    def _delete_quietly(self, path: str) -> None:
        try:
            # `state.json` first, so that a kill in between leaves an incomplete checkpoint.
            if tf.io.gfile.exists(f"{path}/state.json"):
                tf.io.gfile.remove(f"{path}/state.json")
            tf.io.gfile.rmtree(path)
        except (OSError, tf.errors.OpError) as error:
            logging.debug("Could not remove the checkpoint %s: %s.", path, shorten_error(error))


class BackgroundWriter:
    """Writes checkpoints in the background, one after another, while training continues."""

    def __init__(self, store: CheckpointStore):
        self._store = store
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._writing: Future[str] | None = None

    def write(self, checkpoint: Checkpoint) -> None:
        """Waits for the previous checkpoint, and starts writing the next one."""
        self.wait()
        self._writing = self._executor.submit(self._store.write, checkpoint)

    def wait(self) -> None:
        """Waits until the last checkpoint is written."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()


def find_nonfinite(values: Mapping[str, Any] | Sequence[keras.Variable]) -> str | None:
    """Returns the name of the first value that holds NaN or infinity, if there is one.

    Meant for trainable weights: other state may legitimately hold infinity, such as the initial
    value of the best loss so far.

    Args:
      values: arrays by name, or variables, whose names are their paths.
    """
    named = values.items() if isinstance(values, Mapping) else [(v.path, v) for v in values]
    for name, value in named:
        array = np.asarray(tf.convert_to_tensor(value))  # of the host's memory: not a copy
        # NumPy does not count bfloat16 among its floats.
        if not tf.as_dtype(array.dtype).is_integer and not np.isfinite(array).all():
            return name
    return None


def _describe_nonfinite(checkpoint: Checkpoint) -> str | None:
    """Describes the first weight of a checkpoint that is not finite; returns None if all are."""
    if checkpoint.structure is None:
        return None
    records = checkpoint.structure.variables
    weights = {n: checkpoint.arrays[n] for n, record in records.items() if record.trainable}
    name = find_nonfinite(weights)
    return f"holds NaN or infinity in {records[name].path}" if name else None


def _read(path: str) -> Checkpoint:
    """Reads the checkpoint in a directory and verifies every byte of it."""
    found = parse_object(read_file(f"{path}/state.json"))
    if found is None:
        raise ValueError("state.json is cut short or was changed")
    record = found["record"]
    if found["sha256"] != _hash_text(json.dumps(record)):
        raise ValueError("state.json has changed since it was written")
    for name, sha256 in record["files"].items():
        if _hash_file(f"{path}/{name}") != sha256:
            raise ValueError(f"{name} has changed since it was written")
    record = upgrade(record, path)
    structure = record["structure"]
    names = list(record["arrays"])
    with name_literally(path) as literal:
        tensors = tf.raw_ops.RestoreV2(
            prefix=f"{literal}/variables",
            tensor_names=names,
            shape_and_slices=[""] * len(names),
            dtypes=[tf.as_dtype(dtype) for dtype in record["arrays"].values()],
        )
    return Checkpoint(
        step=record["step"],
        arrays={name: t.numpy() for name, t in zip(names, tensors, strict=True)},
        state=record["state"],
        best_step=record["best_step"],
        structure=Structure.from_json(structure) if structure else None,
        begun_from=record["begun_from"],
    )


def _hash_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _hash_file(path: str) -> str:
    digest = hashlib.sha256()
    with tf.io.gfile.GFile(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def upgrade(record: dict[str, Any], path: str) -> dict[str, Any]:
    """Returns the record of a checkpoint in today's format.

    Raises:
      TfdistError: a later tfdist wrote it, or the first one, which described no variables.
    """
    number = record.get("format", 1)
    if number > FORMAT:
        raise TfdistError(
            f"Cannot read the checkpoint {path}: it has format {number}, and this tfdist knows "
            f"formats up to {FORMAT}. Use the tfdist that wrote it, or another `run_dir` or "
            "checkpoint_dir."
        )
    return _upgrade_first(record, path) if number == 1 else record


def _upgrade_first(record: dict[str, Any], path: str) -> dict[str, Any]:
    if "structure" not in record:
        raise TfdistError(
            f"Cannot continue from the checkpoint {path}: it does not describe its variables. Give "
            "another `run_dir` or checkpoint_dir."
        )
    state = record["state"]
    # Metrics were once the sums over all replicas.
    defaults = {
        "metric_states": [[value] for value in state.get("metrics", [])],
        "steps_per_epoch": 0,
        "reading": None,
        "data": {},
    }
    return {"begun_from": None, **record, "state": {**defaults, **state}}
