"""The steps of a trainer under a synchronous strategy, on one or several workers."""

import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfdist.aliases import Batch, BatchIterator, Nested
from tfdist.internals import canonicalize_function_inputs
from tfdist.placement.optimizer.shards import OptimizerShards
from tfdist.placement.stages.plan import Plan
from tfdist.training.inputs.data_adapter import (
    DataAdapter,
    Given,
    can_give,
    give_parts,
    is_on,
    take_next,
)
from tfdist.training.kinds.base import StepLogs, TrainingSteps
from tfdist.training.replicas.compilation import explain_step_errors
from tfdist.training.replicas.metrics import flatten_logs
from tfdist.training.replicas.optimizers import list_optimizers, make_step_without_gradient
from tfdist.training.replicas.random_layers import count_draws, list_seed_generators
from tfdist.training.replicas.step_checks import overrides
from tfdist.training.step.steps import StepResult, Steps
from tfdist.training.step_options import StepOptions
from tfdist.training.workers.communication import Workers

# More steps in one call would delay signals, and look like a hang.
_MOST_STEPS = 50


class _BoundTrace:
    """The trace of a function, and the tensors of the iterator for which it was found.

    In every call, TensorFlow would look up the trace and take the iterator apart, which takes as
    long as a small step.
    """

    def __init__(self, trace: Any, iterator: BatchIterator, arguments: Sequence[tf.Tensor]):
        self._trace = trace
        bound = canonicalize_function_inputs((iterator, *arguments), {}, trace.function_type)
        tensors = trace.function_type.unpack_inputs(bound)
        self._tensors = tensors[: len(tensors) - len(arguments)]
        # The tensors would keep the batches that the iterator has read ahead.
        self._iterator = weakref.ref(iterator, lambda _: self._tensors.clear())

    def is_of(self, iterator: BatchIterator) -> bool:
        return self._iterator() is iterator

    def __call__(self, *arguments: tf.Tensor) -> Any:
        return self._trace._call_flat([*self._tensors, *arguments], self._trace.captured_inputs)


class SynchronousSteps(TrainingSteps):
    """The steps under a synchronous strategy.

    Args:
      shards: divides the optimizer's state over the replicas, if it is divided.
    """

    def __init__(
        self,
        model: keras.Model,
        strategy: tf.distribute.Strategy,
        workers: Workers,
        options: StepOptions,
        *,
        create_variable: Callable[..., Any],
        plan: Plan | None = None,
        shards: OptimizerShards | None = None,
        is_apart: bool = False,
        check_trace: Callable[[Any], None] = lambda graph: None,
    ):
        super().__init__(model)
        self._check_trace = check_trace
        self.input_s: float | None = 0.0
        self._draws: list[tuple[keras.random.SeedGenerator, np.ndarray, Any]] = []
        self._batch_spec: Any = None
        self._num_trained = 0
        self._copies = HostCopies()
        self._traces: dict[Any, Any] = {}
        self._bound: dict[Any, _BoundTrace] = {}
        self._alike: dict[Any, Any] = {}
        self._strategy = strategy
        self._workers = workers
        self.steps = Steps(
            model,
            strategy,
            options,
            create_variable=create_variable,
            plan=plan,
            shards=shards,
            is_apart=is_apart,
            is_chief=workers.is_chief or not is_apart,
        )
        self._train_loop: Any = None
        # Where workers train apart, the host has work to do at each step.
        self._loop_size = 1 if is_apart else _choose_loop(model, options)
        self._make("train")
        self._make("predict")

    @property
    def most_steps(self) -> int:
        return self._loop_size if self._train_loop and not self.steps.is_eager else 1

    @property
    def state(self) -> list[keras.Variable]:
        """The variables of the model's other optimizers, and of generators that no layer tracks."""
        model = self._model
        known = {id(v) for v in [*model.variables, *_list_variables(model.optimizer)]}
        others = [v for o in list_optimizers(model)[1:] for v in o.variables]
        others += [generator.state for generator in self.steps.generators]
        return [v for v in others if id(v) not in known]

    def _make(self, kind: str) -> None:
        if kind == "predict":
            self._predict = self.steps.make_predict()
        elif kind == "train" and self._loop_size > 1 and not self.steps.is_eager:
            self._train_loop = self.steps.make_train_loop(self._loop_size)

    def remake(self, kind: str) -> bool:
        self._traces.clear()
        self._bound.clear()
        self._alike.clear()
        self.steps.remake(kind)
        self._make(kind)
        return True

    @property
    def shared(self) -> list[keras.Variable]:
        model = self._model
        seeds = [generator.state for generator in list_seed_generators(model)]
        # Learning rates are compared after each step, with a message of their own.
        slots = [
            variable
            for optimizer in list_optimizers(model)
            for variable in optimizer.variables
            if variable.name != "learning_rate"
        ]
        return [*model.weights, *slots, *seeds]

    def keep_prediction(self, last: TrainingSteps) -> None:
        if isinstance(last, SynchronousSteps):
            self._predict = last._predict

    def prepare(self, adapter: DataAdapter) -> None:
        if self.steps.is_eager:
            return
        iterator = self._give(adapter, of_training=True) or adapter.iterate_elements(
            self._strategy, place=self._workers.place_input
        )
        with explain_step_errors(self._model):
            if self._train_loop is None:
                self.steps.train.get_concrete_function(iterator)
            else:
                self._train_loop.get_concrete_function(iterator, tf.constant(1))

    def iterate_train(
        self, adapter: DataAdapter, *, start_step: int, steps_per_epoch: int, total_steps: int
    ) -> Any:
        return self._give(adapter, of_training=True) or adapter.iterate_train(
            self._strategy, start_step=start_step, place=self._workers.place_input
        )

    def begin_epoch(self, adapter: DataAdapter) -> None:
        self._num_trained = 0
        if self.steps.is_divided and not adapter.is_endless:  # a step may find no data
            generators = [*list_seed_generators(self._model), *self.steps.generators]
            self._draws = [(g, g.state.numpy(), 0) for g in generators]
            self._batch_spec = adapter.batch_spec

    def iterate_eval(self, adapter: DataAdapter, *, steps: int | None = None) -> Any:
        return self._give(adapter, of_training=False) or adapter.iterate_eval(
            self._strategy, self._workers.place_input
        )

    def look_ahead(
        self, iterator: BatchIterator, adapter: DataAdapter, *, of_training: bool
    ) -> tuple[Any, Any]:
        iterator = _unwrap(iterator)
        try:
            element = take_next(self._strategy, iterator)
        except (StopIteration, tf.errors.OutOfRangeError):
            return None, iterator
        leaves = [self._strategy.experimental_local_results(t) for t in tf.nest.flatten(element)]
        num_local = max(map(len, leaves))  # a None is not per replica
        leaves = [leaf if len(leaf) == num_local else leaf * num_local for leaf in leaves]
        elements = [tf.nest.pack_sequence_as(element, part) for part in zip(*leaves, strict=True)]
        if isinstance(iterator, Given):
            return self._unite(elements), iterator  # it gives the same again
        first = adapter.iterate_elements(
            self._strategy, elements, of_training=of_training, place=self._workers.place_input
        )
        return self._unite(elements), _LookedAhead(first, iterator)

    @property
    def runs_ahead(self) -> bool:
        is_traced = not self.steps.is_eager
        return is_traced and self._workers.count == 1 and is_on(self._strategy, "GPU")

    def start(self, iterator: BatchIterator, num_steps: int = 1) -> Callable[[], list[StepLogs]]:
        if isinstance(iterator, _LookedAhead):
            first = iterator.take_first()
            reads = [self.start(first, 1)] if first else []
            if left := num_steps - len(reads):
                reads.append(self.start(iterator.rest, left))
            return lambda: [trained for read in reads for trained in read()]
        with explain_step_errors(self._model):
            if self._train_loop is None or isinstance(iterator, (Given, _Alike)):
                found = self._bind(self.steps.train, iterator)()
                copied = self._copy(found)
                self._count(1)
                return lambda: self._read_step(copied())
            step_count = tf.constant(num_steps)
            found = self._bind(self._train_loop, iterator, step_count)(step_count)
            copied = self._copy(found)
            self._count(num_steps)
            return lambda: self._read_loop(copied(), num_steps)

    def _copy(self, found: Any) -> Callable[[], Any]:
        """Returns a function that waits for results, and returns them where they can be read."""
        return self._copies.start(found) if self.runs_ahead else lambda: found

    def _read_step(self, found: StepResult) -> list[StepLogs]:
        self._add_input_s(float(found.waited_s))
        return [StepLogs(to_numbers(found.logs), found.vector, float(found.rows))]

    def _read_loop(self, found: StepResult, num_steps: int) -> list[StepLogs]:
        # One tensor after the other: a slice of a tensor costs more than a small step.
        logs = {name: _to_list(value) for name, value in found.logs.items()}
        vectors, rows = found.vector.numpy(), found.rows.numpy().tolist()
        self._add_input_s(float(np.sum(found.waited_s)))
        return [
            StepLogs(
                {name: values[step] for name, values in logs.items()}, vectors[step], rows[step]
            )
            for step in range(num_steps)
        ]

    def _count(self, num_steps: int) -> None:
        """Counts steps, and learns from the first ones how far each advances the generators."""
        if not self._num_trained:
            self._draws = [
                (generator, began, (generator.state.numpy() - began) // num_steps)
                for generator, began, _ in self._draws
            ]
        self._num_trained += num_steps

    def count_empty_step(self) -> None:
        """Runs the no-op step that Keras runs after the data have ended.

        The optimizer counts the step and decays the weights, and random generators advance. On
        one device, the step itself has done so. A step that runs eagerly, or that XLA compiles,
        does nothing without data.
        """
        if not self.steps.is_divided or self.steps.is_eager or self._model.jit_compile:
            return
        count = make_step_without_gradient(self._model, self._strategy)
        tf.function(lambda: self._strategy.run(count), autograph=False)()
        if not self._num_trained:  # a run that continued right at the end of its first epoch
            generators = list_seed_generators(self._model)
            counts = count_draws(self._model, generators, self._batch_spec)
            self._draws = [
                (generator, generator.state.numpy(), np.array([0, count], "i8"))
                for generator, count in zip(generators, counts, strict=True)
            ]
        with self._strategy.scope():
            for generator, began, each in self._draws:
                # Not added to the current state: the step without data may have drawn already.
                generator.state.assign(began + each * (self._num_trained + 1))

    def start_evaluation(self, iterator: BatchIterator) -> Callable[[], dict[str, Any]]:
        iterator = _unwrap(iterator)
        with explain_step_errors(self._model):
            copied = self._copy(self._bind(self.steps.test, iterator)())
        return lambda: to_numbers(copied().logs)

    def start_prediction(self, iterator: BatchIterator) -> Callable[[], list[tuple[Any, bool]]]:
        iterator, (predict, pack) = _unwrap(iterator), self._predict
        copied = self._copy(self._bind(predict, iterator)())
        return lambda: pack(copied())

    def conclude(self, kind: str, logs: dict[str, Any], *, anew: bool = False) -> dict[str, Any]:
        if not (anew or overrides(self._model, "train_step", "test_step")):
            return logs
        states = zip(self.steps.metrics.list_variables(), self.read_metrics(), strict=True)
        values = [(variable, tf.convert_to_tensor(state)) for variable, state in states]
        with keras.StatelessScope(values):
            results = self._model.get_metrics_result()
            is_same = results.keys() == self.steps.log_names.get(kind)
            return to_numbers(flatten_logs(results)) if is_same else logs

    def read_states(self) -> list[np.ndarray]:
        return [state.numpy() for state in self.steps.read_states()]

    def write_states(self, states: Sequence[Any]) -> None:
        self.steps.write_states(states)

    def reset_metrics(self) -> None:
        self.steps.reset_metrics()

    def _give(self, adapter: DataAdapter, *, of_training: bool) -> Given | None:
        batch = self.read_given(adapter, of_training=of_training)
        return None if batch is None else self._give_parts(batch)

    def read_given(self, adapter: DataAdapter, *, of_training: bool) -> Batch | None:
        """Returns a single batch that needs no dataset; None where there must be one.

        A user's own functions take iterators.
        """
        if not (adapter.with_places and can_give(self._strategy)):
            return None
        return adapter.read_single(of_training=of_training)

    def give(self, batch: Batch, key: Any) -> "_Alike":
        """Returns an iterator over a batch of tensors.

        Args:
          key: stands for the batch's structure, shapes and types; the trace is found by it.
        """
        return _Alike(self._give_parts(batch), key)

    def _give_parts(self, batch: Batch) -> Given:
        return give_parts(
            batch, num_replicas=self._workers.num_replicas, replicas=self._workers.replicas
        )

    def _bind(
        self, function: Any, iterator: BatchIterator, *arguments: tf.Tensor
    ) -> Callable[..., Any]:
        """Returns a function of the arguments that runs the trace for an iterator."""
        if isinstance(iterator, _Alike) and self.steps.is_eager:
            iterator = iterator.given
        if isinstance(iterator, _Alike):
            trace = self._alike.get((function, iterator.key))
            if trace is None:
                trace = self._find_trace(function, iterator.given)
                self._alike[function, iterator.key] = trace
            return functools.partial(trace, iterator.given)
        if self.steps.is_eager or isinstance(iterator, Given):
            return functools.partial(self._find_trace(function, iterator, *arguments), iterator)
        bound = self._bound.get(function)
        if bound is None or not bound.is_of(iterator):
            trace = self._find_trace(function, iterator, *arguments)
            bound = self._bound[function] = _BoundTrace(trace, iterator, arguments)
        return bound

    def _find_trace(self, function: Any, iterator: BatchIterator, *arguments: tf.Tensor) -> Any:
        if self.steps.is_eager:
            return function
        last = self._traces.get(function)
        trace = self._traces[function] = function.get_concrete_function(iterator, *arguments)
        if trace is not last:
            self._check_trace(trace.graph)
        return trace

    def count_traces(self) -> dict[str, int]:
        counts = {}
        for name, function in (
            ("train", self._train_loop or self.steps.train),
            ("evaluate", self.steps.test),
        ):
            count = getattr(function, "experimental_get_tracing_count", None)
            counts[name] = count() if count else 0
        return counts

    def _unite(self, elements: Sequence[Any]) -> Any:
        """Returns the global batch that consists of the elements of all workers' replicas."""
        (batch, place), *others = elements
        replicas = self._strategy.num_replicas_in_sync
        if not isinstance(place, tuple) and int(place[1]) < replicas:
            return batch  # every replica has the whole batch

        def unite(*leaves: Any) -> Any:
            if leaves[0] is None or not leaves[0].shape.rank:
                return leaves[0]
            rows = tf.concat(leaves, 0) if others else leaves[0]
            if self._workers.count == 1:
                return rows
            return tf.constant(self._workers.gather(rows.numpy()))

        return tf.nest.map_structure(unite, *(part for part, _ in elements))

    def _add_input_s(self, seconds: float) -> None:
        self.input_s = (self.input_s or 0.0) + seconds


class _Alike(NamedTuple):
    """A `Given`, and what stands for its structure, shapes and types."""

    given: Given
    key: Any


class _LookedAhead:
    """An iterator whose first element has been taken and is held by another iterator."""

    def __init__(self, first: Any, rest: Any):
        self._first = first
        self.rest = rest

    def take_first(self) -> Any:
        """Returns the iterator over the first element, once; None afterwards."""
        first, self._first = self._first, None
        return first


def _unwrap(iterator: BatchIterator) -> Any:
    """Returns the iterator that gives the next element."""
    if isinstance(iterator, _LookedAhead):
        return iterator.take_first() or iterator.rest
    return iterator


def _choose_loop(model: keras.Model, options: StepOptions) -> int:
    """Returns how many steps one call takes, so that Keras's executions have full calls only."""
    asked = model.steps_per_execution
    own = max(steps for steps in range(1, _MOST_STEPS + 1) if asked % steps == 0)
    return max(options.steps_per_loop, own)


def to_numbers(logs: dict[str, Any]) -> dict[str, Any]:
    """Returns logs as Python numbers, or as NumPy arrays where they are not scalars."""
    return {name: _to_number(value) for name, value in logs.items()}


def _to_number(value: tf.Tensor) -> Any:
    array = np.asarray(value)
    return array.item() if array.ndim == 0 else array


def _to_list(values: tf.Tensor) -> list[Any]:
    """Returns a log of several steps as a number, or an array, for each."""
    array = np.asarray(values)
    return array.tolist() if array.ndim == 1 else list(array)


def _list_variables(optimizer: keras.optimizers.Optimizer | None) -> list[keras.Variable]:
    return list(optimizer.variables) if optimizer is not None else []


class HostCopies:
    """Copies tensors to the host, in a thread of its own.

    TensorFlow starts such a copy after all that the device was told before. If it were requested
    only when a next step has started, it would wait for that, too.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "results")

        @tf.function(autograph=False, reduce_retracing=True)
        def copy(tensors: list[tf.Tensor]) -> list[tf.Tensor]:
            with tf.device("CPU:0"):
                return [tf.identity(t) for t in tensors]

        self._copy = copy

    def start(self, tensors: Nested[tf.Tensor]) -> Callable[[], Any]:
        """Starts to copy a structure of tensors; returns a function that waits for the copy."""
        has_begun = threading.Event()

        def copy() -> list[tf.Tensor]:
            has_begun.set()
            return self._copy(tf.nest.flatten(tensors))

        copied = self._thread.submit(copy)
        has_begun.wait()
        return lambda: tf.nest.pack_sequence_as(tensors, copied.result())
