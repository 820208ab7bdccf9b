"""Schedules steps on the workers of parameter servers, and waits for them with a timeout."""

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
# A worker that its launcher or scheduler restarts answers within about a minute. If none does, it
# is better to end the run, which the same command continues, than to wait.
_LOOK_EVERY_S = 5.0
_WITHOUT_WORKERS_S = 120.0


class Coordination:
    """Schedules steps on the workers of a strategy, and notices when no worker answers.

    TensorFlow 2.21 by itself waits an hour for each lost worker.
    """

    def __init__(self, strategy: tf.distribute.ParameterServerStrategy):
        self._coordinator = make_coordinator(strategy)
        # The public `cluster_resolver` of TensorFlow 2.21 is None under this strategy.
        cluster = strategy._cluster_resolver.cluster_spec().as_dict()
        self._workers = {f"worker {i}": address for i, address in enumerate(cluster["worker"])}

    def schedule(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Schedules a step and returns its remote result."""
        with explain_lost_server():
            return self._coordinator.schedule(function, args=arguments)

    def fetch(self, remote: Any) -> Any:
        """Waits for a step and returns its result, even if the worker that computed it dies.

        A worker may die after it has computed a step and before its result has arrived. TensorFlow
        then gives the step to another worker, but raises the error from the lost one.

        Raises:
          TrainingError: no worker has answered for two minutes.
        """
        before: BaseException | None = None
        while True:
            # RemoteValue.get has no timeout.
            self._wait_until(remote._status_available_event.wait)
            try:
                return remote.get()
            except tf.errors.OpError as error:
                # The step's own error is the same object each time, a connection error a new one.
                if error is before:
                    raise
                before = error
                time.sleep(_RETRY_S)

    def wait_for_all(self) -> None:
        """Waits until no step is in flight; for errors see `fetch`."""
        with explain_lost_server():
            self._wait_until(self._is_done)
            self._coordinator.join()

    def _is_done(self, timeout_s: float) -> bool:
        until = time.monotonic() + timeout_s
        while not self._coordinator.done() and time.monotonic() < until:
            time.sleep(_RETRY_S)
        return self._coordinator.done()

    def _wait_until(self, is_done: Callable[[float], bool]) -> None:
        """Waits until `is_done`, which takes a timeout in seconds, returns True."""
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
    """The steps in flight, whose results are taken in order.

    Args:
      schedule: (step, batch) -> the step's remote result.
      batches: the batches that the chief reads for the workers; None if they read their own. The
        iterator may continue after it has ended, as it does for epochs of unknown length.
      find_end: next step to take -> first step that must not be scheduled yet; None for no end.
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
        """Waits for the next step, and returns its number and its result.

        Raises:
          StopIteration: all scheduled steps are taken, and there are no more for now.
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
    """Raises an error that names the parameter server when one is lost, and the model with it."""
    try:
        yield
    except (tf.errors.UnavailableError, tf.errors.AbortedError) as error:
        match = re.search(r"/job:ps/replica:0/task:(\d+)", error.message)
        name = f"Parameter server {match[1]}" if match else "A parameter server"
        raise TrainingError(
            f"{name} was lost, and its part of the model with it. Start the cluster again: the "
            "same command continues from the newest checkpoint."
        ) from error
