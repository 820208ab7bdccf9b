"""Where a training loop of one's own is, and the checkpoints from which it continues there."""

import copy
import json
import random
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.aliases import KerasData
from tfdist.data.dataset_graph import list_shuffles
from tfdist.errors import TfdistError
from tfdist.stopping import EXIT_TERMINATED, ScriptStop
from tfdist.strategies.logical_replicas import describe_change
from tfdist.training.checkpoint.recovery import Recovery
from tfdist.training.fit.own_step import OwnStep, make_alike_error
from tfdist.training.inputs.data_adapter import DataAdapter
from tfdist.training.workers.agreement import check_data
from tfdist.training.workers.communication import Workers

_NUMPY = "random/numpy"


@dataclass
class Pass:
    """A pass over data: one call of `Loop.batches`.

    Attributes:
      number: the number of passes over the same data before it.
      first: the number of the first batch to give; the others were given before the checkpoint.
    """

    number: int
    first: int = 0


@dataclass
class _Data:
    """Data that `Loop.batches` was called with.

    Attributes:
      sources: functions that return what is read, or None when it is gone.
      passes: the passes over them that have begun.
      fingerprint: as in a checkpoint, once it is known.
    """

    sources: list[Callable[[], Any]]
    passes: int = 0
    fingerprint: dict[str, Any] | None = None


class LoopProgress:
    """The place of a loop: in which epoch, which call of `batches`, and after which batch.

    A program that continues calls everything as before. What was read before the checkpoint is
    skipped; then all variables and random generators get the values of the checkpoint, whatever the
    program did with them meanwhile.

    Args:
      recovery: writes and reads checkpoints; None to keep none.
      workers: the processes that run the loop.
      every: batches between checkpoints, besides one after each epoch; None for none of these.
      steps: the loop's steps, to which it adds.
      state: the user's own numbers and texts, which are saved and restored.
      numerics: returns what the bits of logical replicas depend on.
    """

    def __init__(
        self,
        recovery: Recovery | None,
        workers: Workers,
        *,
        every: int | None,
        steps: Sequence[OwnStep],
        state: dict[str, Any],
        numerics: Callable[[], dict[str, Any]],
    ):
        self._numerics = numerics
        self._recovery, self._workers, self._every = recovery, workers, every
        self._steps, self._state = steps, state
        self._phase, self._epoch, self._call = -1, 0, -1
        self._is_open = False  # within an epoch
        self._num_batches = 0
        self._found: Mapping[str, Any] | None = None  # the state of a checkpoint not yet reached
        self._known: dict[int, dict[str, Any]] = {}  # a checkpoint's data of calls not yet reached
        self._arrays: Mapping[str, np.ndarray] = {}
        self._names: Mapping[str, str] = {}
        self._unclaimed: set[str] = set()
        self._early: list[OwnStep] = []  # those that were there before the first epoch
        self._data: list[_Data] = []
        self._of_calls: dict[int, _Data] = {}
        self._is_asked_to_stop = self._was_stopped = False

    @property
    def is_saved(self) -> bool:
        """Whether checkpoints are kept."""
        return self._recovery is not None

    def request_stop(self) -> None:
        """Ends the program after the next batch, and its checkpoint."""
        self._is_asked_to_stop = True

    def iterate_epochs(self, count: int) -> Iterator[int]:
        """Yields the numbers of the epochs that are left; see `Loop.epochs`."""
        self._phase += 1
        if self._recovery is None:
            for self._epoch in range(count):
                yield self._epoch
                self._stop_if_asked()
            return
        if not self._phase:
            self._early = list(self._steps)
            self._find(self._recovery)
        if self._found is not None and self._phase < self._found["phase"]:
            return
        try:
            with ScriptStop.stoppable(self.request_stop, lambda: self._was_stopped):
                yield from self._iterate(count)
        finally:
            self._is_open = False
            self._recovery.wait()

    def _iterate(self, count: int) -> Iterator[int]:
        first = 0
        if self._found is not None and self._phase == self._found["phase"]:
            first = self._found["epoch"]
            self._claim_all(self._found)
            if self._found["call"] is None:
                self._found = None
        for self._epoch in range(first, count):
            self._call, self._is_open = -1, True
            yield self._epoch
            if self._found is not None:
                raise TfdistError(
                    f"Cannot continue in epoch {self._epoch}: the program reads fewer data in it "
                    "than before. Call `batches` as before, or give another checkpoint_dir."
                )
            self._must_stop()
            self._save(self._epoch + 1, None, 0)
            self._stop_if_asked()

    def begin_pass(self, x: KerasData, adapter: DataAdapter) -> Pass | None:
        """Counts a pass over data, and returns it; None if it was over before the checkpoint."""
        if self._recovery is not None and self._phase < 0:
            raise TfdistError(
                "Cannot save the loop: `batches` is called before `epochs`. With a checkpoint_dir, "
                "write `for epoch in loop.epochs(count)` around it."
            )
        data = self._find_data(x)
        first = 0
        if self._is_open:
            self._call += 1
            if self.is_saved:
                data = self._continue_data(data, x, adapter)
            self._of_calls[self._call] = data
            if self._found is not None:
                if self._call < self._found["call"]:
                    return None
                found, self._found = self._found, None
                first = found["batch"]
                self._claim_all(found)
            known = self._known.pop(self._call, None)
            if known is not None and not data.passes:
                data.passes = known["passes"]
                if adapter.begins_anew:
                    adapter.read_passes(data.passes, False)
        data.passes += 1
        return Pass(data.passes - 1, first)

    def _continue_data(self, data: _Data, x: KerasData, adapter: DataAdapter) -> _Data:
        """Returns the data of this call in the last epoch, which these must be.

        Else a program that continues could not tell in which order they come.
        """
        last, known = self._of_calls.get(self._call), self._known.get(self._call)
        if data.fingerprint is None:
            data.fingerprint = adapter.make_fingerprint()
        if known is not None and known["data"]:
            now = {"train": data.fingerprint, "batch_size": None}
            check_data({"train": known["data"]}, now, step=self._num_batches)
        if last is None or last is data:
            return data
        is_shuffled = isinstance(x, tf.data.Dataset) and list_shuffles(x)
        if is_shuffled or data.fingerprint != last.fingerprint:
            raise TfdistError(
                f"Cannot save the loop: call {self._call + 1} of `batches` in epoch {self._epoch} "
                "has other data than in the last one. Give it the same arrays or dataset in each "
                "epoch."
            )
        return last

    def end_batch(self, number: int) -> None:
        """Counts a batch, of which the program has computed everything; saves if that is due."""
        self._num_batches += 1
        if not self._is_open:
            return
        is_due = self._every is not None and self._num_batches % self._every == 0
        if self._must_stop() or is_due:
            self._save(self._epoch, self._call, number + 1)
        self._stop_if_asked()

    def claim_first(self, step: OwnStep) -> None:
        """Claims for a step that is about to be computed for the first time.

        Raises:
          TfdistError: it uses a model that no step before the first epoch uses. A program that
            continues would have changed it before the values of the checkpoint come.
        """
        if self._phase >= 0 and step not in self._early:
            known = {id(part) for early in self._early for part in early.find_stateful()}
            if any(id(part) not in known for part in step.find_stateful()):
                raise TfdistError(
                    f"Cannot save the loop: the models of {step.name} are not known when `epochs` "
                    "begins. Distribute the function before, a method in `__init__` (self."
                    f"{step.name} = loop.distribute(self.{step.name})), and use models as its "
                    "variables, not as arguments."
                )
        self.claim(step)

    def claim(self, step: OwnStep) -> None:
        """Gives the variables of a step the values that the checkpoint has for them."""
        for name, variable in step.list_variables().items():
            key = self._names.get(name)
            if key is None and self._unclaimed:
                raise TfdistError(
                    f"Cannot continue: the checkpoint has no variable {name!r}. Continue with the "
                    "same program, in a new process or after keras.utils.clear_session(), which "
                    "numbers its layers from the start; or give another checkpoint_dir."
                )
            if key in self._unclaimed:
                self._unclaimed.discard(key)
                variable.assign(self._arrays[key])

    def _claim_all(self, found: Mapping[str, Any]) -> None:
        self._unclaimed = set(self._names.values())
        for step in self._steps:
            self.claim(step)
            step.write_metrics(self._arrays)
        self._state.clear()
        self._state.update(copy.deepcopy(found["state"]))
        version, numbers, gauss = found["random"]
        random.setstate((version, tuple(numbers), gauss))
        kind, place, has_gauss, cached = found["numpy_random"]
        np.random.set_state((kind, self._arrays[_NUMPY], place, has_gauss, cached))

    def _find(self, recovery: Recovery) -> None:
        checkpoint = recovery.find()
        if checkpoint is not None:
            self._num_batches = checkpoint.step
            self._arrays, self._found = checkpoint.arrays, checkpoint.state
            self._names = checkpoint.state["names"]
            self._known = {int(call): data for call, data in checkpoint.state["calls"].items()}
            change = describe_change(checkpoint.state.get("numerics", {}), self._numerics())
            if change and self._workers.is_chief:
                print(change, flush=True)

    def _save(self, epoch: int, call: int | None, batch: int) -> None:
        assert self._recovery is not None
        arrays: dict[str, np.ndarray] = {}
        names: dict[str, str] = {}
        keys: dict[int, str] = {}
        owners: dict[str, Any] = {}
        for step in self._steps:
            step.compare_weights()
            for name, variable in step.list_variables().items():
                key = names[name] = keys.setdefault(id(variable), name)
                if owners.setdefault(name, variable) is not variable:
                    raise make_alike_error(name)
                if key == name:
                    arrays[name] = np.asarray(variable.numpy())
            arrays |= step.read_metrics()
        for name, key in self._names.items():  # what the program has not used yet since then
            if key in self._unclaimed and name not in names:
                names[name], arrays[key] = key, self._arrays[key]
        calls = dict(self._known)  # those that the program has not come to since then
        begun = self._of_calls.get(-1 if call is None else call)
        for number, data in self._of_calls.items():
            if number not in calls:
                passes = data.passes - (data is begun)
                calls[number] = {"passes": passes, "data": data.fingerprint}
        kind, numbers, place, has_gauss, cached = np.random.get_state(legacy=True)
        arrays[_NUMPY] = np.asarray(numbers)
        self._recovery.save(
            step=self._num_batches,
            variables=[],
            arrays=arrays,
            state={
                "phase": self._phase,
                "epoch": epoch,
                "call": call,
                "batch": batch,
                "names": names,
                "calls": calls,
                "state": self._copy_state(),
                "numerics": self._numerics(),
                "random": random.getstate(),
                "numpy_random": [kind, int(place), int(has_gauss), float(cached)],
            },
        )

    def _copy_state(self) -> Any:
        """Returns a copy of the user's state, which may change while it is written."""
        try:
            return json.loads(json.dumps(self._state))
        except (TypeError, ValueError) as error:
            raise TfdistError(
                f"Cannot save `loop.state`: {error}. Keep numbers, texts, and lists and "
                "dictionaries of them in it."
            ) from error

    def _must_stop(self) -> bool:
        """Returns whether a worker was asked to stop. All workers must call it."""
        if self._workers.count > 1:
            asked = self._workers.sum(np.array([float(self._is_asked_to_stop)]))
            self._is_asked_to_stop = bool(asked[0])
        return self._is_asked_to_stop

    def _stop_if_asked(self) -> None:
        if self._is_asked_to_stop:
            self._was_stopped = True
            if self._recovery is not None:
                self._recovery.wait()
            sys.exit(EXIT_TERMINATED)

    def _find_data(self, x: KerasData) -> _Data:
        """Returns the data that an object reads, which others may read, too.

        Datasets that are made of one shuffled dataset, such as `take` and `skip` of it, are one: a
        pass over any of them changes its order.
        """
        sources = list_shuffles(x) if isinstance(x, tf.data.Dataset) else []
        references = [_refer(source) for source in sources or [x]]
        for data in self._data:
            known = [reference() for reference in data.sources]
            if any(reference() is other for reference in references for other in known):
                return data
        self._data.append(_Data(references))
        return self._data[-1]


def _refer(x: KerasData) -> Callable[[], Any]:
    try:
        return weakref.ref(x)
    except TypeError:  # a list or a tuple of arrays
        return lambda: x
