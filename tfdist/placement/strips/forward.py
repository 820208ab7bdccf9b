"""The forward pass of one replica by strips: its values, in parts or whole."""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.aliases import Nested
from tfdist.models.batch_norm import Moments
from tfdist.placement.graph import Graph, Operation, Values
from tfdist.placement.strips.cells import DeviceTape
from tfdist.placement.strips.image import (
    Bounds,
    Pieces,
    StripedImage,
    divide_size,
    find_overlaps,
    is_picture,
    join,
    list_areas,
)
from tfdist.placement.tracing import autocasting

Pool = Callable[[Moments], Moments]
"""Returns the moments over all replicas."""
StripRule = Callable[["StripForward", Operation, list[Any]], list[Any] | None]
"""Computes an operation by strips; returns None if it cannot."""


class StripForward:
    """One forward pass.

    Args:
      find_rule: returns how an operation is computed by strips, or None.
      context: the arguments that all layers get.
      autocast: the scope that decides to which dtype variables are cast, if any.

    Attributes:
      states: id of a variable that is not trained -> its value.
    """

    def __init__(
        self,
        graph: Graph,
        grid: tuple[int, int],
        find_rule: Callable[[Operation], StripRule | None],
        devices: Sequence[str],
        pool: Pool,
        cells: DeviceTape,
        training: bool | None,
        context: Mapping[str, Any],
        autocast: Any,
    ):
        self.devices, self.cells, self.pool = devices, cells, pool
        self.grid = grid
        self.states: dict[int, tf.Tensor] = {}
        self.outputs: list[Any] = []
        self.penalties: list[tf.Tensor] = []
        self.whole: list[str] = []
        self._graph, self._find_rule = graph, find_rule
        self._training, self._context = training, context
        self._autocast = autocast
        self._weights: Mapping[int, tf.Tensor] = {}
        self._values: dict[int, StripedImage | Any] = {}
        self._whole: Values = {}

    def run(
        self, inputs: Sequence[Any], weights: Mapping[int, tf.Tensor], states: dict[int, tf.Tensor]
    ) -> None:
        """Computes the model's outputs with the given values of variables, by their ids."""
        self._weights, self.states = weights, states
        for number, given, spec in zip(
            self._graph.inputs, inputs, self._graph.model.inputs, strict=True
        ):
            self._values[number] = self.divide(given, spec)
        for operation in self._graph.operations:
            taken = [self._values[number] for number in operation.inputs]
            is_striped = any(isinstance(value, StripedImage) for value in taken)
            rule = self._find_rule(operation) if is_striped else None
            outputs = rule(self, operation, taken) if rule is not None else None
            if outputs is None:
                outputs = self._run_whole(operation, taken)
                if is_striped and operation.node is not None:
                    self.whole.append(operation.name)
            self._values.update(zip(operation.outputs, outputs, strict=True))
        self.outputs = [self._join(self._values[number]) for number in self._graph.outputs]

    def is_training(self, operation: Operation) -> bool:
        """Returns whether a layer is called as in training."""
        given = [
            self._training,
            operation.training,
            operation.node.arguments.kwargs.get("training"),
        ]
        return bool(next((value for value in given if value is not None), False))

    def read(self, variable: keras.Variable) -> tf.Tensor:
        """Returns the value of a variable, which is not cast."""
        key = id(variable)
        return self._weights[key] if key in self._weights else self.states[key]

    def find_bounds(self, size: tuple[int, int]) -> Bounds | None:
        """Returns the bounds of an image's parts; None if it is smaller than the grid."""
        is_small = any(length < count for length, count in zip(size, self.grid, strict=True))
        return None if is_small else divide_size(size, self.grid)

    def divide(self, value: Nested[tf.Tensor], spec: tf.TypeSpec) -> Any:
        """Returns an image in parts; any other value as it is."""
        if not is_picture(spec) or value.shape[1:3] != spec.shape[1:3]:
            return value
        if (bounds := self.find_bounds(spec.shape[1:3])) is None:
            return value
        areas = list_areas(bounds)
        parts = self.cells.run(None, lambda x: [_cut(x, *area) for area in areas], [value])
        image = StripedImage(tuple(parts), bounds)
        self._whole[id(image.parts[0])] = value
        return image

    def take(self, image: StripedImage, rows: tuple[int, int], columns: tuple[int, int]) -> Pieces:
        """Returns the tensors of an area, whose bounds may lie outside of the image."""
        below, missing_rows = find_overlaps(image.bounds[0], *rows)
        across, missing_columns = find_overlaps(image.bounds[1], *columns)
        pieces = []
        for (row, *own_rows), (column, *own_columns) in itertools.product(below, across):
            place = row * self.grid[1] + column
            part = image.parts[place]
            spans = tuple(own_rows), tuple(own_columns)
            if spans != tuple((0, length) for length in part.shape[1:3]):
                cut = functools.partial(lambda spans, x: [_cut(x, *spans)], spans)
                part = self.cells.run(self.devices[place], cut, [part])[0]
            pieces.append(part)
        return Pieces(pieces, len(across), (missing_rows, missing_columns))

    def call(
        self,
        operation: Operation,
        tensors: Sequence[tf.Tensor],
        *,
        device: str | None,
        prepare: Callable[..., Sequence[tf.Tensor]] | None = None,
        finish: Callable[[tf.Tensor], tf.Tensor] | None = None,
        attributes: Mapping[str, Any] | None = None,
    ) -> list[tf.Tensor]:
        """Returns the outputs of an operation.

        Args:
          tensors: what it is computed from: its inputs, unless `prepare` makes them.
          prepare: tensors -> the operation's inputs.
          finish: the operation's output -> what is returned instead.
          attributes: the attributes that its layer has meanwhile.
        """
        variables = operation.variables
        trained = [v for v in variables if id(v) in self._weights]
        others = [v for v in variables if id(v) in self.states]
        scopes: list[keras.StatelessScope] = []

        def compute(*given: tf.Tensor) -> list[tf.Tensor]:
            own = list(given[: len(tensors)])
            local = dict(zip(operation.inputs, prepare(*own) if prepare else own, strict=True))
            mapping = [
                *zip(trained, given[len(tensors) :], strict=True),
                *((v, self.states[id(v)]) for v in others),
            ]
            with autocasting(None):  # Keras would cast the values right away
                scope = keras.StatelessScope(mapping, collect_losses=True)
            scopes.append(scope)
            with autocasting(self._autocast), scope, _changed(operation.layer, attributes or {}):
                operation.run(local, training=self._training, **self._context)
            found = [local[number] for number in operation.outputs]
            if finish is not None:
                found = [finish(tensor) for tensor in found]
            return [*found, *scope.losses]

        read = [self._weights[id(v)] for v in trained]
        found = self.cells.run(device, compute, [*tensors, *read])
        self.states |= {id(v): scopes[0].get_current_value(v) for v in others}
        self.penalties += found[len(operation.outputs) :]
        return found[: len(operation.outputs)]

    def _run_whole(self, operation: Operation, taken: Sequence[Any]) -> list[Any]:
        """Computes an operation on the first device, and divides its outputs that are images."""
        if operation.node is None and _are_converted(operation, taken):
            return list(taken)
        whole = [self._join(value) for value in taken]
        outputs = self.call(operation, whole, device=None)
        pairs = zip(outputs, operation.specs, strict=True)
        return [self.divide(output, spec) for output, spec in pairs]

    def _join(self, value: Nested[tf.Tensor]) -> Any:
        """Returns the whole image of strips, on the first device."""
        if not isinstance(value, StripedImage):
            return value
        key = id(value.parts[0])
        if key not in self._whole:
            self._whole[key] = self.cells.run(
                None, lambda *parts: [join(parts, self.grid[1])], value.parts
            )[0]
        return self._whole[key]


def _cut(x: tf.Tensor, rows: tuple[int, int], columns: tuple[int, int]) -> tf.Tensor:
    return x[:, slice(*rows), slice(*columns)]


def _are_converted(operation: Operation, taken: Sequence[Any]) -> bool:
    """Returns whether a nested model would leave its inputs as they are."""
    return all(
        isinstance(value, StripedImage) and value.parts[0].dtype == spec.dtype
        for value, spec in zip(taken, operation.specs, strict=True)
    )


@contextlib.contextmanager
def _changed(layer: keras.Layer, attributes: Mapping[str, Any]) -> Iterator[None]:
    """Gives a layer other attributes for a while."""
    before = {name: vars(layer)[name] for name in attributes}
    vars(layer).update(attributes)
    try:
        yield
    finally:
        vars(layer).update(before)
