"""What a trainer asks of every kind of training at its steps."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import numpy as np

from tfdist.training.feed import Feed


class Trained(NamedTuple):
    """What a training step found.

    Attributes:
      logs: of everything that this process's strategy has seen in the epoch.
      vector, rows: see `step.Found`.
    """

    logs: dict[str, Any]
    vector: Any = None
    rows: float = 0.0


class TrainingSteps:
    """The steps of a model, and the sums of its losses and metrics; a base class.

    Args:
      model: a compiled and built model, made in the strategy's scope.

    Attributes:
      input_s: seconds that this process's training steps waited for their batches; None where
        others read them.
      passes_on: whether what `iterate_train` returns goes on from one pass over the data to the
        next.
    """

    input_s: float | None = None
    passes_on: bool = False

    def __init__(self, model: keras.Model):
        self._model = model

    @property
    def state(self) -> list[keras.Variable]:
        """What a checkpoint holds besides the model and its optimizers."""
        return []

    def prepare(self, feed: Feed) -> None:
        """Creates what only a step's tracing creates, so that it can be restored."""

    def begin(self, *, restored: bool) -> None:
        """Makes ready for training, from the start or from a checkpoint."""

    def iterate_train(
        self, feed: Feed, *, start_step: int, steps_per_epoch: int, total_steps: int
    ) -> Any:
        """Returns what `train` takes: the global batches from `start_step` on."""
        raise NotImplementedError

    def iterate_eval(self, feed: Feed, *, steps: int | None = None) -> Any:
        """Returns what `evaluate` takes, for at most `steps` steps."""
        raise NotImplementedError

    def iterate_predict(self, feed: Feed, *, steps: int | None = None) -> Any:
        """Returns what `predict` takes, for at most `steps` steps."""
        return self.iterate_eval(feed, steps=steps)

    def look_ahead(self, iterator: Any, feed: Feed, *, of_training: bool) -> tuple[Any, Any]:
        """Returns the next global batch, and an iterator that still has it.

        Args:
          iterator: of `iterate_train` or `iterate_eval`.
          feed: that it is of.
          of_training: which of the two.

        Returns:
          A structure of tensors, None where there is none left; and what to go on with.
        """
        raise NotImplementedError

    def predict(self, iterator: Any) -> list[tuple[Any, bool]]:
        """Returns each replica's outputs for the next batch, and whether they repeat another's.

        Raises:
          StopIteration, tf.errors.OutOfRangeError: there is none left.
        """
        raise NotImplementedError

    def train(self, iterator: Any, num_steps: int = 1) -> list[Trained]:
        """Trains on the next global batches, one at a time where nothing else was asked for."""
        raise NotImplementedError

    def count_empty_step(self) -> None:
        """Does what a step does that finds no data, as Keras's last one of unknown length."""

    def settle(self, step: int, *, is_last: bool) -> bool:
        """Returns whether the workers hold one model after a step, the last of its epoch or not.

        Only then can they stop, or write a checkpoint.
        """
        return True

    def evaluate(self, iterator: Any) -> dict[str, Any]:
        """Adds the next global batch of an evaluation to the metrics, and returns the logs.

        The logs are of what this process's strategy has seen; see `read_logs`.

        Raises:
          StopIteration, tf.errors.OutOfRangeError: there is none left.
        """
        raise NotImplementedError

    def read_logs(self, logs: dict[str, Any]) -> dict[str, Any]:
        """Returns the logs of everything that all workers have seen; all of them call it.

        Args:
          logs: of this process's last step.
        """
        return logs

    def read_training_logs(self, trained: Trained) -> dict[str, Any]:
        """Returns what callbacks are told after a training step."""
        return trained.logs

    def conclude(self, logs: dict[str, Any]) -> dict[str, Any]:
        """Returns the logs of a pass that has ended, from those of its last step, as Keras does.

        A step of the model's own may return something else than its metrics under their names:
        Keras then reports the metrics. All workers call it.
        """
        return logs

    def read_metrics(self) -> list[np.ndarray]:
        """Returns the values of the metrics' variables, over all workers."""
        raise NotImplementedError

    def write_metrics(self, values: Sequence[Any]) -> None:
        """Sets the metrics' variables to values that `read_metrics` returned."""
        raise NotImplementedError

    def reset_metrics(self) -> None:
        """Forgets what was seen."""
        raise NotImplementedError

    def prepare_checkpoint(self) -> None:
        """Brings `state` up to date; all workers call it."""

    def wait(self) -> None:
        """Waits until no step is in flight."""

    def count_traces(self) -> dict[str, int]:
        """Returns how often each step was traced."""
        raise NotImplementedError

    def summarize(self) -> dict[str, Any]:
        """Returns what only this kind of training has to say for a run's summary."""
        return {}
