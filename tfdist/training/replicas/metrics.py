"""Metrics on replicas: every example of a global batch is counted once, by every kind of metric.

A metric whose variables are sums over examples, as Keras's own are, counts each replica's examples
separately; the replicas' variables are added. Any other metric, such as a maximum or a score of
the whole batch, gets the examples of all replicas, on every replica.

The logs that callbacks see are computed from the global state of the metrics. A number that comes
from no metric is the mean over the replicas, weighted by their numbers of examples.
"""

import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.errors import TfdistError
from tfdist.internals import CompileMetrics, MeanMetricWrapper, MetricsList, python_utils
from tfdist.replacing import replaced, wrapped_in_subclasses
from tfdist.strategies.logical_replicas import read_numerics
from tfdist.strategies.registry import find_traits
from tfdist.training.replicas.divisible import is_of_batch
from tfdist.training.replicas.division import Division
from tfdist.training.replicas.reduction import SUM

Logs = dict[str, Any]
_LARGEST_STATES = 1 << 16  # numbers that a checkpoint contains for all replicas


def is_sum(metric: keras.metrics.Metric) -> bool:
    """Returns whether a metric's variables are sums over the examples it has seen.

    Those of Keras's metrics are, except for scores of whole batches such as `keras.losses.dice`. A
    user's metric declares it by `is_sum_over_rows = True`.
    """
    return is_sum_of_batches(metric) and not is_of_batch(metric)


def is_sum_of_batches(metric: keras.metrics.Metric) -> bool:
    """Returns whether a metric's variables are sums over the batches it has seen."""
    if getattr(metric, "is_sum_over_rows", False):
        return True
    if not type(metric).update_state.__module__.startswith("keras.src."):
        return False
    if isinstance(metric, MeanMetricWrapper):
        return getattr(metric._fn, "__module__", "").startswith("keras.src.")
    return True


def describe_metric(metric: keras.metrics.Metric) -> str:
    """Returns a metric's name and class, for error messages: many names are a base class's."""
    return f"{metric.name!r} ({type(metric).__name__})"


def flatten_logs(logs: Logs) -> Logs:
    """Returns logs with nested dictionaries flattened, as Keras passes them to callbacks."""
    flat: Logs = {}
    for name, value in logs.items():
        flat |= flatten_logs(value) if isinstance(value, dict) else {name: value}
    return flat


def add_parts(parts: tf.Tensor) -> tf.Tensor:
    """Returns the sum of the parts of a variable, [replicas, ...]; one part stays as it is."""
    if parts.shape[0] == 1:
        return parts[0]
    return tf.cast(tf.reduce_sum(tf.cast(parts, tf.float64), 0), parts.dtype)


def _all_reduce(parts: list[tf.Tensor], empty: Sequence[int] = (0,)) -> tf.Tensor:
    """Returns the sum over the replicas of float64 parts, or zeros of a shape if there are none."""
    if not parts:
        return tf.zeros(empty, tf.float64)
    return tf.distribute.get_replica_context().all_reduce(SUM, tf.concat(parts, 0))


class ReplicaMetrics:
    """The metrics of a model, updated by several replicas."""

    def __init__(self, model: keras.Model, strategy: tf.distribute.Strategy, division: Division):
        self._model = model
        self._strategy = strategy
        self._division = division
        is_logical = bool(read_numerics(strategy))  # then, each replica has metrics of its own
        self._is_shared = find_traits(strategy).shares_variables and not is_logical
        self._seen: dict[int, keras.metrics.Metric] = {}
        self._inside: set[tf.distribute.ReplicaContext] = set()
        self._results: dict[int, tuple[Any, keras.metrics.Metric, int]] = {}
        self._reduces_results = False
        # Each replica has its own thread; the threads take turns in the middle of a step.
        self._of_thread = threading.local()
        self._plans: dict[str, dict[str, tuple[keras.metrics.Metric, int] | int]] = {}

    def list_metrics(self) -> list[keras.metrics.Metric]:
        """Returns the model's metrics, and others that a traced step has updated, each once."""
        return list((self._find_own() | self._seen).values())

    def list_variables(self) -> list[keras.Variable]:
        """Returns the variables of all metrics, in a fixed order."""
        return [variable for metric in self.list_metrics() for variable in metric.variables]

    @contextlib.contextmanager
    def intercept(self) -> Iterator[None]:
        """Replaces metrics' methods while a step is traced. Must be opened around all replicas."""
        self._results.clear()
        with (
            wrapped_in_subclasses(
                keras.metrics.Metric, update_state=self._wrap_update, result=self._wrap_result
            ),
            replaced(python_utils, "pythonify_logs", lambda logs: flatten_logs(logs or {})),
        ):
            yield

    @contextlib.contextmanager
    def counting(self) -> Iterator[dict[int, tf.Tensor]]:
        """Collects counts, by the variables' ids, instead of adding them to the variables.

        For loops and XLA, within which replicas cannot update shared variables.
        """
        before = self._counts
        counts: dict[int, tf.Tensor] = {}
        self._of_thread.counts = counts
        try:
            yield counts
        finally:
            self._of_thread.counts = before

    def add(self, counts: dict[int, tf.Tensor]) -> None:
        """Adds collected counts to the variables. Must be called in replica context."""
        for variable in self.list_variables():
            if id(variable) in counts:
                self._add(variable, counts[id(variable)])

    def read(
        self, kind: str = "", logs: Logs | None = None, rows: tf.Tensor | None = None
    ) -> tf.Tensor:
        """Returns the metrics' global state, and the other results of a step, as one vector.

        Must be called in replica context. Vectors of workers that train independently can be added.

        Args:
          logs: what the step returned on this replica; None without a step.
          rows: float64 scalar, the number of examples in the global batch.
        """
        parts = self._read_own()
        if logs is not None and rows is not None:
            parts += self._read_values(kind, logs, rows)
        return _all_reduce(parts)

    def reduce_used_results(self) -> bool:
        """Begins to reduce results over the replicas if the last trace computes with some.

        Logs that are results themselves need no sum of their own.

        Returns:
          Whether this is new, so that the step must be traced again.
        """
        used = any(tf.is_tensor(leaf) and _is_used(leaf) for leaf, *_ in self._results.values())
        is_new = used and not self._reduces_results
        self._reduces_results |= used
        return is_new

    def read_states(self) -> list[tf.Tensor]:
        """Returns each replica's part of the variables of `list_variables`: [replicas, ...].

        The parts add up to the global state. If they were large, there is one part, their sum.
        Must be called in replica context.
        """
        count, parts = self._strategy.num_replicas_in_sync, self._read_own()
        if count * sum(part.shape[0] for part in parts) > _LARGEST_STATES:
            rows = [_all_reduce(parts)]
        else:
            own = tf.distribute.get_replica_context().replica_id_in_sync_group
            is_own = tf.equal(tf.range(count), tf.cast(own, tf.int32))
            flat = [tf.where(is_own, p[:, None], tf.zeros([], p.dtype)) for p in parts]
            rows = tf.unstack(_all_reduce(flat, [0, count]), axis=1)
        states = [self.split(row)[0] for row in rows]
        return [tf.stack(values) for values in zip(*states, strict=True)]

    def compute_logs(self, kind: str, vector: tf.Tensor) -> Logs:
        """Returns a traced step's logs for the global batch, as far as a vector contains them."""
        plan = self._plans[kind]
        sources = [source for source in plan.values() if not isinstance(source, int)]
        metrics = {id(metric): metric for metric, _ in sources}
        states, rest = self.split(vector)
        values: list[tf.Tensor] = []
        if len(sources) < len(plan) and rest.shape[0] != 0:
            *sums, rows = tf.unstack(rest, len(plan) - len(sources) + 1)
            values = [tf.cast(total / rows, keras.config.floatx()) for total in sums]
        found = {}
        with keras.StatelessScope(list(zip(self.list_variables(), states, strict=True))):
            for key, metric in metrics.items():
                leaves = keras.tree.flatten(metric.result())
                found[key] = [tf.convert_to_tensor(leaf) for leaf in leaves]
        return {
            name: values[source] if isinstance(source, int) else found[id(source[0])][source[1]]
            for name, source in plan.items()
            if values or not isinstance(source, int)
        }

    def split(self, vector: tf.Tensor) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Returns the value of each of `list_variables`, and the rest of a vector."""
        return _split(vector, self.list_variables())

    def write(self, states: Sequence[tf.Tensor]) -> None:
        """Sets the variables to states that were read, of any number of replicas.

        Must be called in replica context.
        """
        own = tf.distribute.get_replica_context().replica_id_in_sync_group
        values = iter(states)
        for metric in self.list_metrics():
            for variable in metric.variables:
                parts = next(values)
                whole = add_parts(parts)
                if self._is_shared:
                    self._assign_shared(variable, whole)
                elif not is_sum(metric):
                    variable.value.assign(whole)
                elif parts.shape[0] == self._strategy.num_replicas_in_sync:
                    variable.value.assign(parts[own])
                else:
                    is_first = tf.equal(own, 0)
                    variable.value.assign(tf.where(is_first, whole, tf.zeros_like(whole)))

    def reset(self) -> None:
        """Resets all metrics."""
        if self._is_shared:
            self._reset()
        else:
            # In replica context: an assignment from outside is divided among the replicas.
            self._strategy.run(self._reset)

    @property
    def _counts(self) -> dict[int, tf.Tensor] | None:
        return getattr(self._of_thread, "counts", None)

    def _read_own(self, metrics: Iterable[keras.Metric] | None = None) -> list[tf.Tensor]:
        """Returns this replica's part of each variable, flat; the parts add up."""
        own = tf.distribute.get_replica_context().replica_id_in_sync_group
        is_first = tf.equal(own, 0)
        parts = []
        for metric in self.list_metrics() if metrics is None else metrics:
            counts_once = self._is_shared or not is_sum(metric)
            for variable in metric.variables:
                value = tf.cast(tf.convert_to_tensor(variable.value), tf.float64)
                if counts_once or variable.aggregation == "only_first_replica":
                    value = tf.where(is_first, value, tf.zeros_like(value))
                parts.append(tf.reshape(value, [-1]))
        return parts

    def _reset(self) -> None:
        self._model.reset_metrics()
        for metric in self._seen.values():
            metric.reset_state()

    def _find_own(self) -> dict[int, keras.metrics.Metric]:
        """Returns the model's metrics, by their ids."""
        found: dict[int, keras.metrics.Metric] = {}
        for metric in self._model.metrics:
            parts = metric.metrics if isinstance(metric, CompileMetrics) else [metric]
            found |= {id(part): part for part in parts}
        return found

    def _read_values(self, kind: str, logs: Logs, rows: tf.Tensor) -> list[tf.Tensor]:
        """Returns the logs that come from no metric, and records where each log comes from."""
        part = self._division.part
        assert part is not None
        values: list[tf.Tensor] = []
        plan = self._plans[kind] = {}
        for name, leaf in flatten_logs(logs).items():
            _, metric, index = self._results.get(id(leaf), (None, None, 0))
            if metric is not None:
                plan[name] = metric, index
                continue
            plan[name] = len(values)
            self._division.look(f"the log {name!r}", leaf)
            values.append(tf.reduce_mean(tf.cast(leaf, tf.float64)))
        if not values:
            return []
        return [tf.stack([*values, tf.ones([], tf.float64)]) * part.weight * rows]

    def _wrap_update(self, original: Callable[..., Any]) -> Any:
        @functools.wraps(original)
        def update_state(metric: keras.metrics.Metric, *args: Any, **kwargs: Any) -> Any:
            context = tf.distribute.get_replica_context()
            is_container = isinstance(metric, (CompileMetrics, MetricsList))
            if self._division.part is None or is_container or context in self._inside:
                return original(metric, *args, **kwargs)
            if id(metric) not in self._find_own():
                self._seen[id(metric)] = metric
            is_loss = metric is getattr(self._model, "_loss_tracker", None)
            name = "the loss" if is_loss else f"the metric {describe_metric(metric)}"
            for leaf in keras.tree.flatten((args, kwargs)):
                self._division.look(name, leaf)
            self._inside.add(context)
            try:
                update = self._update_sum if is_sum(metric) else self._update_whole
                with self._division.counting():
                    return update(metric, original, args, kwargs)
            finally:
                self._inside.discard(context)

        return update_state

    def _update_sum(
        self,
        metric: keras.Metric,
        original: Callable[..., Any],
        args: Sequence[object],
        kwargs: dict[str, Any],
    ) -> None:
        given = args
        args, kwargs = self._weigh_scalar(metric, args, kwargs)
        # A scalar of a batch counts once per replica, whether the batch is divided or copied.
        is_scalar = args is not given and _is_mean(metric)
        if self._counts is not None or self._is_shared:
            zeros = [(v, tf.zeros(v.shape, v.dtype)) for v in metric.variables]
            with keras.StatelessScope(zeros) as scope:
                original(metric, *args, **kwargs)
            for variable in metric.variables:
                count = scope.get_current_value(variable)
                if self._counts is None and is_scalar:
                    variable.value.assign_add(count)
                elif self._counts is None:
                    self._add(variable, count)
                else:
                    before = self._counts.get(id(variable))
                    self._counts[id(variable)] = count if before is None else before + count
            return
        before = [tf.convert_to_tensor(v.value) for v in metric.variables]
        original(metric, *args, **kwargs)
        counts = tf.logical_or(self._division.is_counted(), is_scalar)
        for variable, old in zip(metric.variables, before, strict=True):
            variable.value.assign(tf.where(counts, tf.convert_to_tensor(variable.value), old))

    def _weigh_scalar(
        self, metric: keras.Metric, args: Sequence[object], kwargs: dict[str, Any]
    ) -> tuple[Any, Any]:
        """Weights a scalar of a batch, such as its loss, by the replica's share of the batch."""
        is_total = type(metric).update_state.__qualname__ == "Sum.update_state"
        if not (_is_mean(metric) or is_total):
            return args, kwargs
        values, *rest = args if args else (kwargs["values"],)
        if (rest and rest[0] is not None) or kwargs.get("sample_weight") is not None:
            return args, kwargs
        values = keras.ops.convert_to_tensor(values)
        if values.shape.rank:
            return args, kwargs
        part = self._division.part
        assert part is not None
        factor = part.mean_scale
        if is_total:
            factor = tf.where(part.is_copy, tf.ones_like(factor), part.weight)
        return (tf.cast(values, tf.float64) * factor,), {}

    def _update_whole(
        self,
        metric: keras.Metric,
        original: Callable[..., Any],
        args: Sequence[object],
        kwargs: dict[str, Any],
    ) -> None:
        if self._counts is not None:
            raise TfdistError(
                f"Cannot compute the metric {describe_metric(metric)} with micro-batches: it is "
                "not a sum over examples. Leave it out, or leave out micro_batches."
            )
        args, kwargs = keras.tree.map_structure(self._division.gather, (tuple(args), dict(kwargs)))
        if not self._is_shared:
            for variable in metric.variables:  # a script reads one of the copies, not their sum
                variable.value._aggregation = tf.VariableAggregation.ONLY_FIRST_REPLICA
            original(metric, *args, **kwargs)
            return
        states = [(v, tf.convert_to_tensor(v.value)) for v in metric.variables]
        with keras.StatelessScope(states) as scope:
            original(metric, *args, **kwargs)
        for variable in metric.variables:
            self._assign_shared(variable, scope.get_current_value(variable))

    def _add(self, variable: keras.Variable, count: tf.Tensor) -> None:
        zeros = tf.zeros_like(count)
        variable.value.assign_add(tf.where(self._division.is_counted(), count, zeros))

    def _assign_shared(self, variable: keras.Variable, value: tf.Tensor) -> None:
        def assign(strategy: tf.distribute.Strategy, value: tf.Tensor) -> None:
            first = strategy.experimental_local_results(value)[0]
            strategy.extended.update(
                variable.value, lambda v, x: v.assign(x), args=(first,), group=False
            )

        tf.distribute.get_replica_context().merge_call(assign, args=(value,))

    def _wrap_result(self, original: Callable[..., Any]) -> Any:
        @functools.wraps(original)
        def result(metric: keras.metrics.Metric) -> Any:
            context = tf.distribute.get_replica_context()
            is_container = isinstance(metric, (CompileMetrics, MetricsList))
            if self._division.part is None or is_container or context in self._inside:
                return original(metric)
            self._inside.add(context)
            try:
                found = self._compute_result(metric, original)
            finally:
                self._inside.discard(context)
            for index, leaf in enumerate(keras.tree.flatten(found)):
                # The leaf is kept, so that no other one can get its id.
                self._results[id(leaf)] = leaf, metric, index
            return found

        return result

    def _compute_result(self, metric: keras.Metric, original: Callable[..., Any]) -> Any:
        if not self._reduces_results or self._counts is not None:
            return original(metric)
        states, _ = _split(_all_reduce(self._read_own([metric])), metric.variables)
        with keras.StatelessScope(list(zip(metric.variables, states, strict=True))):
            return original(metric)


def _split(
    vector: tf.Tensor, variables: Sequence[keras.Variable]
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Returns the values of variables that a vector begins with, and the rest of it."""
    sizes = [int(tf.TensorShape(variable.shape).num_elements()) for variable in variables]
    ends = [0, *itertools.accumulate(sizes)]
    states = [
        tf.cast(tf.reshape(vector[start:end], variable.shape), variable.dtype)
        for variable, start, end in zip(variables, ends[:-1], ends[1:], strict=True)
    ]
    return states, vector[ends[-1] :]


def _is_used(leaf: tf.Tensor) -> bool:
    """Returns whether a tensor of a graph is the input of an operation."""
    return not hasattr(leaf, "numpy") and bool(leaf.consumers())


def _is_mean(metric: keras.metrics.Metric) -> bool:
    return type(metric).update_state.__qualname__ == "Mean.update_state"


@contextlib.contextmanager
def updating_metrics_after(tensors: Sequence[tf.Tensor]) -> Iterator[None]:
    """Makes metrics wait for tensors before they are updated, while a step is traced.

    In the last step of data of unknown length, there are no data, but what needs none is still
    done. The mean of a scalar, such as the loss of a `train_step`, adds 1 to its count then, and
    Keras 3.15 logs this mean for the epoch.
    """

    def wrap(original: Callable[..., Any]) -> Any:
        @functools.wraps(original)
        def update_state(metric: keras.metrics.Metric, *args: Any, **kwargs: Any) -> Any:
            with tf.control_dependencies(list(tensors)):
                return original(metric, *args, **kwargs)

        return update_state

    with wrapped_in_subclasses(keras.metrics.Metric, update_state=wrap):
        yield
