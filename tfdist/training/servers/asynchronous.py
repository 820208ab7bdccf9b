"""The steps under ParameterServerStrategy: workers compute, the chief applies.

A worker receives the number of a step and a slot for its gradient. It reads the weights from the
parameter servers, computes the gradient of the step's global batch, writes it to the slot, on the
servers that hold the weights, and returns a few numbers. It changes nothing else. If a worker
dies, another one can therefore compute its step again.

The chief applies the gradients, one step after the other. It only starts the update, which runs
on the servers, so no gradient passes through the chief itself, except for the rows of tables. Every
step is applied exactly once, at its own position in the learning-rate schedule; optimizer slots and
moving statistics are updated as on one device; and the model can be saved between any two steps.

Workers do not wait for one another: up to `max_in_flight` steps are scheduled before the chief
has applied them. The staleness of a gradient, which is the number of updates between reading the
weights and applying the gradient, is therefore at most `max_in_flight - 1`.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.aliases import Batch
from tfdist.errors import TfdistError
from tfdist.placement.tables import Tables, send_parts
from tfdist.replacing import replaced
from tfdist.training.inputs.data_adapter import DataAdapter
from tfdist.training.kinds.base import StepLogs, TrainingSteps
from tfdist.training.kinds.synchronous import to_numbers
from tfdist.training.replicas.metrics import (
    add_parts,
    describe_metric,
    flatten_logs,
    is_sum_of_batches,
)
from tfdist.training.replicas.optimizers import (
    gradients_already_reduced,
    list_optimizers,
    make_step_without_gradient,
    scale_gradient,
)
from tfdist.training.servers.batches import (
    PsDraws,
    find_reader,
    iterate_eval,
    iterate_train,
    make_reader,
)
from tfdist.training.servers.coordination import Coordination, StepStream, explain_lost_server
from tfdist.training.servers.gradient_slots import GradientSlots
from tfdist.training.servers.worker_steps import Read, WorkerSteps


class AsynchronousSteps(TrainingSteps):
    """The steps of a trainer under ParameterServerStrategy.

    Args:
      shard_tables_bytes: the size of the smallest table that is divided; 0 if none is.
      max_in_flight: the number of steps in flight; 0 for one per worker. With 1, the result is
        the same as on one device.

    Raises:
      TfdistError: `max_in_flight` is negative, or a metric is not a sum over examples.
    """

    passes_on = True
    needs_even_epochs = True

    def __init__(
        self,
        model: keras.Model,
        strategy: tf.distribute.ParameterServerStrategy,
        *,
        shard_tables_bytes: int = 0,
        max_in_flight: int = 0,
        check_trace: Callable[[Any], None] = lambda graph: None,
        fused_layers: bool = False,
    ):
        if max_in_flight < 0:
            raise TfdistError(
                f"`max_in_flight={max_in_flight}` is negative. Give 1 or more; 0: one per worker."
            )
        super().__init__(model)
        self._strategy = strategy
        self._coordination = Coordination(strategy)
        self.max_in_flight = max_in_flight or strategy.extended._num_workers
        self._trainable = list(model.trainable_variables)
        self._draws = PsDraws(model)
        metrics = _list_metrics(model)
        self._metric_variables = [variable for m in metrics for variable in m.variables]
        self._slots = GradientSlots(self._trainable, self.max_in_flight)
        optimizers = list_optimizers(model)
        self._tables = Tables(model, optimizers, min_bytes=shard_tables_bytes)
        self._worker = WorkerSteps(
            model,
            strategy,
            counted=self._metric_variables,
            slots=self._slots,
            tables=self._tables,
            generators=self._draws.generators,
            check_trace=check_trace,
            fused_layers=fused_layers,
        )
        self._made: dict[Any, Any] = {}
        self._longest_staleness = 0
        self._total_staleness = 0
        self._applied = 0
        self._apply = tf.function(self._apply_step, autograph=False, reduce_retracing=True)
        self._add = tf.function(self._add_counts)
        self._count_empty = tf.function(self._count_empty_step, autograph=False)
        self._read_logs = tf.function(model.get_metrics_result, autograph=False)

    def iterate_train(
        self, adapter: DataAdapter, *, start_step: int, steps_per_epoch: int, total_steps: int
    ) -> StepStream:
        """Returns the training steps from `start_step` on, scheduled one epoch at a time."""
        if not self._trainable:
            raise TfdistError(
                f"{type(self._strategy).__name__} cannot train {self._model.name!r}, which has no "
                "trainable weights. Use another strategy."
            )
        self._worker.set_version(start_step)
        self._slots.clear()
        read = find_reader(adapter, adapter.read_train)
        self._draws.begin("train", adapter.batch_spec, start_step)
        compute = self._make(self._worker.make_compute, adapter, read)

        def schedule(step: int, batch: Batch) -> Any:
            ticket = self._slots.give_out()
            slots = self._slots.find(ticket)
            seeds = self._draws.read("train", step)
            step = tf.constant(step, tf.int64)
            return self._coordination.schedule(compute, step, seeds, ticket, slots, batch)

        return StepStream(
            schedule,
            batches=None if read else iterate_train(adapter, start_step, total_steps),
            start_step=start_step,
            max_in_flight=self.max_in_flight,
            find_end=lambda step: min((step // steps_per_epoch + 1) * steps_per_epoch, total_steps),
            fetch=self._coordination.fetch,
        )

    def iterate_eval(self, adapter: DataAdapter, *, steps: int | None = None) -> StepStream:
        """Returns the steps of an evaluation, at most `steps`."""
        return self._iterate_eval(adapter, "test", self._worker.make_evaluate, steps)

    def iterate_predict(self, adapter: DataAdapter, *, steps: int | None = None) -> StepStream:
        """Returns the steps of a prediction, at most `steps`."""
        return self._iterate_eval(adapter, "predict", self._worker.make_predict, steps)

    def start(self, stream: StepStream, num_steps: int = 1) -> Callable[[], list[StepLogs]]:
        """Applies the next step."""
        with explain_lost_server():
            step, result = stream.take()
            ticket = self._slots.take_back()
            with self._strategy.scope():
                self._apply(ticket, self._slots.find(ticket), result["states"], result["sparse"])
                self._add(result["counts"])
        self._draws.take("train")
        staleness = step - int(result["version"])
        self._longest_staleness = max(self._longest_staleness, staleness)
        self._total_staleness += staleness
        self._applied += 1
        found = [StepLogs({"loss": float(result["loss"])})]
        return lambda: found

    def count_empty_step(self) -> None:
        """Runs the no-op step that Keras runs after the data have ended."""
        with explain_lost_server(), self._strategy.scope():
            self._count_empty()
            self._draws.count("train")

    def start_evaluation(self, stream: StepStream) -> Callable[[], dict[str, Any]]:
        """Adds the next step of an evaluation to the metrics; returns a function for the logs.

        Raises:
          StopIteration: no step is left.
        """
        with explain_lost_server():
            _, counts = stream.take()
            self._draws.take("test")
            self._add(counts)
            logs = to_numbers(flatten_logs(self._read_logs()))
        return lambda: logs

    def start_prediction(self, stream: StepStream) -> Callable[[], list[tuple[Any, bool]]]:
        """Returns a function for the outputs of the next step.

        Raises:
          StopIteration: no step is left.
        """
        with explain_lost_server():
            _, outputs = stream.take()
            self._draws.take("predict")
        return lambda: [(outputs, False)]

    def read_training_logs(self, trained: StepLogs) -> dict[str, Any]:
        """Returns the logs."""
        with explain_lost_server():
            return to_numbers(flatten_logs(self._read_logs()))

    def read_states(self) -> list[np.ndarray]:
        """Returns the values of the metrics' variables, [1, ...]."""
        with explain_lost_server():
            return [variable.numpy()[None] for variable in self._metric_variables]

    def write_states(self, states: Sequence[Any]) -> None:
        """Sets the metrics' variables to what `read_states` returned, of any number of parts."""
        for variable, parts in zip(self._metric_variables, states, strict=True):
            variable.assign(add_parts(tf.constant(parts, variable.dtype)))

    def reset_metrics(self) -> None:
        """Resets the metrics."""
        self._model.reset_metrics()

    def wait(self) -> None:
        """Waits until no step is in flight."""
        self._coordination.wait_for_all()

    def count_traces(self) -> dict[str, int]:
        """Returns how often each of the chief's steps was traced."""
        return {"apply": self._apply.experimental_get_tracing_count()}

    def summarize(self) -> dict[str, Any]:
        """Returns statistics over all steps of this process, for the summary of a run."""
        return {
            "workers": self._strategy.extended._num_workers,
            "max_in_flight": self.max_in_flight,
            "updates": int(self._model.optimizer.iterations.numpy()),
            "staleness_mean": self._total_staleness / max(self._applied, 1),
            "staleness_max": self._longest_staleness,
        }

    def _iterate_eval(
        self, adapter: DataAdapter, kind: str, make: Callable[[Any], Any], steps: int | None
    ) -> StepStream:
        self._draws.begin(kind, adapter.batch_spec, 0)
        read = find_reader(adapter, adapter.read_eval)
        function = self._make(make, adapter, read)
        end = steps if read is None else min(filter(None, (steps, adapter.num_steps)))
        return StepStream(
            lambda step, batch: self._coordination.schedule(
                function, tf.constant(step, tf.int64), self._draws.read(kind, step), batch
            ),
            batches=None if read else iterate_eval(adapter),
            start_step=0,
            max_in_flight=self.max_in_flight,
            find_end=lambda step: end,
            fetch=self._coordination.fetch,
        )

    def _make(
        self,
        make: Callable[[Read], Any],
        adapter: DataAdapter,
        read: Callable[[tf.Tensor], Any] | None,
    ) -> Any:
        """Returns the workers' function of a kind of step: that of an earlier call if it fits."""
        if read is not None:
            return make(make_reader(adapter, read))
        key = make, repr(adapter.batch_spec)
        if key not in self._made:
            self._made[key] = make(make_reader(adapter, None))
        return self._made[key]

    def _apply_step(
        self,
        ticket: tf.Tensor,
        slots: Sequence[tf.Tensor],
        states: Sequence[Any],
        sparse: dict[str, Any],
    ) -> None:
        """Updates the weights, slots and moving statistics on the parameter servers."""
        optimizer = self._model.optimizer
        by_variable = self._slots.read(slots, ticket)
        for index, (values, indices) in sparse.items():
            variable = self._trainable[int(index)]
            slices = tf.IndexedSlices(values, indices, tf.constant(list(variable.shape), tf.int64))
            by_variable[id(variable)] = send_parts(slices, variable)
        variables = [self._trainable[i] for i in self._worker.with_gradient]
        with (
            tf.distribute.ReplicaContext(self._strategy, 0),
            tf.device(self._slots.device),
            self._tables.updating(self._strategy),
            gradients_already_reduced(),
            _gradients_already_clipped(optimizer),
        ):
            # Keras divides gradients by this factor, but the worker did not scale its loss by it.
            gradients = [by_variable[id(v)] for v in variables]
            if scale := optimizer.loss_scale_factor:
                gradients = [scale_gradient(gradient, scale) for gradient in gradients]
            optimizer.apply(gradients, variables)
        for shard, rows in zip(self._worker.updated, states, strict=True):
            with tf.device(shard.device):
                olds, news, slopes = (shard.split(row) for row in tf.unstack(rows))
                for (variable, old), (_, new), (_, slope) in zip(olds, news, slopes, strict=True):
                    if variable.value.dtype.is_floating:
                        variable.value.assign(new + slope * (variable.value - old))
                    else:
                        variable.value.assign_add(new - old)
        # Last, so that a worker that reads the new version never reads older weights.
        operations = tf.compat.v1.get_default_graph().get_operations()
        with tf.control_dependencies([op for op in operations if op.op_def.is_stateful]):
            self._worker.version.assign_add(1)

    def _count_empty_step(self) -> None:
        with (
            tf.distribute.ReplicaContext(self._strategy, 0),
            tf.device(self._slots.device),
            self._tables.updating(self._strategy),
        ):
            make_step_without_gradient(self._model, self._strategy)()

    def _add_counts(self, counts: Sequence[tf.Tensor]) -> None:
        for shard, row in zip(self._worker.counted, counts, strict=True):
            with tf.device(shard.device):
                for variable, count in shard.split(row):
                    variable.value.assign_add(count)


def _list_metrics(model: keras.Model) -> list[keras.metrics.Metric]:
    """Returns a model's metrics, whose values on workers can be added."""
    metrics = [
        part
        for metric in model.metrics
        for part in (metric.metrics if hasattr(metric, "metrics") else [metric])
    ]
    for metric in metrics:
        if not is_sum_of_batches(metric):
            raise TfdistError(
                f"Cannot compute the metric {describe_metric(metric)} under "
                "ParameterServerStrategy: it is not a sum over examples, so the workers' values "
                "cannot be added. Leave it out, or use another strategy."
            )
    return metrics


@contextlib.contextmanager
def _gradients_already_clipped(optimizer: keras.optimizers.Optimizer) -> Iterator[None]:
    """Stops an optimizer from clipping while an update is traced, because the worker has clipped.

    The norm over all gradients would move them off the parameter servers again.
    """
    with replaced(optimizer, "_clip_gradients", lambda gradients: gradients):
        yield
