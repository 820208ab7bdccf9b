"""How the steps of a run form epochs, how far it has come, and when checkpoints are due."""

import math
import time
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import keras

from tfdist.errors import TfdistError
from tfdist.training.inputs.data_adapter import DataAdapter

# The steps of an epoch that only ends when the data end.
_UNKNOWN_STEPS = 1 << 40


@dataclass
class Progress:
    """The progress of a trainer.

    Attributes:
      step: updates made by this call of `fit`.
      steps_s: seconds spent in steps, without the work between them.
      steps_before: updates made by earlier calls of `fit`, and of `train_on_batch`.
      is_epoch_open: whether all steps of the current epoch are done, but its validation and end
        are not.
      was_stopped: whether the workers agreed to stop because one was asked to.
      is_running: whether a call of `fit` has begun and not ended.
      num_fits: calls of `fit` that have ended.
      num_fits_of_all: those of all trainers of the process.
      initial_values: hashes of the initial weights, by path, if a seed decides what a program
        makes of them before it trains.
    """

    step: int = 0
    steps_before: int = 0
    resumed_from_step: int | None = None
    is_asked_to_stop: bool = False
    steps_s: float = 0.0
    is_epoch_open: bool = False
    was_stopped: bool = False
    is_running: bool = False
    num_fits: int = 0
    initial_values: Mapping[str, str] = field(default_factory=dict)
    num_fits_of_all: ClassVar[int] = 0

    def begin_fit(self) -> None:
        """Counts the steps of a call of `fit` from 0."""
        self.steps_before += self.step
        self.step = 0
        self.was_stopped = False
        self.is_running = True

    def end_fit(self) -> None:
        """Counts a call of `fit`."""
        self.num_fits += 1
        Progress.num_fits_of_all += 1


@dataclass
class Reading:
    """How far `fit` has read its data, as Keras's `EpochIterator` counts it.

    A pass reads the data once. An epoch begins a pass, unless steps are asked for: then it goes on
    with the last one. If the data do not say how many batches a pass has, the first one tells, and
    Keras counts the request that finds no batch as one of them.

    Attributes:
      asked: the steps that an epoch is asked to have; None for all of the data, negative for all
        until a request finds none.
      at_a_time: the steps that Keras takes at a time, its `steps_per_execution`.
      is_exact: whether a pass has exactly `num_batches`.
      rounds_up: whether an epoch takes whole executions, as in Keras.
      seen: the batches of the current pass that were read.
      is_open: whether the next epoch goes on with the current pass.
    """

    asked: int | None
    num_batches: int | None
    at_a_time: int = 1
    is_exact: bool = False
    rounds_up: bool = True
    seen: int = 0
    is_open: bool = False

    def begin_epoch(self) -> bool:
        """Begins an epoch; returns whether it begins a pass."""
        begins = not self.is_open or self.asked is None or self.asked < 0
        self.is_open = True
        if begins:
            self.seen = 0
        return begins

    def count_steps(self, batch: int) -> float:
        """Returns the number of steps of an epoch, `batch` of which are done; may be infinite."""
        if self.asked and self.asked < 0:
            return math.inf
        if not self.num_batches:
            return self._limit
        left = self.num_batches - self.seen
        return min(self._limit, batch + (left if self.is_exact else self._round(left)))

    @property
    def is_at_end(self) -> bool:
        """Whether all batches of the pass were read."""
        return bool(self.num_batches) and self.seen >= (self.num_batches or 0)

    def is_cut(self, batch: int) -> bool:
        """Returns whether an epoch that ended after `batch` steps was asked to have more."""
        return bool(self.asked) and self._round(batch) < self._limit

    def end_short(self, number: int) -> bool:
        """Counts an execution of fewer batches as Keras does; returns whether more is asked for."""
        self.seen = self._round(self.seen)
        return number + self.at_a_time < self._limit and not self.is_at_end

    def end_data(self) -> None:
        """Ends a pass in which a request found no batch."""
        if self.num_batches is None:
            self.num_batches = self._round(self.seen) + self.at_a_time
        self.is_open = False

    @property
    def _limit(self) -> float:
        steps = self.asked or self.num_batches or -1
        return math.inf if steps < 0 else self._round(steps)

    def _round(self, steps: int) -> int:
        return -(-steps // self.at_a_time) * self.at_a_time if self.rounds_up else steps


@dataclass(frozen=True)
class Schedule:
    """How the steps of a run are divided into epochs.

    Attributes:
      steps_per_epoch: steps per epoch; the last one, and those of data that end, may have fewer.
      is_known: whether these numbers are known; else an epoch ends where the data end.
      max_steps: the step after which training ends; None for none.
      validation_epochs: epoch -> whether to validate after it.
      reading: how the data are read, from their start.
    """

    steps_per_epoch: int
    total_steps: int
    reading: Reading
    is_known: bool = True
    first_epoch: int = 0
    max_steps: int | None = None
    validation_epochs: Callable[[int], bool] = lambda epoch: True

    @property
    def num_epochs(self) -> int:
        """The number of epochs, including the last one, which may be shorter."""
        return math.ceil(self.total_steps / self.steps_per_epoch)

    @property
    def first_step(self) -> int:
        """The step at which a run without a checkpoint begins."""
        return self.find_first_step(self.first_epoch)

    def find_first_step(self, epoch: int) -> int:
        """Returns the step at which a run begins whose first epoch is the given one."""
        return min(epoch * self.steps_per_epoch, self.total_steps) if self.is_known else 0


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


def make_reading(
    adapter: DataAdapter, *, steps_per_epoch: int | None, at_a_time: int, reads_on: bool
) -> Reading:
    """Returns how `fit` reads its data from the start.

    Args:
      steps_per_epoch: those that are asked for.
      reads_on: whether epochs follow one another without a gap, as those of a source do.
    """
    known = adapter.num_steps
    if not reads_on or not known:
        return Reading(steps_per_epoch, known, at_a_time, is_exact=adapter.is_endless)
    steps = min(steps_per_epoch, known) if steps_per_epoch and steps_per_epoch > 0 else known
    return Reading(steps, None, at_a_time, rounds_up=False)


def make_schedule(
    adapter: DataAdapter,
    reading: Reading,
    *,
    epochs: int,
    max_steps: int | None,
    initial_epoch: int,
    validation_freq: int | Collection[int],
) -> Schedule:
    """Returns the schedule of a call of `fit`; something must say how long an epoch is."""
    counted = reading.count_steps(0)
    if counted == math.inf and not max_steps and adapter.is_endless:
        raise TfdistError(
            "The data do not say how long an epoch is. Give steps_per_epoch or max_steps."
        )
    if counted == math.inf and max_steps:
        reading.asked = counted = max_steps
    is_known = counted != math.inf
    steps = int(counted) if is_known else _UNKNOWN_STEPS

    def is_validated(epoch: int) -> bool:
        if isinstance(validation_freq, int):
            return (epoch + 1) % validation_freq == 0
        return epoch + 1 in validation_freq

    return Schedule(
        steps,
        max_steps or epochs * steps,
        reading,
        is_known=is_known,
        first_epoch=initial_epoch,
        max_steps=max_steps,
        validation_epochs=is_validated,
    )


def limit_epochs(epochs: int) -> int:
    """Returns the epochs of `fit`, of which `keras.config.set_max_epochs` may allow fewer."""
    limit = keras.config.max_epochs()
    if not limit or limit >= epochs:
        return epochs
    warnings.warn(f"Limiting epochs to {limit}", stacklevel=3)
    return limit


def limit_steps(steps: int | None) -> int | None:
    """Returns the steps asked for; `keras.config.set_max_steps_per_epoch` may allow fewer."""
    limit = keras.config.max_steps_per_epoch()
    if not limit or (steps and limit >= steps):
        return steps
    warnings.warn(f"Limiting steps_per_epoch to {limit}", stacklevel=3)
    return limit


def warn_of_end() -> None:
    """Warns, as Keras does, that the data have ended before the steps that were asked for."""
    warnings.warn(
        "Your input ran out of data; interrupting training. Make sure that your dataset or "
        "generator can generate at least `steps_per_epoch * epochs` batches. You may need to use "
        "the `.repeat()` function when building your dataset.",
        stacklevel=3,
    )
