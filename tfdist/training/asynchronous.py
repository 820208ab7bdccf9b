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
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.errors import TfdistError
from tfdist.training.coordination import Coordination, StepStream, explain_lost_server
from tfdist.training.feed import Feed
from tfdist.training.randomness import RowDraws, count_draws, list_seed_generators
from tfdist.training.replica_metrics import flatten_logs, is_sum
from tfdist.training.replica_optimizers import (
    count_without_gradient,
    gradients_already_reduced,
    scale_gradient,
)
from tfdist.training.shards import Shard, make_shards
from tfdist.training.synchronous import to_numbers
from tfdist.training.training_steps import Trained, TrainingSteps

# What a function holds is sent to a worker with each call.
_MAX_CAPTURED_BYTES = 1 << 20
_PYTHON_OPERATIONS = {"PyFunc", "PyFuncStateless", "EagerPyFunc"}


class AsynchronousSteps(TrainingSteps):
    """What a trainer does under ParameterServerStrategy instead of `tfdist.training.step`.

    Args:
      model: a compiled and built model, made in the strategy's scope.
      strategy: the strategy.
      max_in_flight: steps given out at a time; 0 for one a worker. With 1 the result is that
        of one device.

    Raises:
      TfdistError: `max_in_flight` is negative, or a metric's variables do not add up.
    """

    passes_on = True

    def __init__(
        self,
        model: keras.Model,
        strategy: tf.distribute.ParameterServerStrategy,
        *,
        max_in_flight: int = 0,
    ):
        if max_in_flight < 0:
            raise TfdistError(
                f"`max_in_flight={max_in_flight}` is negative. Give 1 or more, or 0: one a worker."
            )
        super().__init__(model)
        self._strategy = strategy
        self._coordination = Coordination(strategy)
        self.max_in_flight = max_in_flight or strategy.extended._num_workers
        of_metrics = {id(variable) for variable in model.metrics_variables}
        self._trainable = list(model.trainable_variables)
        trainable = {id(variable) for variable in self._trainable}
        self._others = [v for v in model.variables if id(v) not in of_metrics | trainable]
        self._generators = list_seed_generators(model)
        metrics = _list_metrics(model)
        self._metric_variables = [variable for m in metrics for variable in m.variables]
        self._weights = make_shards([*self._trainable, *self._others])
        self._gradients = make_shards(self._trainable)
        # [shard][place] -> where a gradient in flight is put, beside the weights.
        self._places: list[list[tf.Tensor]] = []
        self._ticket = 0
        self._given: collections.deque[tf.Tensor] = collections.deque()
        self._version: tf.Variable | None = None
        self._draws: list[int] = []
        self._num_empty = 0  # steps since the stream began
        # Known once a worker's step is traced.
        self._with_gradient: list[int] = []
        self._updated: list[keras.Variable] = []
        self._longest_staleness = 0
        self._total_staleness = 0
        self._applied = 0
        self._apply = tf.function(self._apply_step, autograph=False, reduce_retracing=True)
        self._add = tf.function(self._add_counts)
        self._count_empty = tf.function(self._count_empty_step, autograph=False)
        self._read_logs = tf.function(model.get_metrics_result, autograph=False)

    def iterate_train(
        self, feed: Feed, *, start_step: int, steps_per_epoch: int, total_steps: int
    ) -> StepStream:
        """Returns the training steps from `start_step` on, given out up to an epoch's end."""
        if not self._trainable:
            raise TfdistError(
                f"{type(self._strategy).__name__} cannot train {self._model.name!r}, which has no "
                "trainable weights. Take another strategy."
            )
        self._make_places()
        assert self._version is not None
        self._version.assign(start_step)
        self._clear_places()
        read = feed.read_train if _can_travel(feed.read_train) else None
        self._draws = self._count_draws(feed)
        self._num_empty = 0
        read_seeds = self._make_read_seeds(start_step)
        compute = self._make_compute(_make_reader(feed, read), read_seeds)

        def schedule(step: int, batch: Any) -> Any:
            ticket = tf.constant(self._ticket, tf.int64)
            self._ticket += 1
            self._given.append(ticket)
            places = self._find_places(ticket)
            # Where steps found no data, workers are sent their batches, and only draw by the step.
            step = tf.constant(step + self._num_empty, tf.int64)
            return self._coordination.schedule(compute, step, ticket, places, batch)

        return StepStream(
            schedule,
            batches=None if read else _make_batches(feed, start_step, total_steps),
            start_step=start_step,
            max_in_flight=self.max_in_flight,
            find_end=lambda step: min((step // steps_per_epoch + 1) * steps_per_epoch, total_steps),
            fetch=self._coordination.fetch,
        )

    def iterate_eval(self, feed: Feed, *, steps: int | None = None) -> StepStream:
        """Returns the steps of an evaluation, at most `steps`."""
        return self._iterate_eval(feed, self._make_evaluate, steps)

    def iterate_predict(self, feed: Feed, *, steps: int | None = None) -> StepStream:
        """Returns the steps of a prediction, at most `steps`."""
        return self._iterate_eval(feed, self._make_predict, steps)

    def train(self, stream: StepStream, num_steps: int = 1) -> list[Trained]:
        """Applies the next step."""
        with explain_lost_server():
            step, result = stream.take()
            ticket = self._given.popleft()
            with self._strategy.scope():
                self._apply(ticket, self._find_places(ticket), result["states"], result["sparse"])
                self._add(result["counts"])
        staleness = step - int(result["version"])
        self._longest_staleness = max(self._longest_staleness, staleness)
        self._total_staleness += staleness
        self._applied += 1
        return [Trained({"loss": float(result["loss"])})]

    def count_empty_step(self) -> None:
        """Does what Keras's step does that finds no data left: all of it that needs none."""
        self._num_empty += 1
        with explain_lost_server(), self._strategy.scope():
            self._count_empty()
            for generator, count in zip(self._generators, self._draws, strict=True):
                generator.state.assign_add(tf.constant([0, count], generator.state.dtype))

    def evaluate(self, stream: StepStream) -> dict[str, Any]:
        """Adds the next step of an evaluation to the metrics, and returns the logs.

        Raises:
          StopIteration: there is none left.
        """
        with explain_lost_server():
            _, counts = stream.take()
            self._add(counts)
            return to_numbers(flatten_logs(self._read_logs()))

    def predict(self, stream: StepStream) -> list[tuple[Any, bool]]:
        """Returns the outputs of the next step.

        Raises:
          StopIteration: there is none left.
        """
        with explain_lost_server():
            _, outputs = stream.take()
        return [(outputs, False)]

    def read_training_logs(self, trained: Trained) -> dict[str, Any]:
        """Returns the logs."""
        with explain_lost_server():
            return to_numbers(flatten_logs(self._read_logs()))

    def read_metrics(self) -> list[np.ndarray]:
        """Returns the values of the metrics' variables."""
        with explain_lost_server():
            return [variable.numpy() for variable in self._metric_variables]

    def write_metrics(self, values: Sequence[Any]) -> None:
        """Sets the metrics' variables, of which there is one each, to values read before."""
        for variable, value in zip(self._metric_variables, values, strict=True):
            variable.assign(tf.constant(value, variable.dtype, variable.shape))

    def reset_metrics(self) -> None:
        """Forgets what was seen."""
        self._model.reset_metrics()

    def wait(self) -> None:
        """Waits until no step is in flight."""
        self._coordination.wait_for_all()

    def count_traces(self) -> dict[str, int]:
        """Returns how often each step of the chief's was traced."""
        return {
            "apply": self._apply.experimental_get_tracing_count(),
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
        """Creates a place for each gradient in flight, beside the weights.

        A worker that was taken for lost may still write when another one has computed its step. So
        each step has a ticket, and TensorFlow's accumulators drop a gradient whose ticket is older
        than what they wait for.
        """
        if self._version is not None:
            return
        name = uuid.uuid4().hex
        for index, shard in enumerate(self._gradients):
            with tf.device(shard.device):
                self._places.append(
                    [
                        tf.raw_ops.ResourceConditionalAccumulator(
                            dtype=shard.dtype,
                            shape=[shard.size],
                            shared_name=f"{name}-{index}-{place}",
                        )
                        for place in range(self.max_in_flight)
                    ]
                )
        with (
            self._strategy.scope(),
            self._strategy.extended.colocate_vars_with(self._trainable[0].value),
        ):
            self._version = tf.Variable(0, dtype=tf.int64, trainable=False)

    def _find_places(self, ticket: tf.Tensor) -> list[tf.Tensor]:
        return [places[int(ticket) % self.max_in_flight] for places in self._places]

    def _clear_places(self) -> None:
        """Drops what steps have left that were given out and never applied."""
        self._given.clear()
        for shard, places in zip(self._gradients, self._places, strict=True):
            for place in places:
                with tf.device(shard.device):
                    if tf.raw_ops.ResourceAccumulatorNumAccumulated(handle=place):
                        _take_gradient(place, shard)
                    _expect_ticket(place, tf.constant(self._ticket, tf.int64))

    def _iterate_eval(
        self, feed: Feed, make: Callable[[Any], Any], steps: int | None
    ) -> StepStream:
        read = feed.read_eval if _can_travel(feed.read_eval) else None
        function = make(_make_reader(feed, read))
        end = steps if read is None else min(filter(None, (steps, feed.num_steps)))
        return StepStream(
            lambda step, batch: self._coordination.schedule(
                function, tf.constant(step, tf.int64), batch
            ),
            batches=None if read else _iterate(feed.make_eval(_one_pipeline())),
            start_step=0,
            max_in_flight=self.max_in_flight,
            find_end=lambda step: end,
            fetch=self._coordination.fetch,
        )

    def _read_weights(self) -> list[tuple[keras.Variable, tf.Tensor]]:
        return [pair for shard in self._weights for pair in shard.read()]

    def _count_draws(self, feed: Feed) -> list[int]:
        """Returns how far a step moves each generator's state."""
        x_spec, _, _ = keras.utils.unpack_x_y_sample_weight(feed.batch_spec)
        return count_draws(self._model, self._generators, x_spec)

    def _make_read_seeds(self, start_step: int) -> Callable[[tf.Tensor], dict]:
        """Returns a function: step -> the state its random layers start from, by variables' ids.

        What is on the servers is of the last step that was applied, which another one in
        flight may have read as well.
        """
        draws = self._draws
        states = [generator.state for generator in self._generators]
        firsts = [state.numpy() for state in states]

        def read_seeds(step: tf.Tensor) -> dict[int, tf.Tensor]:
            return {
                id(state): first + tf.cast(tf.stack([0, count * (step - start_step)]), state.dtype)
                for state, first, count in zip(states, firsts, draws, strict=True)
            }

        return read_seeds

    def _make_compute(
        self,
        read: Callable[[tf.Tensor, Any], Any],
        read_seeds: Callable[[tf.Tensor], dict[int, tf.Tensor]],
    ) -> Any:
        """Returns what a worker does at a training step."""
        model = self._model
        counted = self._metric_variables

        @tf.function(autograph=False, reduce_retracing=True)
        def compute(
            step: tf.Tensor, ticket: tf.Tensor, places: list[tf.Tensor], batch: Any
        ) -> dict[str, Any]:
            assert self._version is not None
            batch = read(step, batch)
            version = self._version.read_value()
            with tf.control_dependencies([version]):
                mapping = self._read_weights()
            seeds = read_seeds(step)
            mapping = [(variable, seeds.get(id(variable), value)) for variable, value in mapping]
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
                with (
                    _refusing_draws(but=self._generators),
                    keras.StatelessScope(
                        [*mapping, *_make_zeros(counted)], collect_losses=True
                    ) as scope,
                ):
                    loss = _measure(model, batch)
            gradients = tape.gradient(loss, weights)
            for variable, weight in zip(self._trainable, weights, strict=True):
                if scope.get_current_value(variable) is not weight:
                    raise TfdistError(
                        f"Cannot train under ParameterServerStrategy: a layer assigns its own "
                        f"weight {variable.path}, which a worker cannot. Take another strategy."
                    )
            self._with_gradient[:] = [i for i, g in enumerate(gradients) if g is not None]
            # Rows of a table stay apart, as in Keras: an optimizer squares each by itself.
            clipped = model.optimizer._clip_gradients([gradients[i] for i in self._with_gradient])
            found = list(zip(self._with_gradient, clipped, strict=True))
            sparse = {i: g for i, g in found if isinstance(g, tf.IndexedSlices)}
            by_variable = {id(self._trainable[i]): g for i, g in found if i not in sparse}
            for shard, place in zip(self._gradients, places, strict=True):
                row = shard.join(by_variable)
                with tf.device(shard.device):
                    tf.raw_ops.ResourceAccumulatorApplyGradient(
                        handle=place, local_step=ticket, gradient=row
                    )
            news = [(v, old, scope.get_current_value(v)) for v, old in olds]
            changed = [(v, old, new) for v, old, new in news if new is not old]
            self._updated[:] = [variable for variable, _, _ in changed]
            return {
                "loss": loss,
                "version": version,
                "sparse": {str(i): (g.values, g.indices) for i, g in sparse.items()},
                "states": [_describe_update(old, new, state_tape) for _, old, new in changed],
                "counts": [scope.get_current_value(variable) for variable in counted],
            }

        return compute

    def _make_evaluate(self, read: Callable[[tf.Tensor, Any], Any]) -> Any:
        """Returns what a worker does at a step of an evaluation."""
        counted = self._metric_variables

        @tf.function(autograph=False, reduce_retracing=True)
        def evaluate(step: tf.Tensor, batch: Any) -> list[tf.Tensor]:
            batch = read(step, batch)
            mapping = [*self._read_weights(), *_make_zeros(counted)]
            with (
                tf.distribute.ReplicaContext(self._strategy, 0),
                keras.StatelessScope(mapping, collect_losses=True) as scope,
            ):
                self._model.test_step(batch)
            return [scope.get_current_value(variable) for variable in counted]

        return evaluate

    def _make_predict(self, read: Callable[[tf.Tensor, Any], Any]) -> Any:
        """Returns what a worker does at a step of a prediction."""

        @tf.function(autograph=False, reduce_retracing=True)
        def predict(step: tf.Tensor, batch: Any) -> Any:
            batch = read(step, batch)
            with (
                tf.distribute.ReplicaContext(self._strategy, 0),
                keras.StatelessScope(self._read_weights()),
            ):
                return self._model.predict_step(batch)

        return predict

    def _apply_step(
        self,
        ticket: tf.Tensor,
        places: Sequence[tf.Tensor],
        states: Sequence[Any],
        sparse: dict[str, Any],
    ) -> None:
        """Updates weights, slots and moving statistics, on the parameter servers."""
        optimizer = self._model.optimizer
        by_variable: dict[int, tf.Tensor] = {}
        for shard, place in zip(self._gradients, places, strict=True):
            with tf.device(shard.device):
                row = _take_gradient(place, shard)
                _expect_ticket(place, ticket + 1)
            by_variable |= {id(variable): part for variable, part in shard.split(row)}
        for index, (values, indices) in sparse.items():
            variable = self._trainable[int(index)]
            by_variable[id(variable)] = tf.IndexedSlices(
                values, indices, tf.constant(list(variable.shape), tf.int64)
            )
        variables = [self._trainable[i] for i in self._with_gradient]
        with (
            tf.distribute.ReplicaContext(self._strategy, 0),
            tf.device(self._gradients[0].device),
            gradients_already_reduced(),
            _gradients_already_clipped(optimizer),
        ):
            # What Keras divides by is no part of these gradients.
            scale = optimizer.loss_scale_factor or 1.0
            gradients = [scale_gradient(by_variable[id(v)], scale) for v in variables]
            optimizer.apply(gradients, variables)
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

    def _count_empty_step(self) -> None:
        with (
            tf.distribute.ReplicaContext(self._strategy, 0),
            tf.device(self._gradients[0].device),
        ):
            count_without_gradient(self._model)

    def _add_counts(self, counts: Sequence[tf.Tensor]) -> None:
        for variable, count in zip(self._metric_variables, counts, strict=True):
            variable.value.assign_add(count)


def _take_gradient(place: tf.Tensor, shard: Shard) -> tf.Tensor:
    """Returns the gradient of a place, on its server, and leaves none."""
    row = tf.raw_ops.ResourceAccumulatorTakeGradient(
        handle=place, num_required=1, dtype=shard.dtype
    )
    return tf.ensure_shape(row, [shard.size])


def _expect_ticket(place: tf.Tensor, ticket: tf.Tensor) -> None:
    """Lets a place drop gradients of older tickets."""
    tf.raw_ops.ResourceAccumulatorSetGlobalStep(handle=place, new_global_step=ticket)


def _measure(model: keras.Model, batch: Any) -> tf.Tensor:
    """Does what Keras's `train_step` does but for the update, and returns the loss."""
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
    y_pred = model(x, training=True) if model._call_has_training_arg else model(x)
    loss = model._compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=True)
    model._loss_tracker.update_state(loss, sample_weight=tf.shape(keras.tree.flatten(x)[0])[0])
    model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)
    return loss


def _make_zeros(variables: Sequence[keras.Variable]) -> list[tuple[keras.Variable, tf.Tensor]]:
    return [(variable, tf.zeros(variable.shape, variable.dtype)) for variable in variables]


def _list_metrics(model: keras.Model) -> list[keras.metrics.Metric]:
    """Returns a model's metrics.

    Raises:
      TfdistError: what one counts on one worker and on another does not add up.
    """
    metrics = [
        part
        for metric in model.metrics
        for part in (metric.metrics if hasattr(metric, "metrics") else [metric])
    ]
    for metric in metrics:
        if not is_sum(metric):
            raise TfdistError(
                f"Cannot count the metric {metric.name!r} under ParameterServerStrategy: it is no "
                "sum over the rows that workers could add up. Leave it out, or take another "
                "strategy."
            )
    return metrics


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


def _make_reader(
    feed: Feed, read: Callable[[tf.Tensor], Any] | None
) -> Callable[[tf.Tensor, Any], Any]:
    """Returns a function: step and the batch that comes with it -> the step's batch.

    Args:
      feed: whose batches they are.
      read: of a worker that reads them by itself; None where the chief sends them.
    """

    def hide(leaf: Any, spec: Any) -> Any:
        # Keras weighs an output's loss by its rows only where the data's type says how many.
        is_more_known = isinstance(spec, tf.TensorSpec) and leaf.shape != spec.shape
        return (
            tf.raw_ops.PlaceholderWithDefault(input=leaf, shape=spec.shape)
            if is_more_known
            else leaf
        )

    def read_step(step: tf.Tensor, batch: Any) -> Any:
        batch = batch if read is None else read(step)
        return tf.nest.map_structure(hide, batch, feed.batch_spec)

    return read_step


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


def _make_batches(feed: Feed, start_step: int, total_steps: int) -> Iterator[Any]:
    if feed.begins_anew and feed.num_steps is None:
        return _Passes(feed, start_step)
    return _read_passes(feed, start_step, total_steps)


class _Passes:
    """The batches of passes of unknown length: it ends after each, and then goes on."""

    def __init__(self, feed: Feed, start_step: int):
        self._feed = feed
        self._step = start_step
        self._batches: Iterator[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._batches is None:
            step = self._feed.open_train(self._step)
            self._batches = _iterate(self._feed.make_train(_one_pipeline(), step))
        try:
            batch = next(self._batches)
        except StopIteration:
            self._batches = None
            raise
        self._step += 1
        return batch


def _read_passes(feed: Feed, start_step: int, total_steps: int) -> Iterator[Any]:
    """Yields the batches of all passes, each of which begins when Keras would begin it."""
    batches = _iterate(feed.make_train(_one_pipeline(), feed.open_train(start_step)))
    begins = False
    for step in range(start_step, total_steps):
        if begins:
            batches = _iterate(feed.make_train(_one_pipeline(), 0))
        batch = next(batches, None)
        if batch is None:
            return
        begins = feed.is_read(step + 1) and step + 1 < total_steps
        if begins and feed.drops_between:
            feed.drop_pass()
        elif begins:
            batches, begins = _iterate(feed.make_train(_one_pipeline(), 0)), False
        yield batch


def _iterate(dataset: tf.data.Dataset) -> Iterator[Any]:
    return (batch for batch, _ in dataset)


@contextlib.contextmanager
def _refusing_draws(*, but: Sequence[keras.random.SeedGenerator]) -> Iterator[None]:
    """Refuses a step that draws by generators whose state the chief does not move.

    Raises:
      TfdistError: it does.
    """
    draws = RowDraws()
    with draws.watch():
        yield
    known = {id(generator) for generator in but}
    if any(key not in known for key in draws.seen):
        raise TfdistError(
            "Cannot draw under ParameterServerStrategy by a SeedGenerator that no layer of the "
            "model holds: a worker cannot move its state on. Make the layer that draws a part of "
            "the model, or take another strategy."
        )


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
