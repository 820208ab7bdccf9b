"""Variables and gradients that are divided along an axis, each part on a device of its own.

A divided variable stays whole for whoever reads or assigns it: layers without a rule, callbacks,
checkpoints. Only the gradient and the update are computed by parts.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfdist.aliases import Nested
from tfdist.errors import TfdistError
from tfdist.internals import PerReplica, TFOptimizer
from tfdist.placement.stand_in import StandIn
from tfdist.placement.variables import call_outside_scopes, create_copies, group_slots
from tfdist.replacing import find_function, replaced

_PARTS = "_tfdist_parts"


class DividedVariable(StandIn):
    """A variable whose value is the concatenation of its parts along an axis."""

    def __init__(self, parts: Sequence[Any], axis: int):
        self.parts = tuple(parts)
        self.axis = axis
        first = self.parts[0]
        self.dtype, self.trainable, self.name = first.dtype, first.trainable, first.name
        self.sizes = [part.shape[axis] for part in self.parts]
        sizes = first.shape.as_list()
        sizes[axis] = sum(self.sizes)
        self.shape = tf.TensorShape(sizes)

    @property
    def device(self) -> str:
        """The device of the first part."""
        return self.parts[0].device

    @property
    def _unique_id(self) -> str:
        return self.parts[0]._unique_id

    @property
    def _distribute_strategy(self) -> Any:
        return getattr(self.parts[0], "_distribute_strategy", None)

    @property
    def _aggregation(self) -> Any:
        return self.parts[0]._aggregation

    @_aggregation.setter
    def _aggregation(self, value: tf.VariableAggregation) -> None:
        for part in self.parts:
            part._aggregation = value

    def read_parts(self) -> list[tf.Tensor]:
        """Returns the values of the parts, each on its device."""
        read = []
        for part in self.parts:
            with tf.device(getattr(part, "device", None)):
                read.append(tf.convert_to_tensor(part))
        return read

    def read_value(self) -> tf.Tensor:
        return tf.concat(self.read_parts(), self.axis)

    def numpy(self) -> np.ndarray:
        return np.concatenate([part.numpy() for part in self.parts], self.axis)

    def _export_to_saved_model_graph(self, *_: Any, **__: Any) -> None:
        raise TfdistError(
            "Cannot export a model whose weights are divided over devices. Save it (`trainer.save` "
            "or model.save), and export the model that keras.saving.load_model returns."
        )

    def _update(
        self, method: str, value: tf.Tensor | tf.IndexedSlices, options: Mapping[str, Any]
    ) -> None:
        for part, own in zip(self.parts, split(value, self), strict=True):
            getattr(part, method)(own, **options)


class _Parts(NamedTuple):
    """The parts of a gradient, and its variable."""

    parts: tuple[Any, ...]
    variable: DividedVariable


def divide(
    variable: keras.Variable,
    axis: int,
    strategy: tf.distribute.Strategy,
    groups: Mapping[str, Sequence[str]],
) -> None:
    """Divides a variable along an axis over each replica's devices; all workers must call this."""
    old = variable.value
    count = min(len(next(iter(groups.values()))), variable.shape[axis])
    whole = tf.convert_to_tensor(strategy.experimental_local_results(old)[0])
    bounds = np.cumsum([0, *(len(p) for p in np.array_split(range(whole.shape[axis]), count))])

    def create() -> DividedVariable:
        parts = []
        for place, (first, last) in enumerate(itertools.pairwise(bounds)):
            value = tf.gather(whole, tf.range(first, last), axis=axis)
            on = [group[place] for group in groups.values()]
            parts.append(create_copies(value, old, strategy, on))
        return DividedVariable(parts, axis)

    variable._value = call_outside_scopes(create)


def find_divided(variable: tf.Variable) -> DividedVariable | None:
    """Returns the parts of a Keras or divided variable; None if it is whole."""
    found = variable._value if isinstance(variable, keras.Variable) else variable
    return found if isinstance(found, DividedVariable) else None


def join(parts: Sequence[Any], variable: DividedVariable) -> Any:
    """Returns a whole gradient, which remembers its parts.

    Whoever needs only the parts does not compute the whole.

    Args:
      parts: the gradients of the parts of a variable, tensors or `tf.IndexedSlices`. Slices that
        are divided along another axis than the first have the same indices.
    """
    axis = variable.axis
    if isinstance(parts[0], tf.IndexedSlices):
        indices = parts[0].indices
        if axis == 0:
            starts = itertools.accumulate(variable.sizes, initial=0)
            indices = tf.concat([p.indices + s for p, s in zip(parts, starts, strict=False)], 0)
        values = tf.concat([part.values for part in parts], axis)
        shape = tf.constant(variable.shape.as_list(), tf.int64)
        whole: Any = tf.IndexedSlices(values, indices, shape)
    else:
        whole = tf.concat(parts, axis)
        whole.set_shape(variable.shape)
    setattr(whole, _PARTS, _Parts(tuple(parts), variable))
    return whole


def split(value: tf.Tensor | tf.IndexedSlices, variable: DividedVariable) -> list[Any]:
    """Returns the parts of a tensor or gradient that fit the parts of a variable."""
    known: _Parts | None = getattr(value, _PARTS, None)
    if known is not None:
        return list(known.parts)
    axis, sizes = variable.axis, variable.sizes
    if not isinstance(value, tf.IndexedSlices):
        return tf.split(tf.convert_to_tensor(value, variable.dtype), sizes, axis)
    if axis:
        values = tf.split(value.values, sizes, axis)
        pairs = zip(values, variable.parts, strict=True)
        return [tf.IndexedSlices(v, value.indices, tf.shape(p)) for v, p in pairs]
    found = []
    bounds = itertools.pairwise(itertools.accumulate(sizes, initial=0))
    for (first, last), part in zip(bounds, variable.parts, strict=True):
        own = tf.where((value.indices >= first) & (value.indices < last))[:, 0]
        indices = tf.gather(value.indices, own) - first
        found.append(tf.IndexedSlices(tf.gather(value.values, own), indices, tf.shape(part)))
    return found


def flatten_parts(gradients: Sequence[Any]) -> tuple[list[Any], Callable[[Sequence[Any]], list]]:
    """Returns gradients with parts in place of those that have them, and a function that joins."""
    parts: list[_Parts | None] = [getattr(gradient, _PARTS, None) for gradient in gradients]

    def restore(flat: Sequence[Any]) -> list[Any]:
        left = iter(flat)
        return [
            next(left) if own is None else join([next(left) for _ in own.parts], own.variable)
            for own in parts
        ]

    pairs = zip(gradients, parts, strict=True)
    return [part for g, own in pairs for part in (own.parts if own else [g])], restore


@contextlib.contextmanager
def differentiating_parts() -> Iterator[None]:
    """Makes `tf.GradientTape` differentiate divided variables by parts."""
    original = find_function(tf.GradientTape, "gradient")

    def gradient(
        tape: tf.GradientTape,
        target: Nested[tf.Tensor],
        sources: Nested[tf.Variable],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        leaves = tf.nest.flatten(sources)
        divided = [find_divided(leaf) for leaf in leaves]
        if not any(divided):
            return original(tape, target, sources, *args, **kwargs)
        flat = [d.parts if d else (leaf,) for leaf, d in zip(leaves, divided, strict=True)]
        found = original(tape, target, flat, *args, **kwargs)
        pairs = zip(found, divided, strict=True)
        joined = [own[0] if d is None else _join_found(own, d) for own, d in pairs]
        return tf.nest.pack_sequence_as(sources, joined)

    with replaced(tf.GradientTape, "gradient", gradient):
        yield


@contextlib.contextmanager
def building_parts(
    strategy: tf.distribute.Strategy, groups: Mapping[str, Sequence[str]]
) -> Iterator[None]:
    """Makes optimizers divide what they create for a divided variable, in the same way."""
    original = find_function(TFOptimizer, "add_variable_from_reference")

    def add(
        optimizer: keras.Optimizer, reference_variable: keras.Variable, *args: Any, **kwargs: Any
    ) -> Any:
        divided = find_divided(reference_variable)
        if divided is None:
            return original(optimizer, reference_variable, *args, **kwargs)
        with _showing(reference_variable, divided.parts[0]):
            slot = original(optimizer, reference_variable, *args, **kwargs)
        if slot.shape == reference_variable.shape:
            divide(slot, divided.axis, strategy, groups)
        return slot

    with replaced(TFOptimizer, "add_variable_from_reference", add):
        yield


@contextlib.contextmanager
def updating_parts(
    strategy: tf.distribute.Strategy, weights: Sequence[keras.Variable], optimizers: Sequence[Any]
) -> Iterator[None]:
    """Makes optimizers, which may be built later, update variables by parts during a trace."""
    kind = type(strategy.extended)
    original = find_function(kind, "update")
    owners = {id(weight._value): id(weight) for weight in weights}
    held: dict[int, dict[int, list[keras.Variable]]] = {}  # by the number of slots

    def find_slots(var: DividedVariable) -> list[tuple[keras.Variable, DividedVariable]]:
        count = sum(len(optimizer.variables) for optimizer in optimizers)
        if count not in held:
            held[count] = group_slots(weights, optimizers)
        slots = held[count].get(owners.get(id(var), 0), [])
        return [(slot, found) for slot in slots if (found := find_divided(slot))]

    def update(
        extended: tf.distribute.StrategyExtended,
        var: tf.Variable,
        fn: Callable[..., Any],
        args: Sequence[object] = (),
        kwargs: dict[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        if not isinstance(var, DividedVariable):
            return original(extended, var, fn, args, kwargs, group)
        slots = find_slots(var)
        given = [_select(strategy, value, var) for value in args]
        for place, part in enumerate(var.parts):
            with contextlib.ExitStack() as stack:
                for slot, divided in slots:
                    stack.enter_context(_showing(slot, divided.parts[place]))
                own = tuple(values[place] for values in given)
                original(extended, part, fn, own, kwargs, group)
        return None

    with replaced(kind, "update", update):
        yield


@contextlib.contextmanager
def _showing(variable: keras.Variable, value: tf.Tensor | tf.IndexedSlices) -> Iterator[None]:
    """Gives a Keras variable another TensorFlow variable for a while."""
    with replaced(variable, "_value", value):
        yield


def _select(
    strategy: tf.distribute.Strategy, value: tf.Tensor | tf.IndexedSlices, variable: DividedVariable
) -> list[Any]:
    """Returns an argument of an update for each part: its part, or itself if all share it."""
    copies = strategy.experimental_local_results(value)
    shape = getattr(copies[0], "shape", None)
    if shape is None or shape.rank == 0 or not variable.shape.is_compatible_with(shape):
        return [value] * len(variable.parts)
    parts = [split(copy, variable) for copy in copies]
    if len(parts) == 1:
        return parts[0]
    return [PerReplica(own) for own in zip(*parts, strict=True)]


def _join_found(parts: Sequence[Any], variable: DividedVariable) -> Any:
    if all(part is None for part in parts):
        return None
    pairs = zip(parts, variable.parts, strict=True)
    return join([tf.zeros_like(v) if g is None else g for g, v in pairs], variable)
