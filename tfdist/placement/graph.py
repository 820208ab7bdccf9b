"""A functional or sequential model as one list of operations, in the order in which they run.

Nested models are replaced by their own operations, so that a backbone can be divided, too.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import keras

from tfdist.errors import TfdistError
from tfdist.internals import DEFINITION_WINS, Functional

Values = dict[int, Any]
"""Number of a value -> tensor. Values are numbered from 0, the model's inputs first."""


@dataclass(frozen=True, eq=False)
class Operation:
    """A call of a layer, or of another Keras operation, within a model.

    Attributes:
      name: the path of the layer, such as `backbone/conv_1`.
      inputs, outputs: the numbers of the values that it takes and gives.
      node: the Keras node; None for the conversion of a nested model's inputs.
      training: the `training` argument of the nested model that contains the operation.
    """

    name: str
    layer: Any
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    specs: tuple[keras.KerasTensor, ...]
    node: Any = None
    training: bool | None = None

    @property
    def variables(self) -> list[keras.Variable]:
        """The variables that it reads or updates."""
        is_layer = isinstance(self.layer, keras.Layer) and self.node is not None
        return list(self.layer.variables) if is_layer else []

    def run(self, values: Values, *, training: bool | None, **context: Any) -> None:
        """Computes the outputs from the inputs, with the arguments of the model's call."""
        taken = [values[number] for number in self.inputs]
        if self.node is None:
            packed = keras.tree.pack_sequence_as(self.layer._inputs_struct, taken)
            given = self.layer._standardize_inputs(packed)
        else:
            tensors = self.node.arguments.keras_tensors
            known = {id(t): value for t, value in zip(tensors, taken, strict=True)}
            args, kwargs = self.node.arguments.fill_in(known)
            if training is None or (DEFINITION_WINS and self.training is not None):
                training = self.training
            accepted = getattr(self.layer, "_call_context_args", ())
            context = {
                name: value
                for name, value in {"training": training, **context}.items()
                if value is not None and name in accepted
            }
            kwargs = {**context, **kwargs} if DEFINITION_WINS else {**kwargs, **context}
            given = keras.tree.flatten(self.layer(*args, **kwargs))
        values.update(zip(self.outputs, given, strict=True))


@dataclass(frozen=True, eq=False)
class Graph:
    """A model's operations, and the numbers of its inputs and outputs."""

    model: Any
    operations: tuple[Operation, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    @property
    def variables(self) -> list[keras.Variable]:
        """The variables that the operations read or update, each once."""
        return list_variables(self.operations)


def list_variables(operations: Iterable[Operation]) -> list[keras.Variable]:
    """Returns the variables that operations read or update, each once."""
    found = (v for operation in operations for v in operation.variables)
    return list({id(v): v for v in found}.values())


def find_functional(model: keras.Model) -> Any:
    """Returns the functional model that computes a model's outputs; None if there is none."""
    if isinstance(model, keras.Sequential) and type(model).call is keras.Sequential.call:
        model = model._functional
    is_plain = isinstance(model, Functional) and type(model).call is Functional.call
    return model if is_plain else None


def make_graph(model: keras.Model) -> Graph:
    """Returns the operations of a model, which must be functional or sequential."""
    functional = find_functional(model)
    if functional is None:
        raise TfdistError(
            f"Cannot divide the model {model.name!r} ({type(model).__name__}): its layers are "
            "known only while it runs. Build it as keras.Model(inputs, outputs) or "
            "keras.Sequential with an Input, or leave out `placement` and `rematerialize`."
        )
    return _Builder().build(functional)


class _Builder:
    def __init__(self) -> None:
        self._operations: list[Operation] = []
        self._names: dict[str, int] = {}
        self._count = 0

    def build(self, model: keras.Model) -> Graph:
        inputs = self._number(model.inputs)
        outputs = self._add(model, inputs, prefix="", training=None)
        return Graph(model, tuple(self._operations), inputs, outputs)

    def _add(
        self, model: keras.Model, inputs: Sequence[int], *, prefix: str, training: bool | None
    ) -> tuple[int, ...]:
        """Adds a model's operations; returns the numbers of its outputs."""
        numbers = {id(t): number for t, number in zip(model.inputs, inputs, strict=True)}
        for node in _list_nodes(model):
            taken = tuple(numbers[id(t)] for t in node.arguments.keras_tensors)
            inner = find_functional(node.operation)
            if inner is not None and _can_be_entered(node, inner):
                given = self._enter(node, inner, taken, prefix, training)
            else:
                given = self._number(node.outputs)
                name = self._name(prefix + node.operation.name)
                specs = tuple(node.outputs)
                self._operations.append(
                    Operation(name, node.operation, taken, given, specs, node, training)
                )
            numbers |= {id(t): number for t, number in zip(node.outputs, given, strict=True)}
        return tuple(numbers[id(t)] for t in model.outputs)

    def _enter(
        self, node: Any, inner: Any, taken: tuple[int, ...], prefix: str, training: bool | None
    ) -> tuple[int, ...]:
        inside = f"{prefix}{node.operation.name}/"
        converted = self._number(inner.inputs)
        name = self._name(f"{inside}inputs")
        self._operations.append(Operation(name, inner, taken, converted, tuple(inner.inputs)))
        given = node.arguments.kwargs.get("training")
        return self._add(
            inner, converted, prefix=inside, training=training if given is None else given
        )

    def _number(self, tensors: Sequence[Any]) -> tuple[int, ...]:
        first = self._count
        self._count += len(tensors)
        return tuple(range(first, self._count))

    def _name(self, path: str) -> str:
        """Returns a path, with a number from the second call on."""
        self._names[path] = self._names.get(path, 0) + 1
        return path if self._names[path] == 1 else f"{path}#{self._names[path]}"


def _list_nodes(model: keras.Model) -> Iterator[Any]:
    for depth in sorted(model._nodes_by_depth, reverse=True):
        yield from (node for node in model._nodes_by_depth[depth] if not node.is_input)


def _can_be_entered(node: Any, inner: Any) -> bool:
    """Returns whether a call passes a nested model's inputs in their order, and nothing else."""
    args, kwargs = node.arguments.args, node.arguments.kwargs
    others = [value for name, value in kwargs.items() if name != "training"]
    if len(args) != 1 or any(value is not None for value in others):
        return False
    is_flat = isinstance(args[0], (keras.KerasTensor, list, tuple))
    is_plain = isinstance(inner._inputs_struct, (keras.KerasTensor, list, tuple))
    taken = keras.tree.flatten(args[0])
    are_tensors = all(isinstance(leaf, keras.KerasTensor) for leaf in taken)
    return is_flat and is_plain and are_tensors and len(taken) == len(inner.inputs)
