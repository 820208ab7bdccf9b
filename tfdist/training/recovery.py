"""What a run needs to go on where it was, saved and restored on all its workers together."""

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.errors import TfdistError
from tfdist.training.checkpoints import BackgroundWriter, Checkpoint, CheckpointStore
from tfdist.training.structure import Structure, describe_structure, find_difference
from tfdist.training.workers import Workers


class Recovery:
    """The checkpoints of a trainer. All workers call every method, at the same step.

    The chief writes, while training goes on; what is written is a copy of the variables.

    Args:
      directory: where the checkpoints go; all workers must see it.
      keep: how many of the newest stay.
      workers: the processes that train together.
    """

    def __init__(self, directory: str, *, keep: int, workers: Workers):
        self._store = CheckpointStore(directory, keep=keep)
        self._writer = BackgroundWriter(self._store)
        self._workers = workers
        self._best_step: int | None = None
        self._next_is_best = False

    def save(
        self,
        *,
        step: int,
        variables: Sequence[keras.Variable],
        state: Mapping[str, Any],
        arrays: Mapping[str, np.ndarray],
        optimizer: keras.optimizers.Optimizer | None = None,
    ) -> None:
        """Takes a copy of the variables and begins to write a checkpoint of it.

        Args:
          step: the number of updates.
          variables: the model's, the optimizer's and then others, in a fixed order.
          state: JSON-serializable; `restore` returns it.
          arrays: more arrays; `restore` returns them.
          optimizer: the model's; a checkpoint of one class of optimizer is not restored to
            another. Without it, their names are compared.

        Raises:
          OSError: the checkpoint before could not be written.
        """
        if self._next_is_best:
            self._best_step, self._next_is_best = step, False
        # Reading some variables takes all workers.
        values = {_name(i): np.asarray(variable.numpy()) for i, variable in enumerate(variables)}
        if self._workers.is_chief:
            self._writer.write(
                Checkpoint(
                    step=step,
                    arrays={**values, **arrays},
                    state=state,
                    best_step=self._best_step,
                    structure=_describe(variables, optimizer),
                )
            )

    def restore(
        self,
        variables: Sequence[keras.Variable],
        *,
        optimizer: keras.optimizers.Optimizer | None = None,
    ) -> tuple[int, Mapping[str, Any], Mapping[str, np.ndarray]] | None:
        """Restores the newest checkpoint that the chief finds whole.

        Args:
          variables, optimizer: see `save`.

        Returns:
          Its step, state and arrays, or None if there is none.

        Raises:
          TfdistError: it is of another model or optimizer, or a worker does not find it.
        """
        found = self._store.read_newest() if self._workers.is_chief else None
        step = self._workers.ask_chief(found.step if found else -1)
        if step < 0:
            return None
        if found is None:
            found = self._read(step)
        self._assign(found, variables, optimizer)
        self._best_step = found.best_step
        return found.step, found.state, found.arrays

    def restore_best(
        self,
        variables: Sequence[keras.Variable],
        *,
        optimizer: keras.optimizers.Optimizer | None = None,
    ) -> int | None:
        """Restores the checkpoint marked as best and returns its step, if there is one.

        Args:
          variables, optimizer: see `save`.
        """
        self.wait()
        known = self._best_step in self._store.list_steps() if self._workers.is_chief else False
        best = self._workers.ask_chief(self._best_step if known and self._best_step else -1)
        if best < 0:
            return None
        self._assign(self._read(best), variables, optimizer)
        return best

    def mark_best(self) -> None:
        """Lets the next checkpoint stay until another one is marked."""
        self._next_is_best = True

    def wait(self) -> None:
        """Returns once the chief has written everything.

        Raises:
          OSError: it could not.
        """
        self._writer.wait()
        self._workers.wait_for_all()

    def finish_writing(self) -> None:
        """Returns once this process writes no more, in whatever way that ended."""
        with contextlib.suppress(OSError):
            self._writer.wait()

    def describe_newest(self) -> str:
        """Returns what is there to go back to, in words."""
        self.finish_writing()
        steps = self._store.list_steps()
        return f"The checkpoint of step {steps[-1]} is kept." if steps else "No checkpoint yet."

    def _read(self, step: int) -> Checkpoint:
        try:
            return self._store.read(step)
        except (tf.errors.NotFoundError, OSError) as error:
            if self._workers.is_chief:
                raise
            raise TfdistError(
                f"Worker {self._workers.index} does not find the chief's checkpoint of step {step} "
                f"in {self._store.directory}. Put --run_dir where all workers see it."
            ) from error

    def _assign(
        self,
        checkpoint: Checkpoint,
        variables: Sequence[keras.Variable],
        optimizer: keras.optimizers.Optimizer | None,
    ) -> None:
        saved, here = checkpoint.structure, _describe(variables, optimizer)
        difference = (
            find_difference(saved, here)
            if saved
            else "it does not say what its variables are, because an older tfdist wrote it"
        )
        if difference:
            raise TfdistError(
                f"Cannot continue from the checkpoint of step {checkpoint.step} in "
                f"{self._store.directory}: {difference}. Give the same model and optimizer as "
                "before, or another --run_dir or checkpoint_dir."
            )
        for name, variable in zip(here.variables, variables, strict=True):
            variable.value.assign(checkpoint.arrays[name])


def _describe(
    variables: Sequence[keras.Variable], optimizer: keras.optimizers.Optimizer | None
) -> Structure:
    named = {_name(index): variable for index, variable in enumerate(variables)}
    return describe_structure(named, optimizer=optimizer)


def _name(index: int) -> str:
    return f"variable/{index:05d}"
