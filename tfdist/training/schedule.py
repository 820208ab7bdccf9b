"""How the steps of a run form epochs, how far it has come, and when checkpoints are due."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import keras

from tfdist.errors import TfdistError
from tfdist.training.data_adapter import DataAdapter

# The steps of an epoch that only ends when the data end.
_UNKNOWN_STEPS = 1 << 40


@dataclass
class Progress:
    """The progress of a trainer.

    Attributes:
      step: updates made by this call of `fit`.
      resumed_from_step: the step of the checkpoint that this call continued from, if any.
      is_asked_to_stop: whether this process was asked to stop.
      steps_s: seconds spent in steps, without the work between them.
      steps_before: updates made by earlier calls of `fit`.
      is_epoch_open: whether all steps of the current epoch are done, but its validation and end
        are not.
      was_stopped: whether the workers agreed to stop because one was asked to.
      num_fits: the number of calls of `fit` that have ended.
    """

    step: int = 0
    steps_before: int = 0
    resumed_from_step: int | None = None
    is_asked_to_stop: bool = False
    steps_s: float = 0.0
    is_epoch_open: bool = False
    was_stopped: bool = False
    num_fits: int = 0

    def begin_fit(self) -> None:
        """Counts the steps of a call of `fit` from 0."""
        self.steps_before += self.step
        self.step = 0
        self.was_stopped = False


@dataclass(frozen=True)
class Schedule:
    """How the steps of a run are divided into epochs.

    Attributes:
      steps_per_epoch: steps per epoch; the last one may have fewer.
      total_steps: the total number of steps.
      is_known: whether these numbers are known; else an epoch ends where the data end.
      first_step: the step at which a run without a checkpoint begins.
      validation_epochs: epoch -> whether to validate after it.
    """

    steps_per_epoch: int
    total_steps: int
    is_known: bool = True
    first_step: int = 0
    validation_epochs: Callable[[int], bool] = lambda epoch: True

    @property
    def num_epochs(self) -> int:
        """The number of epochs, including the last one, which may be shorter."""
        return math.ceil(self.total_steps / self.steps_per_epoch)

    @property
    def first_epoch(self) -> int:
        """The epoch in which a run without a checkpoint begins."""
        return self.first_step // self.steps_per_epoch

    def learn(self, steps_per_epoch: int) -> "Schedule":
        """Returns the schedule of the same number of epochs, whose length is now known."""
        return replace(
            self,
            steps_per_epoch=steps_per_epoch,
            total_steps=self.num_epochs * steps_per_epoch,
            first_step=self.first_epoch * steps_per_epoch,
            is_known=True,
        )

    def count_steps(self, epoch: int) -> int:
        """Returns the number of steps of an epoch."""
        return min(self.steps_per_epoch, self.total_steps - epoch * self.steps_per_epoch)


@dataclass
class Interval:
    """When the next checkpoint is due.

    Attributes:
      steps: steps between two checkpoints; 0 for no limit.
      seconds: seconds between two checkpoints; 0 for no limit.
    """

    steps: int = 0
    seconds: float = 0

    def __post_init__(self):
        self.reset(step=0)

    def reset(self, *, step: int) -> None:
        """Records that there is a checkpoint of this step now."""
        self._step, self._time = step, time.monotonic()

    def is_due(self, step: int) -> bool:
        """Returns whether a checkpoint should be written after a step."""
        if self.steps and step // self.steps > self._step // self.steps:
            return True
        return self.seconds > 0 and time.monotonic() - self._time >= self.seconds

    def count_steps_left(self, step: int) -> float:
        """Returns the steps left until `steps` makes a checkpoint due; infinite if never."""
        return self.steps - step % self.steps if self.steps else math.inf


def make_schedule(
    adapter: DataAdapter,
    *,
    epochs: int,
    max_steps: int | None,
    steps_per_epoch: int | None,
    initial_epoch: int,
    validation_freq: Any,
) -> Schedule:
    """Returns the schedule of a call of `fit`; for the arguments see there.

    Raises:
      TfdistError: nothing says how long an epoch is.
    """
    known = adapter.num_steps
    if known is None and not (steps_per_epoch or max_steps) and adapter.is_endless:
        raise TfdistError(
            "The data do not say how long an epoch is. Give steps_per_epoch or max_steps."
        )
    if steps_per_epoch and known:
        steps_per_epoch = min(steps_per_epoch, known)
    steps = steps_per_epoch or known or max_steps or _UNKNOWN_STEPS
    total = max_steps or epochs * steps

    def is_validated(epoch: int) -> bool:
        if isinstance(validation_freq, int):
            return (epoch + 1) % validation_freq == 0
        return epoch + 1 in validation_freq

    return Schedule(
        steps,
        total,
        is_known=steps != _UNKNOWN_STEPS,
        first_step=min(initial_epoch * steps, total),
        validation_epochs=is_validated,
    )


def check_steps_at_a_time(steps: int | None, known: int | None, model: keras.Model) -> None:
    """Raises a TfdistError if Keras would take more steps than it is asked for.

    Args:
      steps: those that are asked for; None for all.
      known: the number of batches of the data; None if unknown.
      model: a model, whose `compile` may say how many steps Keras takes at a time.
    """
    at_a_time = model.steps_per_execution
    if steps and steps % at_a_time and (known is None or steps < known):
        raise TfdistError(
            f"Keras would take more than {steps} steps, since steps_per_execution={at_a_time} does "
            "not divide them. Leave steps_per_execution out of `compile`."
        )


def check_steps(steps_per_epoch: int | None, known: int | None, epochs: int) -> None:
    """Raises a TfdistError if the data end in the middle of an epoch, which Keras cuts short."""
    if not steps_per_epoch or not known or steps_per_epoch >= known:
        return
    if known % steps_per_epoch and epochs * steps_per_epoch > known:
        raise TfdistError(
            f"The data have {known} batches, which end in the middle of an epoch of "
            f"steps_per_epoch={steps_per_epoch}. Give a number that divides {known}, or a dataset "
            "that ends with .repeat()."
        )
