"""Divides the units of layers over the devices of each replica: tensor parallelism.

Each device holds its part of a layer's weights and of the optimizer's state for them. It gets the
layer's whole input, and computes its part of the output and of the gradients; the parts of the
output are put together on the replica's first device, where everything else runs.

Source: Krizhevsky 2014 (arXiv:1404.5997); Shoeybi et al. 2019 (arXiv:1909.08053), section 3, for
dividing by output units.
"""

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from tfdist.aliases import Nested
from tfdist.errors import TfdistError
from tfdist.internals import get_stateless_scope
from tfdist.placement.costs import count_bytes
from tfdist.placement.groups import find_own_group
from tfdist.placement.options import Shards
from tfdist.placement.shards.divided import (
    building_parts,
    differentiating_parts,
    divide,
    find_divided,
    split,
    updating_parts,
)
from tfdist.placement.shards.elementwise import check_optimizer
from tfdist.placement.shards.rules import Axes, Rule, find_rule, look_up, splits_activation
from tfdist.placement.variables import group_slots, updating_in_place


@dataclass(frozen=True, eq=False)
class _Choice:
    """A layer that is divided, its rule, and the axes of its weights."""

    layer: Any
    rule: Rule
    axes: Axes

    @property
    def weights(self) -> dict[str, keras.Variable]:
        """Name of an attribute -> the weight."""
        return {name: getattr(self.layer, name) for name in self.axes}


class UnitShards:
    """The divided layers of a model; its optimizers must update weights by parts, too."""

    def __init__(
        self,
        model: keras.Model,
        placement: Shards,
        strategy: tf.distribute.Strategy,
        groups: Mapping[str, Sequence[str]],
        *,
        find_optimizers: Callable[[], Sequence[Any]],
    ):
        self._model, self._strategy, self._groups = model, strategy, groups
        self._find_optimizers = find_optimizers
        for optimizer in find_optimizers():
            check_optimizer(optimizer)
        count = len(next(iter(groups.values())))
        self._choices = _choose(model, placement.parse_layout(), count)
        axes = {
            id(weight): (weight, choice.axes[name])
            for choice in self._choices
            for name, weight in choice.weights.items()
        }
        built = [optimizer for optimizer in find_optimizers() if optimizer.built]
        slots = group_slots([weight for weight, _ in axes.values()], built)
        for weight, axis in axes.values():
            for found in (weight, *slots[id(weight)]):
                if found.shape == weight.shape:
                    divide(found, axis % len(weight.shape), strategy, groups)

    @contextlib.contextmanager
    def building(self) -> Iterator[None]:
        """Makes optimizers that are built divide their variables, too."""
        with building_parts(self._strategy, self._groups):
            yield

    @contextlib.contextmanager
    def intercept(self) -> Iterator[None]:
        """Computes the layers and their updates by parts, while a step is traced."""
        weights = self._model.trainable_variables
        with (
            self.building(),
            updating_in_place(self._strategy),
            updating_parts(self._strategy, weights, self._find_optimizers()),
            differentiating_parts(),
            contextlib.ExitStack() as stack,
        ):
            for choice in self._choices:
                vars(choice.layer)["call"] = functools.partial(self._call, choice)
                stack.callback(vars(choice.layer).pop, "call")
            yield

    def summarize(self) -> dict[str, Any]:
        """Returns the entry `placement` of a run's summary: the bytes of weights by device."""
        divided = {id(weight) for choice in self._choices for weight in choice.weights.values()}
        group = next(iter(self._groups.values()))
        num_bytes = [0] * len(group)
        for variable in self._model.variables:
            found = find_divided(variable)
            parts = found.parts if found else [variable]
            for place, part in enumerate(parts):
                num_bytes[place] += count_bytes(part.shape, variable.dtype)
        return {
            "placement": [
                {"device": device, "weight_bytes": size}
                for device, size in zip(group, num_bytes, strict=True)
            ],
            "divided_weights": len(divided),
        }

    def _call(self, choice: _Choice, inputs: Nested[tf.Tensor], *args: Any, **kwargs: Any) -> Any:
        """Computes a layer, each part of its units on a device."""
        layer, rule = choice.layer, choice.rule
        if not isinstance(inputs, tf.Tensor):
            return type(layer).call(layer, inputs, *args, **kwargs)
        weights = {name: _read(weight) for name, weight in choice.weights.items()}
        devices = find_own_group(self._groups)
        count = len(next(iter(weights.values())))
        casts = {name: weight._maybe_autocast for name, weight in choice.weights.items()}
        shared = [tf.convert_to_tensor(getattr(layer, name)) for name in rule.shared]
        activates = layer.activation if hasattr(layer, "activation") else None
        activates_parts = splits_activation(layer)

        def compute(x: tf.Tensor, *parts: tf.Tensor) -> tf.Tensor:
            own = {n: casts[n](part) for n, part in zip(weights, parts, strict=False)}
            whole = dict(zip(rule.shared, parts[len(own) :], strict=True))
            y = rule.compute(layer, x, own | whole)
            return activates(y) if activates is not None and activates_parts else y

        def compute_place(place: int, x: tf.Tensor) -> tf.Tensor:
            parts = [*(parts[place] for parts in weights.values()), *shared]
            device = f"/device:{devices[place]}"
            if rule.is_sparse:  # nothing to compute, and the gradient has the rows only
                with tf.device(device):
                    return compute(x, *parts)
            return run_on(device, compute, x, *parts)

        axis = rule.find_axis(layer)
        if rule.rows:
            sizes = [part.shape[0] for part in weights["embeddings"]]
            return look_up(inputs, sizes, compute_place)
        given = [inputs] * count
        if rule.takes_part:
            sizes = [part.shape[choice.axes["kernel"]] for part in weights["kernel"]]
            given = tf.split(inputs, sizes, axis)
        y = tf.concat([compute_place(place, x) for place, x in enumerate(given)], axis)
        return y if activates is None or activates_parts else activates(y)


def run_on(device: str, function: Callable[..., Any], *tensors: tf.Tensor) -> tf.Tensor:
    """Runs a function and its backward pass on a device."""

    def forward(*given: tf.Tensor) -> tuple[tf.Tensor, Any]:
        tape = tf.GradientTape(persistent=True, watch_accessed_variables=False)
        with tf.device(device), tape:
            copies = [tf.identity(tensor) for tensor in given]
            tape.watch(copies)
            result = function(*copies)

        def backward(upstream: tf.Tensor) -> list[Any]:
            with tf.device(device):
                return tape.gradient(result, copies, upstream)

        return result, backward

    with tf.device(device):  # TensorFlow copies all inputs and results to where it is called
        return tf.custom_gradient(forward)(*tensors)


def _read(weight: keras.Variable) -> list[tf.Tensor]:
    """Returns the values of a weight's parts."""
    divided = find_divided(weight)
    assert divided is not None
    scope = get_stateless_scope()
    value = scope.get_current_value(weight) if scope is not None else None
    return divided.read_parts() if value is None else split(value, divided)


def _choose(model: keras.Model, layout: Mapping[str, int], count: int) -> list[_Choice]:
    """Returns the layers to divide: those that the layout names, or all that have a rule."""
    layers = [layer for layer in model._flatten_layers() if not isinstance(layer, keras.Model)]
    if not layout:
        found = [_Choice(a, rule, rule.find_axes(a)) for a in layers if (rule := find_rule(a))]
        found = [c for c in found if _count_units(c) >= count]
        if not found:
            raise TfdistError(
                f"`placement=shards` has nothing to divide: no layer of {model.name!r} has a rule "
                f"and at least {count} units. Leave it out."
            )
        return found
    chosen: dict[int, _Choice] = {}
    for pattern, axis in layout.items():
        owned = [(layer, v) for layer in layers for v in layer._trainable_variables]
        fitting = [(layer, v) for layer, v in owned if re.fullmatch(pattern, v.path)]
        if not fitting:
            paths = ", ".join(v.path for v in model.trainable_variables[:6])
            raise TfdistError(
                f"`layout={pattern}` fits no whole path of a weight of {model.name!r}. Its weights "
                f"are {paths} and so on."
            )
        for owner, weight in fitting:
            chosen[id(owner)] = _choose_layer(owner, weight, axis, count)
    return list(chosen.values())


def _choose_layer(layer: keras.Layer, weight: keras.Variable, axis: int, count: int) -> _Choice:
    described = f"the layer {layer.path!r} ({type(layer).__name__})"
    rank = len(weight.shape)
    choices = [
        _Choice(layer, rule, rule.find_axes(layer))
        for rows in (False, True)
        if (rule := find_rule(layer, rows=rows)) is not None
    ]
    if not choices:
        raise TfdistError(
            f"`layout` cannot divide {weight.path}: {described} has no rule for it. Leave it out "
            "of the layout."
        )
    possible = {
        c.axes[name] % rank: c for c in choices for name, v in c.weights.items() if v is weight
    }
    choice = possible.get(axis % rank) if -rank <= axis < rank else None
    if choice is None:
        raise TfdistError(
            f"`layout` cannot divide {weight.path} along the axis {axis}: {described} can be "
            f"divided along {' or '.join(map(str, possible)) or 'no axis'} only."
        )
    if _count_units(choice) < count:
        raise TfdistError(
            f"`layout` cannot divide {weight.path} over {count} devices: {described} has "
            f"{_count_units(choice)} units. Leave it out of the layout."
        )
    return choice


def _count_units(choice: _Choice) -> int:
    return min(w.shape[choice.axes[name]] for name, w in choice.weights.items())
