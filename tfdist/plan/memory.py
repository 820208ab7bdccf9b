"""How much memory each device needs."""

from dataclasses import dataclass

from tfdist.plan.compute import cut_stages
from tfdist.plan.hardware import Hardware
from tfdist.plan.setup import Setup
from tfdist.plan.workload import Workload

_PACK = 4 * 2.0**20  # bytes that local SGD averages at a time
_WORKER = 110 * 2.0**20  # of a process that has peers: threads, connections and their buffers
USABLE = 0.9
"""The share of a device's memory that a run may plan with, as the search for a batch size."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The bytes that the fullest device needs.

    Attributes:
      weights, gradients, optimizer, activations: of the model.
      workspace: what is held only for a while: the gradients of the largest layer's outputs, and
        the copies that an all-reduce sends.
      process: what is taken before there is a model.
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float
    workspace: float
    process: float

    @property
    def total(self) -> float:
        """All of it."""
        return (
            self.weights
            + self.gradients
            + self.optimizer
            + self.activations
            + self.workspace
            + self.process
        )


def estimate_memory(setup: Setup, workload: Workload, hardware: Hardware, rows: int) -> Memory:
    """Returns what the fullest device needs; for virtual devices, what their process needs.

    Args:
      rows: the examples of a replica.
    """
    weights, gradients = workload.weights, workload.gradients
    optimizer = workload.optimizer * gradients
    # A pipeline keeps the micro-batches that are in flight.
    parts = 1 if setup.placement == "layers" else setup.micro_batches
    activations = workload.activations * rows / parts
    largest = max((x.activations for x in workload.layers), default=0.0) * rows
    in_process = setup.replicas * setup.parts if hardware.shares_cores else 1
    if setup.placement == "layers" and not hardware.shares_cores:
        first, end = max(
            cut_stages(workload, hardware, setup.parts),
            key=lambda s: _weigh(workload, *s, rows=rows),
        )
        layers = workload.layers[first:end]
        weights = sum(x.weights for x in layers)
        gradients = sum(x.gradients for x in layers)
        optimizer = workload.optimizer * gradients
        share = sum(x.activations for x in layers) / sum(x.activations for x in workload.layers)
        activations *= share
    elif setup.placement == "shards" and not hardware.shares_cores:
        share = sum(x.weights for x in workload.layers if x.is_divisible) / (weights or 1.0)
        kept = 1 - share + share / setup.parts
        weights, gradients, optimizer = weights * kept, gradients * kept, optimizer * kept
    elif setup.placement == "strips" and not hardware.shares_cores:
        whole = sum(x.activations for x in workload.layers if x.halo < 0) * rows / parts
        activations = whole + (activations - whole) / setup.parts
        largest /= setup.parts
    if setup.shards_optimizer:
        optimizer /= setup.replicas
    copies = setup.replicas if hardware.shares_cores else 1
    worker = _WORKER if hardware.sends_itself and setup.workers > 1 else 0.0
    if setup.traits.shares_variables:
        copies = 1
        if not hardware.shares_cores:
            optimizer = 0.0  # on the host
    packed = gradients if setup.sharing > 1 else 0.0
    if setup.traits.local_updates and setup.workers > 1:
        # A pack of weights and slots: weighted, sent, received, their mean, and its parts.
        most = max((x.weights for x in workload.layers), default=0.0)
        packed = 5 * min(gradients + optimizer, max(_PACK, most))
    if setup.placement == "strips":
        # The first device has the gradients of each part, and their sum.
        packed += gradients * setup.parts
    processes = in_process if hardware.shares_cores and setup.placement == "none" else 1
    return Memory(
        weights=weights * copies,
        gradients=gradients * copies,
        optimizer=optimizer * copies,
        activations=activations * processes,
        workspace=2 * largest / setup.micro_batches * processes + packed * copies,
        process=hardware.process_bytes + worker,
    )


def _weigh(workload: Workload, first: int, end: int, *, rows: int) -> float:
    layers = workload.layers[first:end]
    state = sum(x.weights + (1 + workload.optimizer) * x.gradients for x in layers)
    return state + rows * sum(x.activations for x in layers)
