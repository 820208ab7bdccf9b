"""The interface of a trainer to the steps of every kind of training."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np

from tfdist.aliases import BatchIterator
from tfdist.training.inputs.data_adapter import DataAdapter


class StepLogs(NamedTuple):
    """The results of a training step.

    Attributes:
      logs: the logs over everything that this process's strategy has seen in the epoch.
      vector, rows: see `StepResult`.
    """

    logs: dict[str, Any]
    vector: Any = None
    rows: float = 0.0


class TrainingSteps:
    """The steps of a model, and the sums of its losses and metrics; a base class.

    Args:
      model: a compiled and built model, created in the strategy's scope.

    Attributes:
      input_s: seconds that this process's training steps waited for their batches; None if others
        read the batches.
      passes_on: whether the iterator of `iterate_train` continues from one pass over the data to
        the next.
      needs_even_epochs: whether all epochs must have the same number of steps.
    """

    input_s: float | None = None
    passes_on: bool = False
    needs_even_epochs: bool = False

    def __init__(self, model: keras.Model):
        self._model = model

    @property
    def state(self) -> list[keras.Variable]:
        """The variables that a checkpoint holds besides the model's and its optimizer's."""
        return []

    @property
    def shared(self) -> list[keras.Variable]:
        """The variables that have the same values on all workers whenever these are in sync."""
        return []

    def prepare(self, adapter: DataAdapter) -> None:
        """Creates the variables that only tracing creates, so that they can be restored."""

    def remake(self, kind: str) -> bool:
        """Makes the steps of a kind, `train`, `test` or `predict`, anew; returns whether it can."""
        return False

    def keep_prediction(self, last: "TrainingSteps") -> None:
        """Predicts by the compiled step that these steps took the place of, as Keras does."""

    def begin(self, *, restored: bool) -> None:
        """Prepares for training, from the start or from a checkpoint."""

    def iterate_train(
        self, adapter: DataAdapter, *, start_step: int, steps_per_epoch: int, total_steps: int
    ) -> Any:
        """Returns an iterator for `train`, over the global batches from `start_step` on."""
        raise NotImplementedError

    def begin_epoch(self, adapter: DataAdapter) -> None:
        """Prepares for the steps of an epoch, or of its rest."""

    def iterate_eval(self, adapter: DataAdapter, *, steps: int | None = None) -> Any:
        """Returns an iterator for `evaluate`, for at most `steps` steps."""
        raise NotImplementedError

    def iterate_predict(self, adapter: DataAdapter, *, steps: int | None = None) -> Any:
        """Returns an iterator for `predict`, for at most `steps` steps."""
        return self.iterate_eval(adapter, steps=steps)

    def look_ahead(
        self, iterator: BatchIterator, adapter: DataAdapter, *, of_training: bool
    ) -> tuple[Any, Any]:
        """Returns the next global batch, None if none is left, and an iterator that has it."""
        raise NotImplementedError

    def start_prediction(self, iterator: BatchIterator) -> Callable[[], list[tuple[Any, bool]]]:
        """Starts to compute the outputs for the next batch.

        Returns:
          A function that waits for each replica's outputs, and returns them, and whether they
          repeat another's.

        Raises:
          StopIteration, tf.errors.OutOfRangeError: no batch is left.
        """
        raise NotImplementedError

    @property
    def most_steps(self) -> int:
        """How many steps one call of `start` may take."""
        return 1

    @property
    def runs_ahead(self) -> bool:
        """Whether the devices still compute a step that has been started."""
        return False

    def start(self, iterator: BatchIterator, num_steps: int = 1) -> Callable[[], list[StepLogs]]:
        """Starts to train on the next `num_steps` global batches, with one step for each.

        Returns:
          A function that waits for the results, and returns them. It must be called once.

        Raises:
          StopIteration, tf.errors.OutOfRangeError: no batch is left.
        """
        raise NotImplementedError

    def train(self, iterator: BatchIterator, num_steps: int = 1) -> list[StepLogs]:
        """Trains on the next `num_steps` global batches; see `start`."""
        return self.start(iterator, num_steps)()

    def count_empty_step(self) -> None:
        """Runs the no-op step that Keras runs after the data have ended."""

    def sync(self, step: int, *, is_last: bool) -> bool:
        """Syncs the workers if that is due after a step; returns whether they are in sync.

        Only then can they stop or write a checkpoint.
        """
        return True

    def start_evaluation(self, iterator: BatchIterator) -> Callable[[], dict[str, Any]]:
        """Starts to add the next global batch of an evaluation to the metrics.

        Returns:
          A function that waits for the logs, and returns them. They cover what this process's
          strategy has seen; see `read_logs`.

        Raises:
          StopIteration, tf.errors.OutOfRangeError: no batch is left.
        """
        raise NotImplementedError

    def read_logs(self, logs: dict[str, Any]) -> dict[str, Any]:
        """Returns logs over what all workers have seen, instead of one; all must call this."""
        return logs

    def read_training_logs(self, trained: StepLogs) -> dict[str, Any]:
        """Returns the logs that callbacks get after a training step."""
        return trained.logs

    def conclude(self, kind: str, logs: dict[str, Any], *, anew: bool = False) -> dict[str, Any]:
        """Returns the final logs of an epoch ("train") or evaluation ("test").

        They are made from those of its last step; `anew`, from what the metrics are now: a step
        without data, or a callback, may have changed them.

        The user's own step may return something other than the metrics under their names: the
        metrics are then reported instead, as in Keras. All workers must call this.
        """
        return logs

    def read_metrics(self) -> list[np.ndarray]:
        """Returns the values of the metrics' variables, over all workers; all must call this."""
        return [v.sum(0, np.result_type(v, "f8")).astype(v.dtype) for v in self.read_states()]

    def read_states(self) -> list[np.ndarray]:
        """Returns each replica's part of them, [replicas, ...], for all workers; they add up."""
        raise NotImplementedError

    def write_states(self, states: Sequence[Any]) -> None:
        """Sets the metrics' variables to what `read_states` returned, on any number of replicas."""
        raise NotImplementedError

    def reset_metrics(self) -> None:
        """Resets the metrics."""
        raise NotImplementedError

    def prepare_checkpoint(self) -> None:
        """Brings `state` up to date. All workers must call this."""

    def wait(self) -> None:
        """Waits until no step is in flight."""

    def count_traces(self) -> dict[str, int]:
        """Returns how often each step was traced."""
        raise NotImplementedError

    def summarize(self) -> dict[str, Any]:
        """Returns the entries of a run's summary that only this kind of training has."""
        return {}
