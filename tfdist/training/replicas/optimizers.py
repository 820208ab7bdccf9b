"""Optimizers on replicas: Keras's and the user's see the gradient of the global batch."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.internals import BaseOptimizer, TFOptimizer
from tfdist.placement.shards.divided import flatten_parts
from tfdist.replacing import replaced, wrapped_in_subclasses
from tfdist.training.replicas.batch_share import BatchShare
from tfdist.training.replicas.division import Division
from tfdist.training.replicas.loss_scaling import apply_scaled_gradients
from tfdist.training.replicas.reduction import sum_over_replicas

Gradients = Sequence[tf.Tensor | tf.IndexedSlices | None]
Record = Callable[[Gradients, Sequence[keras.Variable]], None]
"""Receives reduced gradients in place of an optimizer."""


@contextlib.contextmanager
def reducing_optimizers(
    division: Division,
    *,
    is_compressed: bool,
    create_variable: Callable[..., Any],
    record: Record | None = None,
) -> Iterator[None]:
    """Makes optimizers reduce their gradients over the replicas once, while a step is traced.

    The outermost optimizer reduces, and passes reduced gradients to those that it wraps.

    Args:
      record: receives the reduced gradients instead of the optimizers, which then do nothing.
    """
    reducer = _Reducer(division, is_compressed, create_variable, record)
    wraps = {name: functools.partial(reducer.wrap, name) for name in ("apply", "apply_gradients")}
    with (
        wrapped_in_subclasses(BaseOptimizer, **wraps),
        gradients_already_reduced(),
        replaced(BaseOptimizer, "_backend_apply_gradients", _update),
    ):
        yield


@contextlib.contextmanager
def gradients_already_reduced() -> Iterator[None]:
    """Stops Keras's optimizers from summing gradients again while an update is traced.

    Keras 3.15 clips before its own all-reduce, so clipping would act on one replica's part; tfdist
    reduces first. This can be removed once `Optimizer.apply` accepts reduced gradients.
    """
    with replaced(TFOptimizer, "_all_reduce_sum_gradients", lambda _, pairs: list(pairs)):
        yield


@contextlib.contextmanager
def building_optimizers() -> Iterator[None]:
    """Makes optimizers create their variables and do nothing else.

    They do so at the end and not in the step, where Keras allows no variable that starts from a
    number, and would leave half an optimizer.
    """
    found: dict[keras.Optimizer, list[keras.Variable]] = {}

    def build(
        optimizer: keras.Optimizer,
        grads: Sequence[tf.Tensor | None],
        trainable_variables: Sequence[keras.Variable] | None = None,
    ) -> None:
        if trainable_variables is not None and not optimizer.built:
            found.setdefault(optimizer, list(trainable_variables))

    with wrapped_in_subclasses(BaseOptimizer, apply=lambda _: build):
        yield
    for optimizer, variables in found.items():
        optimizer.build(variables)


class _Reducer:
    def __init__(
        self,
        division: Division,
        is_compressed: bool,
        create_variable: Callable[..., Any],
        record: Record | None,
    ):
        self._division = division
        self._is_compressed = is_compressed
        self._create_variable = create_variable
        self._record = record
        self._inside: set[tf.distribute.ReplicaContext] = set()

    def wrap(self, name: str, original: Callable[..., Any]) -> Any:
        @functools.wraps(original)
        def apply(
            optimizer: keras.Optimizer,
            grads: Sequence[tf.Tensor | None],
            trainable_variables: Sequence[keras.Variable] | None = None,
        ) -> Any:
            context = tf.distribute.get_replica_context()
            if self._division.part is None or context in self._inside:
                if name == "apply_gradients":
                    return original(optimizer, grads)
                return original(optimizer, grads, trainable_variables)
            if name == "apply_gradients":
                grads, trainable_variables = zip(*grads, strict=True)
            if trainable_variables is None:
                trainable_variables = optimizer._trainable_variables
            variables = list(trainable_variables)
            self._build(optimizer, variables)
            reduced = self._reduce(list(grads))
            if self._record is not None:
                return self._record(reduced, variables)
            self._inside.add(context)
            try:
                if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
                    return apply_scaled_gradients(optimizer, reduced, variables)
                if name == "apply_gradients":
                    return original(optimizer, zip(reduced, variables, strict=True))
                return original(optimizer, reduced, variables)
            finally:
                self._inside.discard(context)

        return apply

    def _build(self, optimizer: keras.Optimizer, variables: Sequence[keras.Variable]) -> None:
        """Creates an optimizer's variables, which replicas cannot create while being traced."""
        if optimizer.built:
            return

        def build(strategy: tf.distribute.Strategy) -> None:
            with (
                tf.init_scope(),
                strategy.scope(),
                tf.variable_creator_scope(self._create_variable),
            ):
                optimizer.build(list(variables))
                optimizer.built = True

        tf.distribute.get_replica_context().merge_call(build)

    def _reduce(self, grads: Gradients) -> list[Any]:
        part = self._division.part
        assert part is not None
        flat, restore = flatten_parts(grads)
        for gradient in flat:
            own = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
            self._division.look("the gradient", own)
        weighted = [scale_gradient(g, _weigh(g, part)) for g in flat if g is not None]
        # Table rows that do not depend on examples, such as positions, are the same on all
        # replicas. They need a single gradient, as on one device: optimizers square each one.
        is_common = [part.static_rows is None and _has_known_rows(g) for g in weighted]
        parts = [g.values if common else g for g, common in zip(weighted, is_common, strict=True)]
        sums = sum_over_replicas(parts, is_compressed=self._is_compressed)
        whole = iter(
            tf.IndexedSlices(total, g.indices, g.dense_shape) if common else total
            for total, g, common in zip(sums, weighted, is_common, strict=True)
        )
        return restore([None if g is None else next(whole) for g in flat])


def _weigh(gradient: tf.Tensor | tf.IndexedSlices, part: BatchShare) -> tf.Tensor:
    """Returns the weight of a replica's gradient.

    Where every replica has the whole global batch, the first one alone sends rows of tables, so
    that there is a single gradient of each example, as on one device: optimizers square each one.
    """
    if not isinstance(gradient, tf.IndexedSlices):
        return part.weight
    context = tf.distribute.get_replica_context()
    is_first = tf.equal(context.replica_id_in_sync_group, 0)
    return tf.where(part.is_copy, tf.cast(is_first, part.weight.dtype), part.weight)


def _has_known_rows(gradient: tf.Tensor | tf.IndexedSlices) -> bool:
    is_sparse = isinstance(gradient, tf.IndexedSlices)
    return is_sparse and gradient.indices.shape[0] is not None


def scale_gradient(gradient: tf.Tensor | tf.IndexedSlices | None, factor: tf.Tensor) -> Any:
    """Returns a gradient times a number; None stays None."""
    if gradient is None or tf.get_static_value(factor) == 1:
        return gradient
    with tf.device(gradient.device):
        factor = tf.cast(factor, gradient.dtype)
        if isinstance(gradient, tf.IndexedSlices):
            scaled = gradient.values * factor
            return tf.IndexedSlices(scaled, gradient.indices, gradient.dense_shape)
        return gradient * factor


def _update(
    optimizer: keras.Optimizer, grads: Gradients, variables: Sequence[keras.Variable]
) -> None:
    """Updates variables as Keras 3.15 does, but in replica context.

    Keras overwrites the weights with their average, and updates those whose gradients it has
    accumulated, under a condition, where no strategy allows a replica to update a variable.
    """
    if optimizer.gradient_accumulation_steps:
        _accumulate(optimizer, grads, variables)
    else:
        _update_weights(optimizer, grads, variables)
    if not optimizer.use_ema:
        return
    averaged = optimizer._trainable_variables
    optimizer._update_model_variables_moving_average(averaged)
    every = optimizer.ema_overwrite_frequency
    if not every:
        return
    is_due = tf.equal((tf.convert_to_tensor(optimizer.iterations) + 1) % every, 0)

    def overwrite(strategy: tf.distribute.Strategy, is_due: tf.Tensor) -> None:
        for variable, average in zip(
            averaged, optimizer._model_variables_moving_average, strict=True
        ):
            strategy.extended.update(
                variable.value,
                lambda v, a, due: v.assign(tf.where(due, a, v)),
                args=(average.value, is_due),
                group=False,
            )

    tf.distribute.get_replica_context().merge_call(overwrite, args=(is_due,))


def _update_weights(
    optimizer: keras.Optimizer, grads: Gradients, variables: Sequence[keras.Variable]
) -> None:
    if optimizer.clipnorm is None:
        flat, restore = flatten_parts(grads)
        grads = restore(optimizer._clip_gradients(flat))
    else:  # the norm of each whole gradient
        grads = optimizer._clip_gradients(grads)
    optimizer._apply_weight_decay(variables)
    optimizer._backend_update_step(grads, variables, optimizer.learning_rate)


def _accumulate(
    optimizer: keras.Optimizer, grads: Gradients, variables: Sequence[keras.Variable]
) -> None:
    """Adds up the gradients of several steps; in the last one, updates by their mean."""
    steps = optimizer.gradient_accumulation_steps
    is_last = tf.equal((tf.convert_to_tensor(optimizer._iterations) + 1) % steps, 0)
    # Of some variables, this step may have no gradient.
    given = {optimizer._get_variable_index(v): g for v, g in zip(variables, grads, strict=True)}
    held = {i: a for i, a in enumerate(optimizer._accumulated_gradients) if a is not None}
    totals = {
        i: tf.convert_to_tensor(a) + given[i] if i in given else tf.convert_to_tensor(a)
        for i, a in held.items()
    }

    def update(
        strategy: tf.distribute.Strategy, is_last: tf.Tensor, totals: dict[int, tf.Tensor]
    ) -> None:
        now = strategy.experimental_local_results(is_last)[0]

        def update_weights(totals: dict[int, tf.Tensor]) -> None:
            means = [totals[i] / steps for i in given]
            _update_weights(optimizer, means, variables)

        def update_all() -> tf.Tensor:
            strategy.extended.call_for_each_replica(update_weights, args=(totals,))
            return now

        tf.cond(now, update_all, lambda: now)
        for i, accumulator in held.items():
            strategy.extended.update(
                accumulator.value,
                lambda v, total, ends: v.assign(tf.where(ends, tf.zeros_like(total), total)),
                args=(totals[i], is_last),
                group=False,
            )

    tf.distribute.get_replica_context().merge_call(update, args=(is_last, totals))


def list_optimizers(model: keras.Model) -> list[BaseOptimizer]:
    """Returns the optimizers that a model holds, each once, the compiled one first.

    Optimizers that another one wraps are not listed.
    """
    held = [getattr(model, "optimizer", None), *vars(model).values()]  # None before compile
    leaves = [leaf for value in held for leaf in _iterate(value)]
    return list({id(o): o for o in leaves if isinstance(o, BaseOptimizer)}.values())


def make_step_without_gradient(
    model: keras.Model, strategy: tf.distribute.Strategy
) -> Callable[[], None]:
    """Returns what a model's optimizers do on a replica in a step that has no gradient.

    They count the step and decay the weights. Those that accumulate gradients decay only in the
    last step of a sum, which then begins anew, and do not count if their update reads the count.
    """
    parts = [
        part
        for optimizer in list_optimizers(model)
        for part in getattr(optimizer, "optimizers", [optimizer])
        # An optimizer that scales the loss does nothing before it has checked the gradients.
        if part.built and not isinstance(part, keras.optimizers.LossScaleOptimizer)
    ]
    accumulating = [part for part in parts if part.gradient_accumulation_steps]
    waiting = [part for part in accumulating if _reads_count(part, strategy)]
    unfinished = [
        part
        for part in accumulating
        if (int(part._iterations.numpy()) + 1) % part.gradient_accumulation_steps
    ]

    def count() -> None:
        for part in parts:
            if part not in unfinished:
                part._apply_weight_decay(part._trainable_variables)
                if part in accumulating:
                    part._backend_reset_gradient_accumulators()
            if part not in waiting:
                part._iterations.assign_add(1)

    return count


def _reads_count(optimizer: keras.Optimizer, strategy: tf.distribute.Strategy) -> bool:
    """Returns whether an optimizer's update depends on the number of the step."""

    def update() -> None:
        variables = optimizer._trainable_variables
        zeros = [tf.zeros(variable.shape, variable.dtype) for variable in variables]
        with gradients_already_reduced():
            optimizer._backend_update_step(zeros, variables, optimizer.learning_rate)

    trace = tf.function(lambda: strategy.run(update), autograph=False).get_concrete_function()
    read = {id(handle) for handle, _ in trace.graph.captures}
    copies = strategy.experimental_local_results(optimizer._iterations.value)
    return any(id(copy.handle) in read for copy in copies)


def _iterate(value: object) -> Iterator[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _iterate(item)
    else:
        yield value
