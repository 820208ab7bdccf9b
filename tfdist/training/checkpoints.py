"""Checkpoints: a directory a step, complete once its `state.json` is there."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf
from absl import logging

from tfdist.errors import TfdistError

_NAME = re.compile(r"step-(\d+)")


@dataclass(frozen=True)
class CheckpointStore:
    """The checkpoints under one directory.

    The variables are written first, then the state beside them under another name, which a
    rename completes: a checkpoint that was cut short is never taken for one. Works on every
    file system of `tf.io.gfile`, those without a rename of directories included.

    Attributes:
      directory: where the checkpoints go.
      keep: how many of the newest stay; the one kept as best stays as well.
    """

    directory: str
    keep: int = 3

    def save(
        self, *, step: int, variables: Sequence[keras.Variable], state: Mapping[str, Any]
    ) -> str:
        """Writes a checkpoint and returns its path.

        Args:
          step: the number of updates it holds.
          variables: what to save, in a fixed order.
          state: JSON-serialisable, returned by `restore`.

        Raises:
          OSError: it could not be written; the older checkpoints are untouched.
        """
        path = f"{self.directory}/step-{step:09d}"
        try:
            if tf.io.gfile.exists(path):
                self._delete(path)
            tf.io.gfile.makedirs(path)
            _make_checkpoint(variables).write(f"{path}/variables", _read_and_write_here())
            files = {
                name: tf.io.gfile.stat(f"{path}/{name}").length
                for name in tf.io.gfile.listdir(path)
            }
            record = {
                "step": step,
                "files": files,
                "variables": [_describe(variable) for variable in variables],
                "state": dict(state),
            }
            write_atomically(f"{path}/state.json", json.dumps(record, indent=1))
        except tf.errors.OpError as error:
            raise OSError(
                f"Cannot write the checkpoint {path}: {error.message.splitlines()[0]}. "
                "Free some space or check the permissions, then run the same command again."
            ) from error
        for old in self.list_steps()[: -self.keep]:
            if old != self.best_step():
                self._delete(f"{self.directory}/step-{old:09d}")
        return path

    def restore(self, variables: Sequence[keras.Variable]) -> dict[str, Any] | None:
        """Restores the newest whole checkpoint.

        A damaged one is passed over with a warning.

        Returns:
          The saved state, or None if there is no checkpoint.

        Raises:
          TfdistError: the checkpoint is of another model or optimiser, or none is whole.
        """
        steps = self.list_steps()
        for step in reversed(steps):
            try:
                return self.restore_step(step, variables)
            except (tf.errors.OpError, OSError, ValueError) as error:
                if isinstance(error, TfdistError):
                    raise
                logging.warning(
                    "The checkpoint of step %d is damaged (%s): taking the one before.",
                    step,
                    str(error).splitlines()[0],
                )
        if steps:
            raise TfdistError(
                f"None of the {len(steps)} checkpoints in {self.directory} can be read. "
                "Remove them to start again, or take another --run_dir."
            )
        return None

    def restore_step(self, step: int, variables: Sequence[keras.Variable]) -> dict[str, Any]:
        """Restores one checkpoint and returns its state; for errors see `restore`."""
        path = f"{self.directory}/step-{step:09d}"
        with tf.io.gfile.GFile(f"{path}/state.json") as file:
            record = json.loads(file.read())
        for name, length in record["files"].items():
            found = tf.io.gfile.stat(f"{path}/{name}").length
            if found != length:
                raise OSError(f"{name} has {found} bytes instead of {length}")
        expected = [_describe(variable) for variable in variables]
        if expected != record["variables"]:
            pairs = zip(expected, record["variables"], strict=False)
            here, saved = next(
                (pair for pair in pairs if pair[0] != pair[1]),
                (f"{len(expected)} variables", f"{len(record['variables'])}"),
            )
            raise TfdistError(
                f"The checkpoint {path} is of another model or optimiser: it holds {saved} where "
                f"this run has {here}. Give the same flags as before, or another --run_dir."
            )
        checkpoint = _make_checkpoint(variables)
        checkpoint.read(f"{path}/variables", _read_and_write_here()).assert_consumed()
        return record["state"]

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

    def mark_best(self, step: int) -> None:
        """Keeps the checkpoint of `step`, written or not yet, until another one is marked."""
        tf.io.gfile.makedirs(self.directory)
        write_atomically(f"{self.directory}/best.json", json.dumps({"step": step}))

    def best_step(self) -> int | None:
        """Returns the step of the checkpoint marked as best, or None."""
        path = f"{self.directory}/best.json"
        if not tf.io.gfile.exists(path):
            return None
        with tf.io.gfile.GFile(path) as file:
            return json.loads(file.read())["step"]

    def _delete(self, path: str) -> None:
        state = f"{path}/state.json"
        if tf.io.gfile.exists(state):
            tf.io.gfile.remove(state)
        tf.io.gfile.rmtree(path)


def write_atomically(path: str, text: str) -> None:
    """Writes a text file so that a reader sees the old one or the new one, never a part."""
    temporary = f"{path}.writing"
    with tf.io.gfile.GFile(temporary, "w") as file:
        file.write(text)
    tf.io.gfile.rename(temporary, path, overwrite=True)


def _make_checkpoint(variables: Sequence[keras.Variable]) -> tf.train.Checkpoint:
    return tf.train.Checkpoint(variables=[variable.value for variable in variables])


def _read_and_write_here() -> tf.train.CheckpointOptions:
    # Else the parameter servers would, each on its own machine's disk.
    here = tf.config.list_logical_devices("CPU")[0].name
    return tf.train.CheckpointOptions(experimental_io_device=here)


def _describe(variable: keras.Variable) -> str:
    # Without the name: Keras counts the models of a process in it.
    return f"{variable.dtype}{list(variable.shape)}"
