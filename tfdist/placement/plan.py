"""Decides where the parts of a model run: its stages, and the devices of each replica."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import keras
import tensorflow as tf

from tfdist import devices
from tfdist.errors import TfdistError
from tfdist.placement import stages as stages_module
from tfdist.placement.costs import estimate_costs
from tfdist.placement.graph import Graph, make_graph
from tfdist.placement.options import Layers, Placement
from tfdist.placement.stages import Stage

_DEFAULT = type(tf.distribute.get_strategy())  # the strategy outside of all scopes


@dataclass(frozen=True, eq=False)
class Plan:
    """How a model is computed by stages.

    Attributes:
      graph: the model's operations.
      stages: its stages, in the order in which they run.
      groups: the first device of each local replica -> all devices of the replica; empty if the
        stages run where the replica runs.
      recomputes: whether activations are recomputed in the backward pass.
    """

    graph: Graph
    stages: tuple[Stage, ...]
    groups: Mapping[str, Sequence[str]]
    recomputes: bool


def make_plan(
    model: keras.Model,
    placement: Placement | None,
    strategy: tf.distribute.Strategy,
    *,
    recomputes: bool,
) -> Plan | None:
    """Returns how a model is computed by stages; None if it is computed as a whole.

    Args:
      model: a built model.
      placement: where its parts run.
      strategy: the strategy in whose scope it was built.
      recomputes: whether activations are recomputed in the backward pass.

    Raises:
      TfdistError: the model cannot be divided, or there are not enough devices.
    """
    if placement is None and not recomputes:
        return None
    graph = make_graph(model)
    costs = estimate_costs(graph)
    if not isinstance(placement, Layers):
        places = stages_module.balance_memory(graph, costs)
        return Plan(graph, stages_module.cut(graph, places, devices=[0]), {}, recomputes)
    groups = find_groups(strategy, placement.devices)
    count = len(next(iter(groups.values())))
    if placement.branches:
        branches = placement.parse_branches()
        if max(branches.values()) >= count:
            raise TfdistError(
                f"`branches` names the device {max(branches.values())}, but a replica has {count}. "
                "Number the devices of a replica from 0."
            )
        found = stages_module.assign(graph, branches)
    elif placement.stages:
        found = stages_module.cut(graph, stages_module.find_starts(graph, placement.stages))
        if len(found) > count:
            raise TfdistError(
                f"`stages` makes {len(found)} stages, but a replica has {count} devices. Name "
                f"{count - 1} layers, or give more devices."
            )
    else:
        found = stages_module.cut(graph, stages_module.balance(costs, count))
    return Plan(graph, found, groups, recomputes)


def find_groups(strategy: tf.distribute.Strategy, size: int) -> dict[str, tuple[str, ...]]:
    """Returns the first device of each of this process's replicas -> all devices of the replica.

    Every replica gets its own device first, and then its share of the devices that are left.

    Args:
      strategy: the strategy.
      size: devices of each replica; 0 for as many as there are.

    Raises:
      TfdistError: there are fewer than two for a replica.
    """
    everything = devices.list_devices()
    if isinstance(strategy, _DEFAULT):
        own = everything[:1]
    else:
        own = tuple(devices.shorten(name) for name in strategy.extended.worker_devices)
    left = [name for name in everything if name not in own]
    each = len(left) // len(own)
    most = 1 + each
    if most < 2 or size > most:
        wanted = max(size, 2) * len(own)
        raise TfdistError(
            f"`placement` needs {max(size, 2)} devices for each of {len(own)} replicas, but there "
            f"are {len(everything)} ({', '.join(everything)}). Give `virtual_devices={wanted}`, or "
            "fewer replicas."
        )
    count = (size or most) - 1
    return {
        name: (name, *left[place * each : place * each + count]) for place, name in enumerate(own)
    }
