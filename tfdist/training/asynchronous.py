"""The steps under ParameterServerStrategy: workers compute, the chief applies.

A worker takes a step's number and a place for its gradient. It reads the weights from the
parameter servers, computes the gradient of that step's global batch, leaves it in the place, on
the servers that hold the weights, and returns some numbers. It changes nothing else, so that a
step whose worker dies is simply computed again by another one.

The chief applies the gradients, one step after the other: it starts the servers' part of the
optimiser, through which no gradient passes the chief itself. So every step is applied exactly
once, at its own count of the learning-rate schedule, optimiser slots and moving statistics
are updated as on one device, and the model can be saved between any two steps.

Workers do not wait for one another: `max_in_flight` steps are given out ahead of the last one
that was applied. That bounds the staleness, the number of updates between a step's reading of
the weights and its own update, by `max_in_flight - 1`.
"""

import collections
import contextlib
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.errors import TfdistError, TrainingError
from tfdist.strategies.parameter_server import make_coordinator
from tfdist.strategies.rendezvous import find_problem
from tfdist.training.feed import Feed
from tfdist.training.objective import Objective
from tfdist.training.step import (
    count_batch,
    count_rows,
    gradients_already_reduced,
    list_metric_variables,
    make_read_logs,
    measure_valid,
    reset_metrics,
)

# What a function holds is sent to a worker with each call.
_MAX_CAPTURED_BYTES = 1 << 20
_RETRY_S = 0.05
# A worker that its launcher or scheduler starts again answers within a minute or so; when none
# does, the run is better ended, to be continued by the same command, than left to wait.
_LOOK_EVERY_S = 5.0
_WITHOUT_WORKERS_S = 120.0
_PYTHON_OPERATIONS = {"PyFunc", "PyFuncStateless", "EagerPyFunc"}


class AsynchronousSteps:
    """What a trainer does under ParameterServerStrategy instead of `tfdist.training.step`.

    Args:
      model: a compiled and built model, made in the strategy's scope.
      objective: its losses.
      strategy: the strategy.
      max_in_flight: steps given out at a time; 0 for one a worker. With 1 the result is that
        of one device.

    Raises:
      TfdistError: `max_in_flight` is negative.
    """

    def __init__(
        self,
        model: keras.Model,
        objective: Objective,
        strategy: tf.distribute.ParameterServerStrategy,
        *,
        max_in_flight: int = 0,
    ):
        if max_in_flight < 0:
            raise TfdistError(
                f"--max_in_flight={max_in_flight} is negative. Give 1 or more, or 0: one a worker."
            )
        self._model = model
        self._objective = objective
        self._strategy = strategy
        self._coordinator = make_coordinator(strategy)
        self._watch = _WorkerWatch(strategy)
        self.max_in_flight = max_in_flight or strategy.extended._num_workers
        metrics = {id(variable) for variable in model.metrics_variables}
        self._trainable = list(model.trainable_variables)
        trainable = {id(variable) for variable in self._trainable}
        self._others = [v for v in model.variables if id(v) not in metrics | trainable]
        self._metric_variables = list_metric_variables(model, objective)
        self._weights = _make_shards([*self._trainable, *self._others])
        self._gradients = _make_shards(self._trainable)
        self._places: list[tf.Variable] = []
        self._version: tf.Variable | None = None
        # Known once a worker's step is traced.
        self._with_gradient: list[int] = []
        self._updated: list[keras.Variable] = []
        self._staleness: list[int] = []
        self._longest_staleness = 0
        self._total_staleness = 0
        self._applied = 0
        self._apply = tf.function(self._apply_step)
        self._add = tf.function(self._add_counts)
        self._read_logs = make_read_logs(model, objective)

    @property
    def state(self) -> list[keras.Variable]:
        """What a checkpoint holds besides the model and its optimiser."""
        return []

    def begin(self, *, restored: bool) -> None:
        """Does nothing: all is on the parameter servers."""

    def iterate_train(
        self, feed: Feed, *, start_step: int, steps_per_epoch: int, total_steps: int
    ) -> "_Stream":
        """Returns the training steps from `start_step` on, given out up to an epoch's end."""
        self._make_places()
        assert self._version is not None
        self._version.assign(start_step)
        read = feed.read_train if _can_travel(feed.read_train) else None
        compute = self._make_compute(read)

        def schedule(step: int, batch: Any) -> Any:
            place = tf.constant(step % self.max_in_flight, tf.int64)
            return self._schedule(compute, tf.constant(step, tf.int64), place, batch)

        return _Stream(
            schedule,
            batches=None if read else _iterate(feed.make_train(_one_pipeline(), start_step)),
            start_step=start_step,
            max_in_flight=self.max_in_flight,
            find_end=lambda step: min((step // steps_per_epoch + 1) * steps_per_epoch, total_steps),
            fetch=self._fetch,
        )

    def iterate_eval(self, feed: Feed, *, steps: int | None = None) -> "_Stream":
        """Returns the steps of an evaluation, at most `steps`."""
        return self._iterate_eval(feed, self._make_evaluate, steps)

    def iterate_predict(self, feed: Feed) -> "_Stream":
        """Returns the steps of a prediction."""
        return self._iterate_eval(feed, self._make_predict, None)

    def train(self, stream: "_Stream") -> float:
        """Applies the next step and returns its loss."""
        with _explain_failures():
            step, place, result = stream.take()
            with self._strategy.scope():
                self._apply(tf.constant(place, tf.int64), result["states"])
                self._add(result["counts"])
        staleness = step - int(result["version"])
        self._staleness.append(staleness)
        self._longest_staleness = max(self._longest_staleness, staleness)
        self._total_staleness += staleness
        self._applied += 1
        return float(result["loss"])

    def settle(self, step: int, *, is_last: bool) -> bool:
        """Returns True: there is one model, on the parameter servers."""
        return True

    def evaluate(self, stream: "_Stream") -> None:
        """Adds the next step of an evaluation to the metrics.

        Raises:
          StopIteration: there is none left.
        """
        with _explain_failures():
            _, _, counts = stream.take()
            self._add(counts)

    def predict(self, stream: "_Stream") -> list[tuple[Any, tf.Tensor]]:
        """Returns the outputs of the next step, and how many of their rows count.

        Raises:
          StopIteration: there is none left.
        """
        with _explain_failures():
            _, _, (outputs, num_valid) = stream.take()
        return [(outputs, num_valid)]

    def read_logs(self) -> dict[str, float]:
        """Returns the losses and metrics of everything seen."""
        with _explain_failures():
            return {name: float(value) for name, value in self._read_logs().items()}

    def read_training_logs(self) -> dict[str, float]:
        """Returns those, and the mean and maximum staleness of the epoch, in steps."""
        seen = self._staleness or [0]
        return self.read_logs() | {
            "staleness_mean": sum(seen) / len(seen),
            "staleness_max": float(max(seen)),
        }

    def read_metrics(self) -> list[np.ndarray]:
        """Returns the values of the metrics' variables."""
        with _explain_failures():
            return [variable.numpy() for variable in self._metric_variables]

    def write_metrics(self, values: Sequence[Any]) -> None:
        """Sets the metrics' variables, of which there is one each, to values read before."""
        for variable, value in zip(self._metric_variables, values, strict=True):
            variable.assign(tf.constant(value, variable.dtype, variable.shape))

    def reset_metrics(self) -> None:
        """Forgets what was seen."""
        reset_metrics(self._model, self._objective)

    def begin_epoch(self) -> None:
        """Forgets what was seen, and the staleness."""
        self.reset_metrics()
        self._staleness = []

    def prepare_checkpoint(self) -> None:
        """Does nothing."""

    def wait(self) -> None:
        """Waits until no step is in flight."""
        with _explain_failures():
            self._watch.wait(self._is_done)
            self._coordinator.join()

    def count_traces(self) -> dict[str, int]:
        """Returns how often each step of the chief's was traced."""
        return {
            "apply": self._apply.experimental_get_tracing_count(),
            "read_logs": self._read_logs.experimental_get_tracing_count(),
        }

    def summarize(self) -> dict[str, Any]:
        """Returns what a run's summary says of all steps of this process."""
        return {
            "workers": self._strategy.extended._num_workers,
            "max_in_flight": self.max_in_flight,
            "updates": int(self._model.optimizer.iterations.numpy()),
            "staleness_mean": self._total_staleness / max(self._applied, 1),
            "staleness_max": self._longest_staleness,
        }

    def _make_places(self) -> None:
        """Creates a place for each gradient in flight, beside the weights."""
        if self._version is not None:
            return
        with self._strategy.scope():
            for shard in self._gradients:
                shape, dtype = (self.max_in_flight, shard.size), shard.dtype
                with self._strategy.extended.colocate_vars_with(shard.variables[0].value):
                    self._places.append(
                        tf.Variable(
                            lambda shape=shape, dtype=dtype: tf.zeros(shape, dtype),
                            trainable=False,
                            dtype=dtype,
                            shape=shape,
                        )
                    )
            with self._strategy.extended.colocate_vars_with(self._trainable[0].value):
                self._version = tf.Variable(0, dtype=tf.int64, trainable=False)

    def _is_done(self, timeout_s: float) -> bool:
        until = time.monotonic() + timeout_s
        while not self._coordinator.done() and time.monotonic() < until:
            time.sleep(_RETRY_S)
        return self._coordinator.done()

    def _fetch(self, remote: Any) -> Any:
        """Returns a step's result, from the worker that was able to give it.

        A worker may die when it has computed the step and before the numbers are here. TensorFlow
        gives the step to another one then, but raises what came of asking the first.
        """
        before: BaseException | None = None
        while True:
            # RemoteValue.get of TensorFlow 2.21 takes no time-out.
            self._watch.wait(remote._status_available_event.wait)
            try:
                return remote.get()
            except tf.errors.OpError as error:
                # The step's own error is the same object each time; that of asking is a new one.
                if error is before:
                    raise
                before = error
                time.sleep(_RETRY_S)

    def _schedule(self, function: Any, *arguments: Any) -> Any:
        with _explain_failures():
            return self._coordinator.schedule(function, args=arguments)

    def _iterate_eval(self, feed: Feed, make: Callable[[Any], Any], steps: int | None) -> "_Stream":
        read = feed.read_eval if _can_travel(feed.read_eval) else None
        function = make(read)
        end = steps if read is None else min(filter(None, (steps, feed.num_steps)))
        return _Stream(
            lambda step, batch: self._schedule(function, tf.constant(step, tf.int64), batch),
            batches=None if read else _iterate(feed.make_eval(_one_pipeline())),
            start_step=0,
            max_in_flight=self.max_in_flight,
            find_end=lambda step: end,
            fetch=self._fetch,
        )

    def _read_weights(self) -> list[tuple[keras.Variable, tf.Tensor]]:
        return [pair for shard in self._weights for pair in shard.read()]

    def _make_compute(self, read: Callable[[tf.Tensor], Any] | None) -> Any:
        """Returns what a worker does at a training step."""
        model, objective = self._model, self._objective

        @tf.function
        def compute(step: tf.Tensor, place: tf.Tensor, batch: Any) -> dict[str, Any]:
            assert self._version is not None
            batch = batch if read is None else read(step)
            x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
            version = self._version.read_value()
            with tf.control_dependencies([version]):
                mapping = self._read_weights()
            values = {id(variable): value for variable, value in mapping}
            weights = [values[id(variable)] for variable in self._trainable]
            olds = [(v, values[id(v)]) for v in self._others]
            with (
                tf.distribute.ReplicaContext(self._strategy, 0),
                tf.GradientTape(watch_accessed_variables=False) as tape,
                tf.GradientTape(persistent=True, watch_accessed_variables=False) as state_tape,
            ):
                tape.watch(weights)
                state_tape.watch([old for _, old in olds if old.dtype.is_floating])
                with keras.StatelessScope(mapping, collect_losses=True) as scope:
                    y_pred = model(x, training=True)
                    measured = objective.measure(
                        x=x,
                        y=y,
                        y_pred=y_pred,
                        sample_weight=sample_weight,
                        num_rows=count_rows(x),
                        training=True,
                    )
                share = measured.make_share(lambda vector: vector)
            gradients = tape.gradient(share, weights)
            self._with_gradient[:] = [i for i, g in enumerate(gradients) if g is not None]
            # Sparse gradients become dense afterwards: Keras clips them by the norm of their rows.
            clipped = model.optimizer._clip_gradients([gradients[i] for i in self._with_gradient])
            by_variable = {
                id(self._trainable[i]): tf.convert_to_tensor(gradient)
                for i, gradient in zip(self._with_gradient, clipped, strict=True)
            }
            for shard, places in zip(self._gradients, self._places, strict=True):
                row = shard.join(by_variable)
                places.scatter_update(tf.IndexedSlices(row[None], place[None]))
            news = [(v, old, scope.get_current_value(v)) for v, old in olds]
            changed = [(v, old, new) for v, old, new in news if new is not old]
            self._updated[:] = [variable for variable, _, _ in changed]
            with tf.distribute.ReplicaContext(self._strategy, 0):
                counts = count_batch(model, objective, measured, (y, y_pred, sample_weight))
            return {
                "loss": share,
                "rows": measured.rows,
                "version": version,
                "states": [_describe_update(old, new, state_tape) for _, old, new in changed],
                "counts": counts,
            }

        return compute

    def _make_evaluate(self, read: Callable[[tf.Tensor], Any] | None) -> Any:
        """Returns what a worker does at a step of an evaluation."""
        model, objective = self._model, self._objective

        @tf.function
        def evaluate(step: tf.Tensor, batch: Any) -> list[tf.Tensor]:
            batch, num_valid = batch if read is None else read(step)
            with tf.distribute.ReplicaContext(self._strategy, 0):
                with keras.StatelessScope(self._read_weights(), collect_losses=True):
                    found = measure_valid(model, objective, batch, num_valid)
                return count_batch(model, objective, *found)

        return evaluate

    def _make_predict(self, read: Callable[[tf.Tensor], Any] | None) -> Any:
        """Returns what a worker does at a step of a prediction."""

        @tf.function
        def predict(step: tf.Tensor, batch: Any) -> tuple[Any, tf.Tensor]:
            batch, num_valid = batch if read is None else read(step)
            x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
            with (
                tf.distribute.ReplicaContext(self._strategy, 0),
                keras.StatelessScope(self._read_weights()),
            ):
                return self._model(x, training=False), num_valid

        return predict

    def _apply_step(self, place: tf.Tensor, states: Sequence[Any]) -> None:
        """Updates weights, slots and moving statistics, on the parameter servers."""
        optimizer = self._model.optimizer
        by_variable: dict[int, tf.Tensor] = {}
        for shard, places in zip(self._gradients, self._places, strict=True):
            with tf.device(shard.device):
                row = tf.gather(places, place)
            by_variable |= {id(variable): part for variable, part in shard.split(row)}
        variables = [self._trainable[i] for i in self._with_gradient]
        with (
            tf.distribute.ReplicaContext(self._strategy, 0),
            tf.device(self._gradients[0].device),
            gradients_already_reduced(optimizer),
            _gradients_already_clipped(optimizer),
        ):
            optimizer.apply([by_variable[id(variable)] for variable in variables], variables)
        for variable, (old, new, slope) in zip(self._updated, states, strict=True):
            with tf.device(variable.value.device):
                if variable.value.dtype.is_floating:
                    variable.value.assign(new + slope * (variable.value - old))
                else:
                    variable.value.assign_add(new - old)
        assert self._version is not None
        # Last: a worker that reads the new version reads weights that are not older.
        operations = tf.compat.v1.get_default_graph().get_operations()
        with tf.control_dependencies([op for op in operations if op.op_def.is_stateful]):
            self._version.assign_add(1)

    def _add_counts(self, counts: Sequence[tf.Tensor]) -> None:
        for variable, count in zip(self._metric_variables, counts, strict=True):
            variable.value.assign_add(count)


class _Stream:
    """Steps in flight, taken in order.

    Args:
      schedule: (step, batch) -> the step's remote result.
      batches: what the chief reads for the workers; None if they read for themselves.
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

    def take(self) -> tuple[int, int, Any]:
        """Returns the next step's number, its place and its result, once it is there."""
        end = self._find_end(self._taken)
        while len(self._pending) < self._max_in_flight and (end is None or self._next < end):
            try:
                batch = None if self._batches is None else next(self._batches)
            except StopIteration:
                break
            self._pending.append(self._schedule(self._next, batch))
            self._next += 1
        if not self._pending:
            raise StopIteration
        result = self._fetch(self._pending.popleft())
        step = self._taken
        self._taken += 1
        return step, step % self._max_in_flight, result


class _WorkerWatch:
    """Ends a wait for workers that are all gone: TensorFlow 2.21 waits an hour for each.

    Args:
      strategy: whose cluster has the workers' addresses.
    """

    def __init__(self, strategy: tf.distribute.ParameterServerStrategy):
        # The public `cluster_resolver` of TensorFlow 2.21 is None under this strategy.
        cluster = strategy._cluster_resolver.cluster_spec().as_dict()
        self._workers = {f"worker {i}": address for i, address in enumerate(cluster["worker"])}

    def wait(self, is_done: Callable[[float], bool]) -> None:
        """Returns once `is_done`, which takes a time-out in seconds, says so.

        Raises:
          TrainingError: no worker has answered for two minutes.
        """
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


@dataclass(frozen=True)
class _Shard:
    """The variables of one parameter server and dtype, moved as one vector.

    One message instead of one a variable, each way.

    Attributes:
      device: the server.
      dtype: of the variables.
      variables: the variables.
    """

    device: str
    dtype: tf.DType
    variables: tuple[keras.Variable, ...]

    @property
    def size(self) -> int:
        """The number of elements."""
        return sum(_count_elements(variable) for variable in self.variables)

    def read(self) -> list[tuple[keras.Variable, tf.Tensor]]:
        """Returns the variables with their values, split where this is called."""
        with tf.device(self.device):
            flat = tf.concat([tf.reshape(v.value.read_value(), [-1]) for v in self.variables], 0)
        return self.split(flat)

    def split(self, flat: tf.Tensor) -> list[tuple[keras.Variable, tf.Tensor]]:
        """Returns the variables with their parts of a vector."""
        parts = tf.split(flat, [_count_elements(variable) for variable in self.variables])
        return [
            (variable, tf.reshape(part, variable.shape))
            for variable, part in zip(self.variables, parts, strict=True)
        ]

    def join(self, values: dict[int, tf.Tensor]) -> tf.Tensor:
        """Returns the vector of values by the variables' ids, zero where there is none."""
        return tf.concat(
            [
                tf.reshape(values[id(v)], [-1])
                if id(v) in values
                else tf.zeros([_count_elements(v)], self.dtype)
                for v in self.variables
            ],
            0,
        )


def _make_shards(variables: Sequence[keras.Variable]) -> list[_Shard]:
    groups: dict[tuple[str, tf.DType], list[keras.Variable]] = {}
    for variable in variables:
        value = variable.value
        groups.setdefault((value.device, value.dtype), []).append(variable)
    return [_Shard(device, dtype, tuple(group)) for (device, dtype), group in groups.items()]


def _count_elements(variable: keras.Variable) -> int:
    return variable.value.shape.num_elements()


def _describe_update(
    old: tf.Tensor, new: tf.Tensor, tape: tf.GradientTape
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns what a layer made of the value it read, so that it can be made of another.

    A moving mean becomes `momentum * old + rest`. Other steps have moved it on by the time
    the update is applied: `new + slope * (current - old)`, with the momentum as the slope, is
    what the layer would have made of the current value.
    """
    slope = tape.gradient(new, old) if old.dtype.is_floating else None
    return old, new, tf.zeros_like(old) if slope is None else slope


def _can_travel(read: Callable[[tf.Tensor], Any] | None) -> bool:
    """Whether workers can run a reader: it needs no Python, and holds little data."""
    if read is None:
        return False
    function = tf.function(read).get_concrete_function(tf.TensorSpec([], tf.int64))
    definition = function.graph.as_graph_def()
    nodes = [*definition.node, *(n for f in definition.library.function for n in f.node_def)]
    if any(node.op in _PYTHON_OPERATIONS for node in nodes):
        return False
    captured = function.captured_inputs
    if any(tensor.dtype in (tf.resource, tf.variant) for tensor in captured):
        return False
    return sum(_count_bytes(tensor) for tensor in captured) <= _MAX_CAPTURED_BYTES


def _count_bytes(tensor: tf.Tensor) -> int:
    if tensor.dtype == tf.string:
        return int(tf.reduce_sum(tf.strings.length(tensor)))
    return int(tf.size(tensor)) * tensor.dtype.size


def _one_pipeline() -> tf.distribute.InputContext:
    return tf.distribute.InputContext()


def _iterate(dataset: tf.data.Dataset) -> Iterator[Any]:
    return iter(dataset)


@contextlib.contextmanager
def _gradients_already_clipped(optimizer: keras.optimizers.Optimizer) -> Iterator[None]:
    """Keeps a Keras optimiser from clipping, while an update is traced: the worker has done it.

    The norm over all gradients would take them off the parameter servers once more.
    """
    optimizer._clip_gradients = lambda gradients: gradients
    try:
        yield
    finally:
        del optimizer._clip_gradients


@contextlib.contextmanager
def _explain_failures() -> Iterator[None]:
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
