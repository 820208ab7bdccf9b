"""The steps under ParameterServerStrategy: workers compute, the chief applies.

A worker takes a step's number and a place for its gradient. It reads the weights from the
parameter servers, computes the gradient of that step's global batch, leaves it in the place, on
the servers that hold the weights, and returns some numbers. It changes nothing else, so that a
step whose worker dies is simply computed again by another one.

The chief applies the gradients, one step after the other: it starts the servers' part of the
optimizer, through which no gradient passes the chief itself. So every step is applied exactly
once, at its own count of the learning-rate schedule, optimizer slots and moving statistics
are updated as on one device, and the model can be saved between any two steps.

Workers do not wait for one another: `max_in_flight` steps are given out ahead of the last one
that was applied. That bounds the staleness, the number of updates between a step's reading of
the weights and its own update, by `max_in_flight - 1`.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.errors import TfdistError
from tfdist.training.coordination import Coordination, StepStream, explain_lost_server
from tfdist.training.feed import Feed
from tfdist.training.gradient_places import GradientPlaces
from tfdist.training.randomness import count_draws, list_seed_generators
from tfdist.training.replica_metrics import flatten_logs, is_sum
from tfdist.training.replica_optimizers import (
    count_without_gradient,
    gradients_already_reduced,
    scale_gradient,
)
from tfdist.training.served_batches import can_travel, iterate, make_reader, read_training
from tfdist.training.synchronous import to_numbers
from tfdist.training.training_steps import Trained, TrainingSteps
from tfdist.training.worker_steps import WorkerSteps


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
        self._trainable = list(model.trainable_variables)
        self._generators = list_seed_generators(model)
        metrics = _list_metrics(model)
        self._metric_variables = [variable for m in metrics for variable in m.variables]
        self._places = GradientPlaces(self._trainable, self.max_in_flight)
        self._worker = WorkerSteps(
            model, strategy, counted=self._metric_variables, places=self._places
        )
        self._draws: list[int] = []
        self._num_empty = 0  # steps since the stream began
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
        self._worker.set_version(start_step)
        self._places.clear()
        read = feed.read_train if can_travel(feed.read_train) else None
        self._draws = self._count_draws(feed)
        self._num_empty = 0
        read_seeds = self._make_read_seeds(start_step)
        compute = self._worker.make_compute(make_reader(feed, read), read_seeds)

        def schedule(step: int, batch: Any) -> Any:
            ticket = self._places.give_out()
            places = self._places.find(ticket)
            # Where steps found no data, workers are sent their batches, and only draw by the step.
            step = tf.constant(step + self._num_empty, tf.int64)
            return self._coordination.schedule(compute, step, ticket, places, batch)

        return StepStream(
            schedule,
            batches=None if read else read_training(feed, start_step, total_steps),
            start_step=start_step,
            max_in_flight=self.max_in_flight,
            find_end=lambda step: min((step // steps_per_epoch + 1) * steps_per_epoch, total_steps),
            fetch=self._coordination.fetch,
        )

    def iterate_eval(self, feed: Feed, *, steps: int | None = None) -> StepStream:
        """Returns the steps of an evaluation, at most `steps`."""
        return self._iterate_eval(feed, self._worker.make_evaluate, steps)

    def iterate_predict(self, feed: Feed, *, steps: int | None = None) -> StepStream:
        """Returns the steps of a prediction, at most `steps`."""
        return self._iterate_eval(feed, self._worker.make_predict, steps)

    def train(self, stream: StepStream, num_steps: int = 1) -> list[Trained]:
        """Applies the next step."""
        with explain_lost_server():
            step, result = stream.take()
            ticket = self._places.take_back()
            with self._strategy.scope():
                self._apply(ticket, self._places.find(ticket), result["states"], result["sparse"])
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

    def _iterate_eval(
        self, feed: Feed, make: Callable[[Any], Any], steps: int | None
    ) -> StepStream:
        read = feed.read_eval if can_travel(feed.read_eval) else None
        function = make(make_reader(feed, read))
        end = steps if read is None else min(filter(None, (steps, feed.num_steps)))
        return StepStream(
            lambda step, batch: self._coordination.schedule(
                function, tf.constant(step, tf.int64), batch
            ),
            batches=None if read else iterate(feed.make_eval(tf.distribute.InputContext())),
            start_step=0,
            max_in_flight=self.max_in_flight,
            find_end=lambda step: end,
            fetch=self._coordination.fetch,
        )

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

    def _apply_step(
        self,
        ticket: tf.Tensor,
        places: Sequence[tf.Tensor],
        states: Sequence[Any],
        sparse: dict[str, Any],
    ) -> None:
        """Updates weights, slots and moving statistics, on the parameter servers."""
        optimizer = self._model.optimizer
        by_variable = self._places.read(places, ticket)
        for index, (values, indices) in sparse.items():
            variable = self._trainable[int(index)]
            by_variable[id(variable)] = tf.IndexedSlices(
                values, indices, tf.constant(list(variable.shape), tf.int64)
            )
        variables = [self._trainable[i] for i in self._worker.with_gradient]
        with (
            tf.distribute.ReplicaContext(self._strategy, 0),
            tf.device(self._places.device),
            gradients_already_reduced(),
            _gradients_already_clipped(optimizer),
        ):
            # What Keras divides by is no part of these gradients.
            scale = optimizer.loss_scale_factor or 1.0
            gradients = [scale_gradient(by_variable[id(v)], scale) for v in variables]
            optimizer.apply(gradients, variables)
        for variable, (old, new, slope) in zip(self._worker.updated, states, strict=True):
            with tf.device(variable.value.device):
                if variable.value.dtype.is_floating:
                    variable.value.assign(new + slope * (variable.value - old))
                else:
                    variable.value.assign_add(new - old)
        # Last: a worker that reads the new version reads weights that are not older.
        operations = tf.compat.v1.get_default_graph().get_operations()
        with tf.control_dependencies([op for op in operations if op.op_def.is_stateful]):
            self._worker.version.assign_add(1)

    def _count_empty_step(self) -> None:
        with (
            tf.distribute.ReplicaContext(self._strategy, 0),
            tf.device(self._places.device),
        ):
            count_without_gradient(self._model)

    def _add_counts(self, counts: Sequence[tf.Tensor]) -> None:
        for variable, count in zip(self._metric_variables, counts, strict=True):
            variable.value.assign_add(count)


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


@contextlib.contextmanager
def _gradients_already_clipped(optimizer: keras.optimizers.Optimizer) -> Iterator[None]:
    """Keeps a Keras optimizer from clipping, while an update is traced: the worker has done it.

    The norm over all gradients would take them off the parameter servers once more.
    """
    optimizer._clip_gradients = lambda gradients: gradients
    try:
        yield
    finally:
        del optimizer._clip_gradients
