"""Finds what a step takes from a branch of each replica's own numbers.

`p.assign(clip(p + mean(score), 0, 1))` is not a mean over examples: where one replica's value is
clipped and another's is not, their mean is not what one device assigns. So is a loss
`maximum(mean(losses), 0.1)`. The first batch may not show it, because it may lie on one side of the
limit only. The trace shows it: a number without examples that depends on the replica's examples and
that a function with a kink or a jump takes. What a metric has counted is such a number, too.
"""

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfdist.internals import SyncOnReadVariable
from tfdist.replacing import find_function, replaced

_BRANCHES = {
    *("Abs", "ArgMax", "ArgMin", "Bucketize", "Ceil", "ClipByValue", "Elu", "Floor", "FloorDiv"),
    *("FloorMod", "LeakyRelu", "Max", "Maximum", "Min", "Minimum", "Mod", "TopKV2"),
    *("Equal", "Greater", "GreaterEqual", "Less", "LessEqual", "NotEqual"),
    *("Relu", "Relu6", "Rint", "Round", "Selu", "Sign"),
}
_SELECTIONS = {"Select", "SelectV2"}  # by their first input
# Operations that run functions, and the attributes that name these.
_CONDITIONAL = {
    **dict.fromkeys(("If", "StatelessIf"), ("then_branch", "else_branch")),
    **dict.fromkeys(("Case", "StatelessCase"), ("branches",)),
}
_LOOPS = dict.fromkeys(("While", "StatelessWhile"), ("cond", "body"))
_CALLS = dict.fromkeys(("PartitionedCall", "StatefulPartitionedCall"), ("f",))
_FUNCTIONS = _CONDITIONAL | _LOOPS | _CALLS
# They tell sizes, which parts of different sizes show, and whether something went wrong.
_HARMLESS = {"IsFinite", "IsInf", "IsNan", "OnesLike", "Rank", "Shape", "Size", "ZerosLike"}

# Whether a tensor depends on the replica's examples: not, only on extremes of them, or otherwise.
# A loop may run until the longest example has ended, which changes no other one.
_NOT, _BY_EXTREMES, _OTHERWISE = range(3)
_EXTREMES = {"All", "Any", "Max", "Min"}
_Found = tuple[int, str]  # that, and the type of the last branch; no text if there is none


class Branches:
    """The variables, losses and results of one trace that depend on a branch.

    Attributes:
      found: what depends on it -> type of the operation.
    """

    def __init__(self) -> None:
        self.found: dict[str, str] = {}
        self._search: _Search | None = None

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Remembers what replicas reduce. Opened around all replicas."""
        self.found = {}
        common: dict[int, _Found] = {}
        self._search = search = _Search(common)
        original = find_function(tf.distribute.ReplicaContext, "all_reduce")

        @functools.wraps(original)
        def all_reduce(*args: Any, **kwargs: Any) -> Any:
            reduced = original(*args, **kwargs)
            tensors = [each for each in tf.nest.flatten(reduced) if isinstance(each, tf.Tensor)]
            search.hold(tensors)
            common.update((id(each), (_NOT, "")) for each in tensors)
            return reduced

        try:
            with replaced(tf.distribute.ReplicaContext, "all_reduce", all_reduce):
                yield
        finally:
            self._search = None  # which holds the graph

    def look(self, name: str, value: tf.Tensor) -> None:
        """Looks at a value of a replica, unless it runs eagerly."""
        if self._search and isinstance(value, tf.Tensor) and not hasattr(value, "numpy"):
            _, branch = self._search.look_behind(value)
            if branch:
                self.found.setdefault(name, branch)


class _Search:
    """Finds what the tensors of a graph depend on.

    Args:
      known: by the ids of tensors, what was found before; nothing behind them is looked at.
    """

    def __init__(self, known: Mapping[int, _Found]):
        self._known = known
        self._found: dict[int, _Found] = {}
        # The outputs of operations, by their ids and how many they are.
        self._inside: dict[tuple[int, int], Sequence[_Found]] = {}
        self._held: list[tf.Tensor] = []

    def hold(self, tensors: Sequence[tf.Tensor]) -> None:
        """Keeps tensors, so that no other one gets the id of one of them."""
        self._held.extend(tensors)

    def look_behind(self, value: tf.Tensor) -> _Found:
        """Returns what was found for a tensor."""
        stack = [(value, False)]
        while stack:
            tensor, has_inputs = stack.pop()
            if has_inputs:
                self._found[id(tensor)] = self._combine(tensor)
            elif id(tensor) not in self._found:
                self.hold([tensor])
                # Nothing until its inputs are known, in a loop.
                self._found[id(tensor)] = self._known.get(id(tensor), (_NOT, ""))
                is_end = tensor.op.type in _HARMLESS or _is_of_one_example(tensor)
                if not (id(tensor) in self._known or is_end):
                    stack.append((tensor, True))
                    stack.extend((each, False) for each in tensor.op.inputs)
        return self._found[id(value)]

    def _combine(self, tensor: tf.Tensor) -> _Found:
        op = tensor.op
        if op.type == "Placeholder" and _is_each_replicas_own(tensor):
            return _OTHERWISE, ""
        inputs = [self._found[id(each)] for each in op.inputs]
        if op.type in _FUNCTIONS:
            key = id(op), len(op.outputs)  # a gradient adds outputs
            if key not in self._inside:
                self._inside[key] = _look_inside(op, inputs)
            depends, branch = self._inside[key][tensor.value_index]
        else:
            depends, branch = _unite(inputs)
            branch = op.type if _is_branch(op, inputs) else branch
            if depends and op.type in _EXTREMES and not _is_number(op.inputs[0]):
                depends = _BY_EXTREMES
        if not _is_number(tensor) and tensor.dtype != tf.resource:
            depends = _OTHERWISE
        return depends, branch


def _unite(found: Sequence[_Found]) -> _Found:
    branch = next((branch for _, branch in found if branch), "")
    return max((depends for depends, _ in found), default=_NOT), branch


def _is_number(tensor: tf.Tensor) -> bool:
    """Returns whether a tensor has no examples, whose number is unknown."""
    return bool(tensor.shape.is_fully_defined())


def _is_branch(op: tf.Operation, inputs: Sequence[_Found]) -> bool:
    """Returns whether an operation chooses by a number that depends on a replica's examples."""
    chooses = [
        bool(depends) and _is_number(each)
        for each, (depends, _) in zip(op.inputs, inputs, strict=True)
    ]
    if op.type == "Cast":
        return chooses[0] and op.inputs[0].dtype.is_floating and not op.outputs[0].dtype.is_floating
    return chooses[0] if op.type in _SELECTIONS else op.type in _BRANCHES and any(chooses)


def _look_inside(op: tf.Operation, inputs: Sequence[_Found]) -> Sequence[_Found]:
    """Returns what is found for the outputs of an operation that runs functions."""
    graphs = [
        _find_graph(op, function.name)
        for name in _FUNCTIONS[op.type]
        for function in tf.nest.flatten(op.get_attr(name))
    ]
    if op.type in _LOOPS:
        condition, body = graphs
        return _look_inside_loop(op, condition, body, inputs)
    first = int(op.type in _CONDITIONAL)
    found = [_call(graph, inputs[first:]) for graph in graphs]
    outputs = [_unite(each) for each in zip(*found, strict=True)]
    if first and inputs[0][0]:
        return [(max(depends, inputs[0][0]), op.type) for depends, _ in outputs]
    return outputs


def _look_inside_loop(
    op: tf.Operation, condition: Any, body: Any, inputs: Sequence[_Found]
) -> Sequence[_Found]:
    while True:
        after = [_unite(each) for each in zip(inputs, _call(body, inputs), strict=True)]
        if [depends for depends, _ in after] == [depends for depends, _ in inputs]:
            break
        inputs = after
    depends, _ = _unite(_call(condition, after))
    return [(_OTHERWISE, op.type)] * len(after) if depends == _OTHERWISE else after


def _call(graph: Any, inputs: Sequence[_Found]) -> list[_Found]:
    """Returns what is found for the outputs of a function, given its inputs."""
    search = _Search({id(each): found for each, found in zip(graph.inputs, inputs, strict=True)})
    return [search.look_behind(each) for each in graph.outputs]


def _find_graph(op: tf.Operation, name: str) -> Any:
    graph = op.graph
    while graph._get_function(name) is None:
        graph = graph.outer_graph
    return graph._get_function(name).graph


def _is_each_replicas_own(tensor: tf.Tensor) -> bool:
    """Returns whether a tensor is a variable to which each replica adds, such as a metric's."""
    outer = next((outer for outer, own in tensor.graph.captures if own is tensor), None)
    variable = getattr(outer, "_distributed_container", lambda: None)()
    is_first = getattr(variable, "aggregation", None) == tf.VariableAggregation.ONLY_FIRST_REPLICA
    return isinstance(variable, SyncOnReadVariable) and not is_first


def _is_of_one_example(tensor: tf.Tensor) -> bool:
    """Returns whether a tensor is that of one example, which parts show, or a number repeated."""
    op = tensor.op
    return op.type == "StridedSlice" and _is_number(tensor) and not _is_number(op.inputs[0])
