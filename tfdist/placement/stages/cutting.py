"""Divides a model's operations into stages: consecutive operations that run on one device.

A stage starts where an operation is named, or where the work and the memory of all stages are
balanced. The operations of a branch can be given to a device of their own.
"""

import fnmatch
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import keras

from tfdist.errors import TfdistError, make_unknown_name_error
from tfdist.placement.costs import Cost
from tfdist.placement.graph import Graph, Operation, list_variables

Share = Callable[[int, int], float]
"""The share of the operations between two positions."""

MOST_STAGES = 64  # of which the best number is chosen for rematerialization
_BATCH = 8  # examples that a device is assumed to compute at a time
_COPIES = 4  # of the weights: themselves, their gradients and two slots of an optimizer
_LARGEST_SHARE = 0.5  # of a device's memory that these may take before they are balanced


@dataclass(frozen=True, eq=False)
class Stage:
    """Operations that run one after the other on one device.

    Attributes:
      device: the number of its device among those of a replica.
      inputs: the numbers of the values that it takes from the model's inputs or other stages.
      outputs: (number of a value, position of the stage that takes it), or the number of stages
        for the model's own outputs.
    """

    name: str
    operations: tuple[Operation, ...]
    device: int
    inputs: tuple[int, ...]
    outputs: tuple[tuple[int, int], ...]

    @property
    def variables(self) -> list[keras.Variable]:
        """The variables that it reads or updates, each once."""
        return list_variables(self.operations)


def cut(graph: Graph, places: Sequence[int]) -> tuple[Stage, ...]:
    """Returns stages that start at the given places, and follow one another on the devices."""
    bounds = [0, *places, len(graph.operations)]
    parts = [graph.operations[a:b] for a, b in itertools.pairwise(bounds)]
    return connect(graph, parts, range(len(parts)))


def connect(
    graph: Graph, parts: Sequence[Sequence[Operation]], devices: Sequence[int]
) -> tuple[Stage, ...]:
    """Returns stages with these operations, on these devices; finds what they exchange."""
    maker = {n: s for s, part in enumerate(parts) for op in part for n in op.outputs}
    takes = [
        tuple(dict.fromkeys(n for op in part for n in op.inputs if maker.get(n) != stage))
        for stage, part in enumerate(parts)
    ]
    gives: list[list[tuple[int, int]]] = [[] for _ in parts]
    for stage, numbers in enumerate([*takes, graph.outputs]):
        for number in dict.fromkeys(numbers):
            if number in maker:
                gives[maker[number]].append((number, stage))
    return tuple(
        Stage(part[0].name, tuple(part), device, takes[stage], tuple(gives[stage]))
        for stage, (part, device) in enumerate(zip(parts, devices, strict=True))
    )


def find_starts(graph: Graph, names: Sequence[str]) -> list[int]:
    """Returns the positions of operations that stages start with.

    Args:
      names: the names of layers, or what these names begin with, before a "_" or "/".

    Raises:
      TfdistError: there is no such layer, or they are not in the order in which they run.
    """
    places = [_find_start(graph, name) for name in names]
    if places != sorted(set(places)):
        raise TfdistError(
            f"`stages={','.join(names)}` are not in the order in which the layers run, or two of "
            "them begin with the same layer. Name the first layer of each stage but the first."
        )
    return places


def assign(graph: Graph, devices: Mapping[str, int]) -> tuple[Stage, ...]:
    """Returns stages of which each has the operations of one device that can run together.

    Args:
      devices: pattern of names, such as `branch_1_*` -> number of a device; all other operations
        are computed on the first.

    Raises:
      TfdistError: a pattern fits no operation.
    """
    names = [operation.name for operation in graph.operations]
    for pattern in devices:
        if not fnmatch.filter(names, pattern):
            raise make_unknown_name_error("`branches`", pattern, names)
    chosen = [
        next((d for p, d in devices.items() if fnmatch.fnmatchcase(name, p)), 0) for name in names
    ]
    left = list(range(len(names)))
    known = set(graph.inputs)
    parts: list[list[Operation]] = []
    order: list[int] = []
    while left:
        device = chosen[left[0]]
        part = []
        for place in list(left):
            operation = graph.operations[place]
            if chosen[place] == device and known.issuperset(operation.inputs):
                part.append(operation)
                known.update(operation.outputs)
                left.remove(place)
        parts.append(part)
        order.append(device)
    return connect(graph, parts, order)


def balance(costs: Sequence[Cost], count: int, *, device_memory: float | None = None) -> list[int]:
    """Returns where to cut so that the largest share of a stage is as small as possible.

    The share of a stage is its part of the work, or of the activations if that is more. If the
    weights of a stage, their gradients and an optimizer's slots would then fill half of a device,
    they count with the activations.

    Args:
      device_memory: the bytes of the smallest device; None if the devices share their memory.

    Returns:
      The positions of the first operations of all stages but the first.
    """
    work = _add_up([cost.work for cost in costs])

    def divide(sizes: Sequence[float]) -> list[int]:
        memory = _add_up(sizes)
        return _divide(len(costs), count, lambda *at: max(_part(work, *at), _part(memory, *at)))

    places = divide([cost.activations for cost in costs])
    if device_memory is not None:
        state = _add_up([_COPIES * cost.weights for cost in costs])
        bounds = itertools.pairwise([0, *places, len(costs)])
        if max(state[end] - state[a] for a, end in bounds) > _LARGEST_SHARE * device_memory:
            return divide([_BATCH * cost.activations + _COPIES * cost.weights for cost in costs])
    return places


def balance_memory(graph: Graph, costs: Sequence[Cost]) -> list[int]:
    """Returns where to cut so that rematerialization keeps as little as possible in memory."""
    sizes = _add_up([cost.activations for cost in costs])
    most = min(len(costs), MOST_STAGES)
    counts = [count for count in range(1, most + 1) if count <= 16 or count % 8 == 0]
    found = [_divide(len(costs), count, functools.partial(_part, sizes)) for count in counts]
    return min(found, key=lambda places: count_kept(cut(graph, places), costs, graph))


def count_kept(stages: Sequence[Stage], costs: Sequence[Cost], graph: Graph) -> float:
    """Returns the bytes per example that rematerialization keeps at a time.

    These are the values between stages, and those of the largest stage.
    """
    of_operation = dict(zip(graph.operations, (c.activations for c in costs), strict=True))
    size = {n: of_operation[op] for op in graph.operations for n in op.outputs[:1]}
    between = {n for stage in stages for n, _ in stage.outputs}
    inside = (
        sum(of_operation[op] for op in stage.operations if not between.intersection(op.outputs))
        for stage in stages
    )
    return sum(size.get(n, 0.0) for n in between) + max(inside)


def _find_start(graph: Graph, name: str) -> int:
    for place, operation in enumerate(graph.operations):
        if operation.name == name or operation.name.startswith((f"{name}_", f"{name}/")):
            return place
    raise make_unknown_name_error("`stages`", name, [op.name for op in graph.operations])


def _add_up(values: Sequence[float]) -> list[float]:
    total, sums = 0.0, [0.0]
    for value in values:
        total += value
        sums.append(total)
    return sums


def _part(sums: Sequence[float], first: int, end: int) -> float:
    return (sums[end] - sums[first]) / (sums[-1] or 1.0)


def _divide(length: int, count: int, share: Share) -> list[int]:
    """Returns the cuts of a sequence whose largest share is smallest, by bisection."""
    count = min(count, length)
    low, high = 0.0, share(0, length)
    best = _cut_at(length, high, share)
    for _ in range(40):
        limit = (low + high) / 2
        places = _cut_at(length, limit, share)
        if places is not None and len(places) < count:
            best, high = places, limit
        else:
            low = limit
    return _fill(best or [], length, count, share)


def _cut_at(length: int, limit: float, share: Share) -> list[int] | None:
    """Returns the fewest cuts with which no share exceeds the limit; None if one must."""
    places, first = [], 0
    for place in range(length):
        if share(place, place + 1) > limit:
            return None
        if share(first, place + 1) > limit:
            places.append(place)
            first = place
    return places


def _fill(places: list[int], length: int, count: int, share: Share) -> list[int]:
    """Adds cuts to the largest stages until there are enough."""
    while len(places) < count - 1:
        bounds = [0, *places, length]
        pairs = [(a, b) for a, b in itertools.pairwise(bounds) if b - a > 1]
        first, end = max(pairs, key=lambda pair: share(*pair))
        middle = min(range(first + 1, end), key=lambda m: max(share(first, m), share(m, end)))
        places = sorted([*places, middle])
    return places
