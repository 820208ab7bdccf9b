"""Gives steps out to the workers of parameter servers, and waits for them with a time-out."""

import collections
import contextlib
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfdist.errors import TrainingError
from tfdist.strategies.rendezvous import find_problem
from tfdist.strategies.servers import make_coordinator

_RETRY_S = 0.05
# A worker that its launcher or scheduler starts again answers within a minute or so; when none
# does, the run is better ended, to be continued by the same command, than left to wait.
_LOOK_EVERY_S = 5.0
_WITHOUT_WORKERS_S = 120.0


class Coordination:
    """The coordinator's queue, and the watch over those who work it off.

    TensorFlow 2.21 waits an hour for each worker that is gone.

    Args:
      strategy: whose workers they are.
    """

    def __init__(self, strategy: tf.distribute.ParameterServerStrategy):
        self._coordinator = make_coordinator(strategy)
        # The public `cluster_resolver` of TensorFlow 2.21 is None under this strategy.
        cluster = strategy._cluster_resolver.cluster_spec().as_dict()
        self._workers = {f"worker {i}": address for i, address in enumerate(cluster["worker"])}

    def schedule(self, function: Any, *arguments: Any) -> Any:
        """Gives a step out and returns its remote result."""
        with explain_lost_server():
            return self._coordinator.schedule(function, args=arguments)

    def fetch(self, remote: Any) -> Any:
        """Returns a step's result, from the worker that was able to give it.

        A worker may die when it has computed the step and before the numbers are here. TensorFlow
        gives the step to another one then, but raises what came of asking the first.

        Raises:
          TrainingError: no worker has answered for two minutes.
        """
        before: BaseException | None = None
        while True:
            # RemoteValue.get takes no time-out.
            self._wait_until(remote._status_available_event.wait)
            try:
                return remote.get()
            except tf.errors.OpError as error:
                # The step's own error is the same object each time; that of asking is a new one.
                if error is before:
                    raise
                before = error
                time.sleep(_RETRY_S)

    def wait_for_all(self) -> None:
        """Returns when no step is in flight; for errors see `fetch`."""
        with explain_lost_server():
            self._wait_until(self._is_done)
            self._coordinator.join()

    def _is_done(self, timeout_s: float) -> bool:
        until = time.monotonic() + timeout_s
        while not self._coordinator.done() and time.monotonic() < until:
            time.sleep(_RETRY_S)
        return self._coordinator.done()

    def _wait_until(self, is_done: Callable[[float], bool]) -> None:
        """Returns once `is_done`, which takes a time-out in seconds, says so."""
        last_answer = time.monotonic()
        while not is_done(_LOOK_EVERY_S):
            problems = {name: find_problem(address) for name, address in self._workers.items()}
            if not all(problems.values()):
                last_answer = time.monotonic()
            elif time.monotonic() - last_answer >= _WITHOUT_WORKERS_S:
                named = ", ".join(f"{name} ({problem})" for name, problem in problems.items())
                raise TrainingError(
                    f"No worker has answered for {_WITHOUT_WORKERS_S:g} s: {named}. Start the "
                    "cluster again: the same command continues from the newest checkpoint."
                )


class StepStream:
    """Steps in flight, taken in order.

    Args:
      schedule: (step, batch) -> the step's remote result.
      batches: what the chief reads for the workers; None if they read for themselves. It may go
        on after it has ended, as passes over data of unknown length do.
      start_step: the first step.
      max_in_flight: how many are given out at most.
      find_end: step -> where to stop giving out, before that step is taken; None for no end.
      fetch: remote result -> result.
    """

    def __init__(
        self,
        schedule: Callable[[int, Any], Any],
        *,
        batches: Iterator[Any] | None,
        start_step: int,
        max_in_flight: int,
        find_end: Callable[[int], int | None],
        fetch: Callable[[Any], Any],
    ):
        self._schedule = schedule
        self._batches = batches
        self._next = self._taken = start_step
        self._max_in_flight = max_in_flight
        self._find_end = find_end
        self._fetch = fetch
        self._pending: collections.deque[Any] = collections.deque()
        self._is_at_end = False

    def take(self) -> tuple[int, Any]:
        """Returns the next step's number and its result, once it is there.

        Raises:
          StopIteration: all that were given out are taken, and there is no more for now.
        """
        end = self._find_end(self._taken)
        while (
            not self._is_at_end
            and len(self._pending) < self._max_in_flight
            and (end is None or self._next < end)
        ):
            try:
                batch = None if self._batches is None else next(self._batches)
            except StopIteration:
                self._is_at_end = True
                break
            self._pending.append(self._schedule(self._next, batch))
            self._next += 1
        if not self._pending:
            self._is_at_end = False
            raise StopIteration
        result = self._fetch(self._pending.popleft())
        step = self._taken
        self._taken += 1
        return step, result


@contextlib.contextmanager
def explain_lost_server() -> Iterator[None]:
    """Names what is gone when a parameter server, and with it the model, is gone."""
    try:
        yield
    except (tf.errors.UnavailableError, tf.errors.AbortedError) as error:
        match = re.search(r"/job:ps/replica:0/task:(\d+)", error.message)
        name = f"Parameter server {match[1]}" if match else "A parameter server"
        raise TrainingError(
            f"{name} is gone, and its part of the model with it. Start the cluster again: the same "
            "command continues from the newest checkpoint."
        ) from error
