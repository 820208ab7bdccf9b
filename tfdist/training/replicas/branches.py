"""Finds what a step takes from a branch of each replica's own numbers.

`p.assign(clip(p + mean(score), 0, 1))` is not a mean over examples: where one replica's value is
clipped and another's is not, their mean is not what one device assigns. So is a loss
`maximum(mean(losses), 0.1)`. The first batch may not show it, because it may lie on one side of the
limit only. The trace shows it: a number without examples that depends on the replica's examples and
that a function with a kink or a jump takes.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfdist.replacing import find_function, replaced

_BRANCHES = {
    *("Abs", "ArgMax", "ArgMin", "Ceil", "ClipByValue", "Floor", "Maximum", "Minimum"),
    *("Equal", "Greater", "GreaterEqual", "Less", "LessEqual", "NotEqual"),
    *("Relu", "Relu6", "Rint", "Round", "Sign"),
}
_CONDITIONAL = {"If", "Select", "SelectV2", "StatelessIf"}  # by their first input
# They tell sizes, which parts of different sizes show, and whether something went wrong.
_HARMLESS = {"IsFinite", "IsInf", "IsNan", "OnesLike", "Rank", "Shape", "Size", "ZerosLike"}


class Branches:
    """The variables and losses of one trace that depend on a branch.

    Attributes:
      found: what depends on it -> type of the operation.
    """

    def __init__(self) -> None:
        self.found: dict[str, str] = {}
        self._common: dict[int, tf.Tensor] = {}  # equal on all replicas, by id

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Remembers what replicas reduce. Opened around all replicas."""
        self.found, self._common = {}, {}
        original = find_function(tf.distribute.ReplicaContext, "all_reduce")

        @functools.wraps(original)
        def all_reduce(*args: Any, **kwargs: Any) -> Any:
            reduced = original(*args, **kwargs)
            tensors = [each for each in tf.nest.flatten(reduced) if isinstance(each, tf.Tensor)]
            self._common |= {id(each): each for each in tensors}
            return reduced

        with replaced(tf.distribute.ReplicaContext, "all_reduce", all_reduce):
            yield

    def look(self, name: str, value: tf.Tensor) -> None:
        """Looks at a value of a replica, unless it runs eagerly."""
        if isinstance(value, tf.Tensor) and not hasattr(value, "numpy"):
            branch = self._find_branch(value)
            if branch:
                self.found.setdefault(name, branch)

    def _find_branch(self, value: tf.Tensor) -> str:
        """Returns the type of the last branch of the replica's own numbers, or nothing."""
        depends: dict[int, bool] = {}  # whether a tensor depends on the replica's examples
        branches: list[str] = []
        stack = [(value, False)]
        while stack:
            tensor, has_inputs = stack.pop()
            if id(tensor) in depends and not has_inputs:
                continue
            op = tensor.op
            if has_inputs:
                depends[id(tensor)] = any(depends[id(each)] for each in op.inputs)
                is_by_condition = op.type in _CONDITIONAL and depends[id(op.inputs[0])]
                if is_by_condition or (depends[id(tensor)] and op.type in _BRANCHES):
                    branches.append(op.type)
            elif id(tensor) in self._common or op.type in _HARMLESS or _is_of_one_example(op):
                depends[id(tensor)] = False
            elif not tensor.shape.is_fully_defined() and tensor.dtype != tf.resource:
                depends[id(tensor)] = True
            else:
                depends[id(tensor)] = False  # until its inputs are known, in a loop
                stack.append((tensor, True))
                stack.extend((each, False) for each in op.inputs)
        return branches[-1] if branches else ""


def _is_of_one_example(op: tf.Operation) -> bool:
    """Returns whether an operation takes one example, which parts show, or a number repeated."""
    is_slice = op.type == "StridedSlice"
    return is_slice and not op.inputs[0].shape.is_fully_defined()
