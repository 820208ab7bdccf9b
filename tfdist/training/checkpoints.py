"""Checkpoints: a directory a step, complete once its `state.json` is there."""

import hashlib
import json
import re
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from tfdist.errors import TfdistError, shorten_error
from tfdist.training.durable_files import write_atomically

_NAME = re.compile(r"step-(\d+)")
_CHUNK_BYTES = 1 << 24


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint holds.

    Attributes:
      step: the number of updates.
      arrays: tensors by name.
      state: JSON-serialisable.
      best_step: the step of the checkpoint to keep as the best so far, if any.
    """

    step: int
    arrays: Mapping[str, np.ndarray]
    state: Mapping[str, Any]
    best_step: int | None = None


@dataclass(frozen=True)
class CheckpointStore:
    """The checkpoints under one directory.

    The arrays are written first, in TensorFlow's format (`tf.train.load_checkpoint` reads it),
    then `state.json` beside them under another name, which a rename completes: a checkpoint that
    was cut short is never taken for one. It holds a SHA-256 of every file and of itself. Works on
    every file system of `tf.io.gfile`, those without a rename of directories included.

    Attributes:
      directory: where the checkpoints go.
      keep: how many of the newest stay; the best one stays as well.
    """

    directory: str
    keep: int = 3

    def write(self, checkpoint: Checkpoint) -> str:
        """Writes a checkpoint, removes those no longer kept, and returns its path.

        Raises:
          OSError: it could not be written; the older checkpoints are untouched.
        """
        path = self._path(checkpoint.step)
        try:
            if tf.io.gfile.exists(path):
                self._delete(path)
            tf.io.gfile.makedirs(path)
            self._write_files(path, checkpoint)
        except tf.errors.OpError as error:
            self._delete_quietly(path)
            raise OSError(
                f"Cannot write the checkpoint {path}: {shorten_error(error)}. "
                "Free some space or check the permissions, then run the same command again."
            ) from error
        for old in self.list_steps()[: -self.keep]:
            if old != checkpoint.best_step:
                self._delete(self._path(old))
        return path

    def read(self, step: int) -> Checkpoint:
        """Reads one checkpoint, and checks every byte of it.

        Raises:
          OSError, tf.errors.OpError, ValueError: it is damaged, or not there.
        """
        path = self._path(step)
        with tf.io.gfile.GFile(f"{path}/state.json") as file:
            found = json.loads(file.read())
        record = found["record"]
        if found["sha256"] != _hash_text(json.dumps(record)):
            raise ValueError("state.json is not what was written")
        for name, sha256 in record["files"].items():
            if _hash_file(f"{path}/{name}") != sha256:
                raise ValueError(f"{name} is not what was written")
        names = list(record["arrays"])
        tensors = tf.raw_ops.RestoreV2(
            prefix=f"{path}/variables",
            tensor_names=names,
            shape_and_slices=[""] * len(names),
            dtypes=[tf.as_dtype(dtype) for dtype in record["arrays"].values()],
        )
        return Checkpoint(
            step=record["step"],
            arrays={name: t.numpy() for name, t in zip(names, tensors, strict=True)},
            state=record["state"],
            best_step=record["best_step"],
        )

    def read_newest(self) -> Checkpoint | None:
        """Reads the newest whole checkpoint, if there is one.

        A damaged one is passed over with a warning.

        Raises:
          TfdistError: there are checkpoints, but none is whole.
        """
        steps = self.list_steps()
        for step in reversed(steps):
            try:
                return self.read(step)
            except (tf.errors.OpError, OSError, ValueError, KeyError, TypeError) as error:
                logging.warning(
                    "The checkpoint of step %d is damaged (%s): taking the one before.",
                    step,
                    shorten_error(error),
                )
        if steps:
            raise TfdistError(
                f"None of the {len(steps)} checkpoints in {self.directory} can be read. "
                "Remove them to start again, or take another --run_dir."
            )
        return None

    def list_steps(self) -> list[int]:
        """Returns the steps of the complete checkpoints, oldest first."""
        if not tf.io.gfile.exists(self.directory):
            return []
        matches = (
            _NAME.fullmatch(name.rstrip("/")) for name in tf.io.gfile.listdir(self.directory)
        )
        return sorted(
            int(match[1])
            for match in matches
            if match and tf.io.gfile.exists(f"{self.directory}/{match[0]}/state.json")
        )

    def _path(self, step: int) -> str:
        return f"{self.directory}/step-{step:09d}"

    def _write_files(self, path: str, checkpoint: Checkpoint) -> None:
        names = list(checkpoint.arrays)
        with tf.device("CPU:0"):
            tf.raw_ops.SaveV2(
                prefix=f"{path}/variables",
                tensor_names=names,
                shape_and_slices=[""] * len(names),
                tensors=[tf.constant(array) for array in checkpoint.arrays.values()],
            )
        record = {
            "step": checkpoint.step,
            "files": {n: _hash_file(f"{path}/{n}") for n in sorted(tf.io.gfile.listdir(path))},
            "arrays": {n: array.dtype.name for n, array in checkpoint.arrays.items()},
            "state": dict(checkpoint.state),
            "best_step": checkpoint.best_step,
        }
        text = json.dumps(record)
        write_atomically(
            f"{path}/state.json", json.dumps({"sha256": _hash_text(text), "record": record})
        )

    def _delete(self, path: str) -> None:
        state = f"{path}/state.json"
        if tf.io.gfile.exists(state):
            tf.io.gfile.remove(state)
        tf.io.gfile.rmtree(path)

    def _delete_quietly(self, path: str) -> None:
        try:
            self._delete(path)
        except tf.errors.OpError:
            logging.debug("Could not remove the unfinished checkpoint %s.", path)


class BackgroundWriter:
    """Writes checkpoints one after another, while training goes on.

    Args:
      store: where they go.
    """

    def __init__(self, store: CheckpointStore):
        self._store = store
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._writing: Future[str] | None = None

    def write(self, checkpoint: Checkpoint) -> None:
        """Starts to write a checkpoint, once the one before it is there.

        Raises:
          OSError: the one before it could not be written.
        """
        self.wait()
        self._writing = self._executor.submit(self._store.write, checkpoint)

    def wait(self) -> None:
        """Returns once everything is written.

        Raises:
          OSError: it could not be.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()


def _hash_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _hash_file(path: str) -> str:
    digest = hashlib.sha256()
    with tf.io.gfile.GFile(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
