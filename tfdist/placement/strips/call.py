"""Runs a model on strips of its images, in place of Keras's call of its layers.

Each device computes its part of every layer that has a rule (`rules`): some rows, or a field of a
grid. Where a layer needs rows or columns of a neighbor, these travel. Any other layer is computed
whole on the replica's first device, and its output is divided again if it is an image. Weights live
on the first device, and are copied to the others in every step.

Source: Shazeer et al. 2018 (arXiv:1811.02084), section 3, for dividing images by space; Dryden et
al. 2019 (arXiv:1903.06681) for the exchange of rows.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import keras
import tensorflow as tf

from tfdist.errors import TfdistError
from tfdist.internals import get_autocast_scope, get_keras_mask
from tfdist.placement.graph import Graph, make_graph
from tfdist.placement.groups import find_own_group
from tfdist.placement.strips.cells import DeviceTape
from tfdist.placement.strips.forward import Pool, StripForward
from tfdist.placement.strips.image import is_picture
from tfdist.placement.strips.rules import find_rule
from tfdist.placement.tracing import (
    Backward,
    add_penalties,
    autocasting,
    call_with_gradient,
    has_gradient,
    intercepting,
    set_mask,
)


@dataclass(frozen=True, eq=False)
class StripPlan:
    """How a model is computed by strips.

    Attributes:
      grid: into how many parts the height and the width are divided.
      whole: the names of operations on images that were computed whole, once a step is traced.
    """

    graph: Graph
    groups: Mapping[str, Sequence[str]]
    grid: tuple[int, int]
    whole: list[str] = field(default_factory=list)

    def make_call(self, *, draws: object, pool: Pool) -> "StripedCall":
        """Returns what takes the place of the model's call."""
        del draws  # nothing runs again
        return StripedCall(self, pool=pool)

    def summarize(self, *, micro_batches: int) -> dict[str, Any]:
        """Returns the entries of a run's summary: devices, and layers that were computed whole."""
        del micro_batches  # the devices do not wait for one another's
        devices = next(iter(self.groups.values()))
        return {
            "placement": [{"device": device} for device in devices],
            "whole_layers": list(dict.fromkeys(self.whole)),
        }


def make_strip_plan(
    model: keras.Model, groups: Mapping[str, Sequence[str]], grid: tuple[int, ...] = ()
) -> StripPlan:
    """Returns how a model is computed by strips.

    Args:
      grid: into how many parts the height and the width are divided; by default, the height alone.

    Raises:
      TfdistError: it is neither functional nor sequential, or no layer can be divided.
    """
    graph = make_graph(model)
    pictures = [spec for spec in graph.model.inputs if is_picture(spec)]
    if not pictures or not any(find_rule(operation) for operation in graph.operations):
        raise TfdistError(
            f"`placement=strips` has nothing to divide: {model.name!r} has no input [height, "
            "width, channels] of a known size, or no layer with a rule. Leave it out."
        )
    rows, columns = grid or (len(next(iter(groups.values()))), 1)
    return StripPlan(graph, groups, (rows, columns))


class StripedCall:
    """Runs a functional model on strips of its images; `pool` is for batch normalization."""

    is_pipelined: Literal[False] = False  # the strips of a layer run at the same time

    def __init__(self, plan: StripPlan, *, pool: Pool):
        self._plan, self._graph = plan, plan.graph
        self._pool = pool

    @contextlib.contextmanager
    def intercept(self) -> Iterator[None]:
        """Replaces the call of the model. Must be opened around all replicas."""
        with intercepting(self._graph.model, self._run):
            yield

    def _run(self, inputs: Sequence[Any], *, training: bool | None, **context: Any) -> list[Any]:
        devices = [f"/device:{name}" for name in find_own_group(self._plan.groups)]
        autocast = get_autocast_scope()
        with autocasting(None):
            read = {id(v): (v, tf.convert_to_tensor(v.value)) for v in self._graph.variables}
        weights = {key: value for key, (v, value) in read.items() if v.trainable}
        states = {key: value for key, (v, value) in read.items() if not v.trainable}
        moving = [place for place, value in enumerate(inputs) if has_gradient(value)]
        passes: list[StripForward] = []

        def forward(*given: tf.Tensor) -> tuple[list[tf.Tensor], Backward]:
            local = list(inputs)
            for place, value in zip(moving, given, strict=False):
                set_mask(value, get_keras_mask(inputs[place]))
                local[place] = value
            own = dict(zip(weights, given[len(moving) :], strict=True))
            cells = DeviceTape(devices[0], is_recorded=bool(training))
            new = StripForward(
                self._graph,
                self._plan.grid,
                find_rule,
                devices,
                self._pool,
                cells,
                training,
                context,
                autocast,
            )
            passes.append(new)
            new.run(local, own, dict(states))
            results = [*filter(has_gradient, new.outputs), *new.penalties]

            def backward(*upstream: tf.Tensor | None) -> list[Any]:
                return cells.differentiate(results, upstream, given)

            return [tf.identity(result) for result in results], backward

        given = [*(inputs[place] for place in moving), *weights.values()]
        is_differentiated = training and given
        results = iter(
            call_with_gradient(forward, *given) if is_differentiated else forward(*given)[0]
        )
        for key, value in passes[0].states.items():
            if value is not states[key]:
                read[key][0].assign(value)
        found = passes[0].outputs
        self._plan.whole.extend(passes[0].whole)
        outputs = [next(results) if has_gradient(value) else value for value in found]
        for output, value in zip(outputs, found, strict=True):
            set_mask(output, get_keras_mask(value))
        add_penalties(self._graph, list(results))
        return outputs
