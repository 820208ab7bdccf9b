"""What the operations of a model cost: floating-point operations, and bytes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfdist.placement.graph import Graph

FLOPS_PER_BYTE = 10.0
"""The operations that a device computes while it reads or writes a byte of memory.

An H100 computes 989e12 operations in bfloat16 and moves 3.35e12 bytes per second, which is 295 per
byte; a core of a server's CPU about 50e9 and 5e9. What decides between two stages is mostly whether
an operation is a convolution or matrix product at all, so the ratio of the smaller device is used.

Source: NVIDIA H100 data sheet; `benchmarks/RESULTS.md` for the CPU.
"""


_EXAMPLES = 2  # some layers cannot be computed for one
_UNKNOWN = 128


@dataclass(frozen=True)
class Cost:
    """The cost of an operation, for one example.

    Attributes:
      flops: the floating-point operations of its convolutions and matrix products.
      activations: the bytes of its outputs.
      weights: the bytes of its variables, which do not depend on the number of examples.
    """

    flops: float
    activations: float
    weights: float

    @property
    def work(self) -> float:
        """The time it takes, in operations that could be computed meanwhile."""
        return self.flops + FLOPS_PER_BYTE * 2 * self.activations


def estimate_costs(graph: Graph) -> list[Cost]:
    """Returns the cost of each operation of a model, for one example.

    An unknown size, such as an image's height or the length of a text, counts as 128. The balance
    between the operations hardly depends on it.
    """
    flops, activations = _measure(graph)
    seen: set[int] = set()
    costs = []
    for place, operation in enumerate(graph.operations):
        own = [variable for variable in operation.variables if id(variable) not in seen]
        seen.update(map(id, own))
        weights = sum(count_bytes(variable.shape, variable.dtype) for variable in own)
        costs.append(Cost(flops.get(_scope(place), 0.0), activations[place], weights))
    return costs


def count_bytes(shape: Sequence[int | None], dtype: tf.DType | str) -> int:
    """Returns the size of a tensor in bytes; unknown sizes count as 1."""
    return math.prod(size or 1 for size in shape) * tf.as_dtype(dtype).size


def _measure(graph: Graph) -> tuple[dict[str, float], list[float]]:
    """Returns name of an operation's scope -> floating-point operations; and bytes of outputs."""
    bytes_of: list[float] = []

    @tf.function(autograph=False)
    def run(*inputs: tf.Tensor) -> list[Any]:
        del bytes_of[:]
        values = dict(zip(graph.inputs, inputs, strict=True))
        for place, operation in enumerate(graph.operations):
            with tf.name_scope(_scope(place)):
                operation.run(values, training=False)
            # The converted inputs of a nested model are the same tensors as before.
            new = operation.outputs if operation.node is not None else ()
            sizes = [count_bytes(values[n].shape, values[n].dtype) for n in new]
            bytes_of.append(sum(sizes) / _EXAMPLES)
        return [values[number] for number in graph.outputs]

    specs = [
        tf.TensorSpec([_EXAMPLES, *(size or _UNKNOWN for size in x.shape[1:])], x.dtype)
        for x in graph.model.inputs
    ]
    traced = run.get_concrete_function(*specs).graph
    builder = tf.compat.v1.profiler.ProfileOptionBuilder
    options = builder(builder.float_operation()).with_empty_output().build()
    found = tf.compat.v1.profiler.profile(traced, cmd="scope", options=options)
    totals: dict[str, float] = {}
    nodes = list(found.children)
    while nodes:
        node = nodes.pop()
        scope = node.name.partition("/")[0]
        totals[scope] = totals.get(scope, 0.0) + node.float_ops / _EXAMPLES
        nodes += node.children
    return totals, bytes_of


def _scope(place: int) -> str:
    return f"operation_{place}"
