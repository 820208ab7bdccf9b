"""Saves and restores what a run needs to continue, on all workers together."""

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.errors import TfdistError
from tfdist.records.durable_files import make_directories
from tfdist.records.run_lock import hold_run_lock
from tfdist.training.checkpoint.files import BackgroundWriter, Checkpoint, CheckpointStore
from tfdist.training.checkpoint.structure import describe_structure, find_difference
from tfdist.training.workers.communication import Workers

# The chief's answers in place of the step of a checkpoint.
_NOTHING = -1
_REFUSED = -2


class Recovery:
    """The checkpoints of a trainer. All workers must call every method at the same step.

    The chief writes the values of the variables while training continues. From `restore` or the
    first `save` until `wait` or `finish_writing`, it holds the lock of the directory, so that two
    runs never write to the same directory.

    Args:
      directory: the directory of the checkpoints; all workers must see it.

    Attributes:
      save_s, restore_s: the seconds for which training has stood still, for `save` and `restore`.
    """

    def __init__(self, directory: str, *, keep: int, workers: Workers):
        self._store = CheckpointStore(directory, keep=keep)
        self._writer = BackgroundWriter(self._store)
        self._workers = workers
        self._lock = contextlib.ExitStack()
        self._is_locked = False
        self._best_step: int | None = None
        self._begun_from: str | None = None
        self._next_is_best = False
        self.save_s = self.restore_s = 0.0

    def save(
        self,
        *,
        step: int,
        variables: Sequence[keras.Variable],
        state: Mapping[str, Any],
        arrays: Mapping[str, np.ndarray],
        optimizer: keras.optimizers.Optimizer | None = None,
    ) -> None:
        """Reads the variables and starts writing a checkpoint of their values.

        Args:
          variables: the model's, the optimizer's and then others, in a fixed order.
          optimizer: the model's optimizer; a checkpoint is only restored to an optimizer of the
            same class. Without it, the optimizers' names are compared.
        """
        began = time.perf_counter()
        if self._next_is_best:
            self._best_step, self._next_is_best = step, False
        # Reading some variables requires all workers.
        named = _name_arrays(variables)
        values = {name: _read_value(variable) for name, variable in named.items()}
        if self._workers.is_chief:
            self._hold_lock()
            self._writer.write(
                Checkpoint(
                    step=step,
                    arrays={**values, **arrays},
                    state=state,
                    best_step=self._best_step,
                    structure=describe_structure(named, optimizer=optimizer),
                    begun_from=self._begun_from,
                )
            )
        self.save_s += time.perf_counter() - began

    def restore(
        self,
        variables: Sequence[keras.Variable],
        *,
        optimizer: keras.optimizers.Optimizer | None = None,
        begun_from: str | None = None,
    ) -> tuple[int, Mapping[str, Any], Mapping[str, np.ndarray]] | None:
        """Restores the newest intact checkpoint; returns its step, state and arrays, or None.

        Args:
          begun_from: a hash of the state that training begins from. The checkpoints record it, and
            those of a training that began from another state are not restored.

        Raises:
          TfdistError: as `find`; or it belongs to another model or optimizer.
        """
        began = time.perf_counter()
        found = self.find(begun_from)
        if found is None:
            return None
        self._assign(found, variables, optimizer)
        self._best_step = found.best_step
        self.restore_s += time.perf_counter() - began
        return found.step, found.state, found.arrays

    def find(self, begun_from: str | None = None) -> Checkpoint | None:
        """Returns the newest checkpoint that the chief finds intact, if there is one.

        Args:
          begun_from: see `restore`.

        Raises:
          TfdistError: a worker cannot find it, none can be read, or the directory is in use.
        """
        found, refusal = None, None
        self._begun_from = begun_from
        if self._workers.is_chief:
            try:
                self._hold_lock()
                found = self._store.read_newest(begun_from)
            except TfdistError as error:
                refusal = error
        answer = _REFUSED if refusal else _NOTHING
        step = self._workers.ask_chief(found.step if found else answer)
        if refusal:
            raise refusal
        if step == _REFUSED:
            raise TfdistError(
                f"Worker {self._workers.index} stops: the chief cannot use the checkpoints in "
                f"{self._store.directory}. See the chief's message."
            )
        if step == _NOTHING:
            return None
        return found or self._read(step)

    def restore_best(
        self,
        variables: Sequence[keras.Variable],
        *,
        optimizer: keras.optimizers.Optimizer | None = None,
    ) -> int | None:
        """Restores the checkpoint marked as best and returns its step, if there is one."""
        self._wait_for_writer()
        known = self._best_step in self._store.list_steps() if self._workers.is_chief else False
        best = self._workers.ask_chief(self._best_step if known and self._best_step else _NOTHING)
        if best == _NOTHING:
            return None
        self._assign(self._read(best), variables, optimizer)
        return best

    def mark_best(self) -> None:
        """Marks the next checkpoint to be kept until another one is marked."""
        self._next_is_best = True

    def wait(self) -> None:
        """Waits until the chief has written everything, and releases the directory."""
        try:
            self._wait_for_writer()
        finally:
            self._release_lock()

    def finish_writing(self) -> None:
        """Releases the directory after this process has written, whether that succeeded or not."""
        with contextlib.suppress(OSError):
            self._writer.wait()
        self._release_lock()

    def describe_newest(self) -> str:
        """Describes the newest checkpoint in one sentence."""
        with contextlib.suppress(OSError):
            self._writer.wait()
        steps = self._store.list_steps()
        return f"The checkpoint of step {steps[-1]} is kept." if steps else "No checkpoint yet."

    def _wait_for_writer(self) -> None:
        self._writer.wait()
        self._workers.wait_for_all()

    def _hold_lock(self) -> None:
        """Takes the lock of the directory, unless this trainer already holds it.

        A directory that is not writable needs no lock: writing a checkpoint reports the reason.
        """
        directory = self._store.directory
        if self._is_locked or "://" in directory:
            return
        try:
            make_directories(directory)
        except (OSError, tf.errors.OpError):
            return
        if os.access(directory, os.W_OK):
            self._lock.enter_context(hold_run_lock(directory, option="checkpoint_dir"))
            self._is_locked = True

    def _release_lock(self) -> None:
        self._lock.close()
        self._is_locked = False

    def _read(self, step: int) -> Checkpoint:
        try:
            return self._store.read(step)
        except (tf.errors.NotFoundError, OSError) as error:
            if self._workers.is_chief:
                raise
            raise TfdistError(
                f"Worker {self._workers.index} cannot find the chief's checkpoint of step {step} "
                f"in {self._store.directory}. Put `run_dir` where all workers see it."
            ) from error

    def _assign(
        self,
        checkpoint: Checkpoint,
        variables: Sequence[keras.Variable],
        optimizer: keras.optimizers.Optimizer | None,
    ) -> None:
        saved = checkpoint.structure
        assert saved is not None
        here = describe_structure(_name_arrays(variables), optimizer=optimizer)
        difference = find_difference(saved, here)
        if difference:
            raise TfdistError(
                f"Cannot continue from the checkpoint of step {checkpoint.step} in "
                f"{self._store.directory}: {difference}. Give the same model and optimizer as "
                "before, or another `run_dir` or checkpoint_dir."
            )
        for name, variable in zip(saved.variables, variables, strict=True):
            variable.value.assign(checkpoint.arrays[name])


def _read_value(variable: keras.Variable) -> tf.Tensor:
    """Returns a variable's value in the host's memory, which later updates leave as it is.

    Nothing is copied there: TensorFlow updates a variable in place only where nothing else holds
    its value, so that a step copies what the writer still needs by then.
    """
    with tf.device("CPU:0"):
        return tf.identity(variable.value)


def _name_arrays(variables: Sequence[keras.Variable]) -> dict[str, keras.Variable]:
    """Returns the name of each variable's array in a checkpoint -> the variable."""
    named: dict[str, keras.Variable] = {}
    for variable in variables:
        name = f"variables/{variable.path}"
        while name in named:  # such as the weights of two layers that the user gave one name
            name += "_"
        named[name] = variable
    return named
