"""Runs a model stage by stage, in place of Keras's call of its layers.

The forward and the backward pass of a stage run on the stage's device. With recomputation, the
stage's forward pass runs again once the gradient of its outputs is available, and then its backward
pass; until then, only the tensors between stages stay in memory. The second forward pass repeats
the first one exactly: it starts from the same states and seeds, it uses the values that the first
one reduced over the replicas instead of reducing again, and it updates nothing.

TensorFlow's own `tf.recompute_grad`, which `keras.RematScope` puts around single layers, would
update moving statistics twice, draw different random numbers and reduce over the replicas again.

Source: Chen et al. 2016 (arXiv:1604.06174), section 4, for the recomputation; Huang et al. 2019
(arXiv:1811.06965), section 2.3, for the order of micro-batches.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import keras
import tensorflow as tf

from tfdist.internals import get_autocast_scope, get_keras_mask, record
from tfdist.placement.graph import Graph, Values
from tfdist.placement.groups import find_own_group
from tfdist.placement.stages.cutting import Stage
from tfdist.placement.tracing import (
    Backward,
    add_penalties,
    autocasting,
    call_with_gradient,
    has_gradient,
    intercepting,
    set_mask,
)
from tfdist.replacing import replaced

AllReduce = Callable[..., Any]
"""`tf.distribute.ReplicaContext.all_reduce`."""


class Draws(Protocol):
    """Decides what random layers draw."""

    def mark(self) -> Any:
        """Returns what has been drawn."""

    def again(self, mark: Any) -> contextlib.AbstractContextManager[None]:
        """Draws again what was drawn after a mark."""


class StagedCall:
    """Runs a functional model stage by stage; see `Plan`."""

    def __init__(
        self,
        graph: Graph,
        stages: Sequence[Stage],
        groups: Mapping[str, Sequence[str]],
        *,
        recomputes: bool,
        draws: Draws,
    ):
        self._graph, self._stages, self._groups = graph, stages, groups
        self._recomputes = recomputes
        self._draws = draws
        # MirroredStrategy traces each replica in its own thread; the threads take turns.
        self._of_thread = threading.local()

    @contextlib.contextmanager
    def intercept(self) -> Iterator[None]:
        """Replaces the call of the model. Must be opened around all replicas."""
        with intercepting(self._graph.model, self._run):
            yield

    @contextlib.contextmanager
    def in_order(self, *, is_followed: Callable[[], bool]) -> Iterator[None]:
        """Makes the stages of each device run in the order of their traces, in this thread.

        Args:
          is_followed: whether the backward pass follows right after the forward pass being traced.
        """
        self._of_thread.order, self._of_thread.is_followed = {}, is_followed
        try:
            yield
        finally:
            self._of_thread.order = self._of_thread.is_followed = None

    @property
    def is_pipelined(self) -> bool:
        """Whether stages can run at the same time."""
        return bool(self._groups)

    def find_device(self, stage: int) -> str | None:
        """Returns the device of a stage of this replica; None for the replica's own."""
        if not self._groups:
            return None
        return f"/device:{find_own_group(self._groups)[self._stages[stage].device]}"

    def _run(self, inputs: Sequence[Any], *, training: bool | None, **context: Any) -> list[Any]:
        values: Values = dict(zip(self._graph.inputs, inputs, strict=True))
        if not training:
            for position, stage in enumerate(self._stages):
                with tf.device(self.find_device(position)):
                    for operation in stage.operations:
                        operation.run(values, training=training, **context)
            return [values[number] for number in self._graph.outputs]
        variables = self._graph.variables
        autocast = get_autocast_scope()
        with autocasting(None):
            olds = {id(v): v.value for v in variables}
        run = _Run(values, context, dict(olds), autocast)
        for position in range(len(self._stages)):
            self._run_stage(position, run)
        for variable in variables:
            if run.states[id(variable)] is not olds[id(variable)]:
                variable.assign(run.states[id(variable)])
        add_penalties(self._graph, run.penalties)
        return [run.take(number, len(self._stages)) for number in self._graph.outputs]

    def _run_stage(self, position: int, run: "_Run") -> None:
        """Runs the forward pass of a stage in training."""
        stage = self._stages[position]
        device = self.find_device(position)
        trainable = [v for v in stage.variables if v.trainable]
        others = [v for v in stage.variables if not v.trainable]
        taken = {number: run.take(number, position) for number in stage.inputs}
        masks = {number: get_keras_mask(value) for number, value in taken.items()}
        moving = [number for number, value in taken.items() if has_gradient(value)]
        with tf.device(device):
            states = [(v, tf.convert_to_tensor(run.states[id(v)])) for v in others]
            read = [tf.convert_to_tensor(run.states[id(v)]) for v in trainable]
        mark = self._draws.mark()
        reductions: list[Any] = []
        found: Values = {}
        is_kept = self._is_kept(position)

        def compute(given: Sequence[tf.Tensor], reduce: AllReduce | None) -> tuple[list[Any], Any]:
            local = taken | dict(zip(moving, given, strict=False))
            for number, mask in masks.items():
                set_mask(local[number], mask)
            mapping = [*zip(trainable, given[len(moving) :], strict=True), *states]
            with autocasting(None):  # Keras would cast the values right away
                scope = keras.StatelessScope(mapping, collect_losses=True)
            with autocasting(run.autocast), scope, _reducing_by(reduce):
                for operation in stage.operations:
                    operation.run(local, training=True, **run.context)
            found.update(local)
            outputs = [local[number] for number, _ in stage.outputs]
            return [*filter(has_gradient, outputs), *scope.losses], scope

        def forward(*given: tf.Tensor) -> tuple[list[tf.Tensor], Backward]:
            tape = tf.GradientTape(persistent=True, watch_accessed_variables=False)
            keep = functools.partial(_reduce_and_keep, reductions)
            with self._on(device), tape if is_kept else contextlib.nullcontext():
                copies = [tf.identity(tensor) for tensor in given]
                if is_kept:
                    tape.watch(copies)
                results, scope = compute(copies, None if is_kept else keep)
                # One tensor for each stage that takes it, so that this stage adds their gradients.
                results = [tf.identity(tensor) for tensor in results]
                self._follow(device, results)
            run.states.update({id(v): scope.get_current_value(v) for v in others})

            def backward(*upstream: tf.Tensor | None) -> list[Any]:
                with self._on(device):
                    if is_kept:
                        gradients = _differentiate(tape, results, upstream, copies)
                    else:
                        gradients = again(given, upstream)
                    self._follow(device, [g for g in gradients if g is not None])
                return gradients

            return results, backward

        def again(given: Sequence[tf.Tensor], upstream: Sequence[tf.Tensor | None]) -> list[Any]:
            reduce = functools.partial(_take_reduced, iter(reductions))
            with (
                # Otherwise TensorFlow would merge this with the first forward pass.
                tf.control_dependencies([value for value in upstream if value is not None]),
                tf.GradientTape(watch_accessed_variables=False) as tape,
                self._draws.again(mark),
            ):
                copies = [tf.identity(tensor) for tensor in given]
                tape.watch(copies)
                results, _ = compute(copies, reduce)
            return _differentiate(tape, results, upstream, copies)

        given = [*(taken[number] for number in moving), *read]
        with tf.device(device):  # TensorFlow copies all inputs and results to where it is called
            results = call_with_gradient(forward, *given) if given else forward()[0]
        run.pass_on(stage, found, results)

    def _is_kept(self, position: int) -> bool:
        """Returns whether the activations of a stage stay in memory for its backward pass."""
        if not self._recomputes:
            return True
        # The backward pass begins with the last stage, right after its forward pass.
        is_followed = getattr(self._of_thread, "is_followed", None)
        return position == len(self._stages) - 1 and (is_followed is None or is_followed())

    @contextlib.contextmanager
    def _on(self, device: str | None) -> Iterator[None]:
        """Runs operations on a device, after those that must run there before them."""
        order = getattr(self._of_thread, "order", None) or {}
        with tf.device(device), tf.control_dependencies(order.get(device, [])):
            yield

    def _follow(self, device: str | None, results: Sequence[Any]) -> None:
        """Makes the next operations on a device wait for these results."""
        order = getattr(self._of_thread, "order", None)
        if order is not None:
            order[device] = [*tf.nest.flatten(list(results), expand_composites=True)]


class _Run:
    """One forward pass.

    Attributes:
      states: the values of the model's variables, by id.
      autocast: the scope that decides to which dtype variables are cast, if any.
      passed: (number of a value, stage that takes it) -> the value.
    """

    def __init__(
        self, inputs: Values, context: Mapping[str, Any], states: dict[int, Any], autocast: Any
    ):
        self.inputs = inputs
        self.context = context
        self.states = states
        self.autocast = autocast
        self.passed: dict[tuple[int, int], Any] = {}
        self.penalties: list[tf.Tensor] = []

    def take(self, number: int, stage: int) -> Any:
        """Returns a value for a stage."""
        if (number, stage) in self.passed:
            return self.passed[number, stage]
        return self.inputs[number]

    def pass_on(self, stage: Stage, found: Values, results: Sequence[tf.Tensor]) -> None:
        """Keeps what a stage gives to others: results with a gradient, then its penalties."""
        left = iter(results)
        for number, taker in stage.outputs:
            value = next(left) if has_gradient(found[number]) else found[number]
            set_mask(value, get_keras_mask(found[number]))
            self.passed[number, taker] = value
        self.penalties += left


def _differentiate(
    tape: tf.GradientTape,
    results: Sequence[tf.Tensor],
    upstream: Sequence[tf.Tensor | None],
    sources: Sequence[tf.Tensor],
) -> list[Any]:
    """Returns the gradients of the sources, from those of the results that have one."""
    pairs = zip(results, upstream, strict=True)
    found = [(result, value) for result, value in pairs if value is not None]
    return tape.gradient([r for r, _ in found], sources, [value for _, value in found])


@contextlib.contextmanager
def _reducing_by(all_reduce: AllReduce | None) -> Iterator[None]:
    """Makes this replica's layers call another `all_reduce`, which is given the real one first."""
    if all_reduce is None:
        yield
        return
    context = tf.distribute.get_replica_context()
    reduce = functools.partial(all_reduce, context.all_reduce)
    with replaced(context, "all_reduce", reduce):
        yield


def _reduce_and_keep(
    kept: list[Any],
    all_reduce: AllReduce,
    reduce_op: tf.distribute.ReduceOp,
    value: tf.Tensor | tf.IndexedSlices,
    options: tf.distribute.experimental.CommunicationOptions | None = None,
) -> Any:
    kept.append(all_reduce(reduce_op, value, options))
    return kept[-1]


def _take_reduced(
    kept: Iterator[Any],
    all_reduce: AllReduce,
    reduce_op: tf.distribute.ReduceOp,
    value: tf.Tensor | tf.IndexedSlices,
    options: tf.distribute.experimental.CommunicationOptions | None = None,
) -> Any:
    """Returns the earlier result of reducing a value; the gradient is reduced as usual.

    Only the tape links the two, so operations that only led to the value are not computed.
    """
    reduced = [tf.identity(tensor) for tensor in tf.nest.flatten(next(kept))]

    def differentiate(*upstream: tf.Tensor) -> list[tf.Tensor]:
        return all_reduce(reduce_op, list(upstream), options)

    record.record_operation("AllReduce", reduced, tf.nest.flatten(value), differentiate)
    return tf.nest.pack_sequence_as(value, reduced)
