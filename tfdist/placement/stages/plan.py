"""Decides which stages a model has, and on which device of a replica each of them runs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from tfdist.devices import find_memory_limit
from tfdist.errors import TfdistError
from tfdist.placement.costs import Cost, estimate_costs
from tfdist.placement.graph import Graph, make_graph
from tfdist.placement.groups import find_groups
from tfdist.placement.options import Layers, Placement
from tfdist.placement.stages import cutting
from tfdist.placement.stages.call import Draws, StagedCall
from tfdist.placement.stages.cutting import Stage


@dataclass(frozen=True, eq=False)
class Plan:
    """How a model is computed by stages.

    Attributes:
      groups: the first device of each local replica -> all devices of the replica; empty if the
        stages run where the replica runs.
    """

    graph: Graph
    stages: tuple[Stage, ...]
    groups: Mapping[str, Sequence[str]]
    recomputes: bool
    costs: tuple[Cost, ...]

    def make_call(self, *, draws: Draws, pool: object) -> StagedCall:
        """Returns what takes the place of the model's call."""
        del pool  # each stage sees the whole batch of its replica
        return StagedCall(
            self.graph, self.stages, self.groups, recomputes=self.recomputes, draws=draws
        )

    def summarize(self, *, micro_batches: int) -> dict[str, Any]:
        """Returns the entry `placement` of a run's summary.

        For each stage it has the name of the first layer, the device, the estimated share of the
        work, the bytes of the weights, and the bytes of an example's activations. `bubble_share` is
        the share of the time in which a device waits for others, estimated from the work.

        Source: Huang et al. 2019 (arXiv:1811.06965), section 2.3, for the bubble.
        """
        if not self.groups:
            return {}
        of_operation = dict(zip(self.graph.operations, self.costs, strict=True))
        total = sum(cost.work for cost in self.costs) or 1.0
        group = next(iter(self.groups.values()))
        work = [0.0] * len(group)
        stages = []
        for stage in self.stages:
            costs = [of_operation[operation] for operation in stage.operations]
            share = sum(cost.work for cost in costs) / total
            work[stage.device] += share
            stages.append(
                {
                    "name": stage.name,
                    "device": group[stage.device],
                    "work_share": round(share, 4),
                    "weight_bytes": round(sum(cost.weights for cost in costs)),
                    "activation_bytes": round(sum(cost.activations for cost in costs)),
                }
            )
        seconds = (sum(work) + (micro_batches - 1) * max(work)) / micro_batches
        return {"placement": stages, "bubble_share": round(1 - 1 / (len(group) * seconds), 4)}


def make_plan(
    model: keras.Model,
    placement: Placement | None,
    strategy: tf.distribute.Strategy,
    *,
    recomputes: bool,
) -> Plan:
    """Returns how a model is computed by stages, for which there must be enough devices."""
    graph = make_graph(model)
    costs = tuple(estimate_costs(graph))
    if not isinstance(placement, Layers):
        places = cutting.balance_memory(graph, costs)
        return Plan(graph, cutting.cut(graph, places), {}, recomputes, costs)
    groups = find_groups(strategy, placement.devices)
    count = len(next(iter(groups.values())))
    if placement.branches:
        branches = placement.parse_branches()
        if max(branches.values()) >= count:
            raise TfdistError(
                f"`branches` names the device {max(branches.values())}, but a replica has {count}. "
                "Number the devices of a replica from 0."
            )
        found = cutting.assign(graph, branches)
    elif placement.stages:
        found = cutting.cut(graph, cutting.find_starts(graph, placement.stages))
        if len(found) > count:
            raise TfdistError(
                f"`stages` makes {len(found)} stages, but a replica has {count} devices. Name "
                f"{count - 1} layers, or give more devices."
            )
    else:
        limits = [find_memory_limit(name) for group in groups.values() for name in group]
        memory = min((limit for limit in limits if limit is not None), default=None)
        found = cutting.cut(graph, cutting.balance(costs, count, device_memory=memory))
    return Plan(graph, found, groups, recomputes, costs)
