"""How long the replicas of a setup communicate at each step, and how much of it is not hidden."""

from collections.abc import Sequence

from tfdist.plan.collectives import (
    find_exposed,
    make_path,
    time_all_reduce,
    time_hierarchical,
    time_reduction_to_one,
    time_ring,
)
from tfdist.plan.compute import Computation
from tfdist.plan.hardware import Hardware
from tfdist.plan.setup import Setup
from tfdist.plan.workload import TRAINING_PASSES, Workload

_SMALL = 1024.0  # bytes of the moments of a layer's channels
_COPIES = 4  # workers read and write tensors to send them together, and again to take them apart


def time_communication(
    setup: Setup, workload: Workload, hardware: Hardware, computed: Computation
) -> float:
    """Returns the seconds per step in which replicas communicate and do not compute."""
    traits = setup.traits
    if traits.shares_variables:
        # Each device reads the weights from the host and leaves its gradients there.
        num_bytes = workload.gradients * (setup.replicas if hardware.shares_cores else 1)
        return hardware.time(hardware.host, 2 * num_bytes, messages=2)
    if traits.has_servers:
        # The weights, then the gradients. On one machine, a link is measured by a ring, which sends
        # in both directions at the same time.
        directions = 1 if hardware.shares_cores else 2
        return hardware.time(hardware.between, directions * workload.gradients, messages=2)
    if setup.sharing == 1:
        return 0.0
    if traits.local_updates:
        state = workload.gradients * (1 + workload.optimizer)
        apart = Setup(strategy="mirrored", replicas=setup.replicas)
        inside = time_communication(apart, workload, hardware, computed)
        network = make_path(hardware, hardware.between)
        sync = time_all_reduce(setup.workers, state, network) + _time_copies(setup, hardware, state)
        sync += _time_start(setup, workload, hardware)
        return inside + sync / workload.sync_every
    small = workload.sums * transfer(setup, hardware, _SMALL, all_reduce=workload.all_reduce)
    gradients = _time_gradients(setup, workload, hardware, computed)
    return small + gradients + _time_start(setup, workload, hardware)


def transfer(
    setup: Setup, hardware: Hardware, num_bytes: float, *, all_reduce: str = "auto"
) -> float:
    """Returns the seconds of an all-reduce over all replicas of a setup."""
    inside = make_path(hardware, hardware.inside)
    between = make_path(hardware, hardware.between)
    if setup.traits.fixes_shapes:
        return time_ring(setup.devices, num_bytes, inside)
    if setup.workers == 1 and all_reduce == "reduction_to_one_device":
        return time_reduction_to_one(setup.replicas, num_bytes, inside)
    copies = _time_copies(setup, hardware, num_bytes)
    return copies + time_hierarchical(setup.replicas, setup.workers, num_bytes, inside, between)


def _time_copies(setup: Setup, hardware: Hardware, num_bytes: float) -> float:
    """Returns the seconds that workers need to copy tensors into messages, and out of them."""
    if setup.workers == 1:
        return 0.0
    together = setup.workers if hardware.shares_cores else 1
    return hardware.time_memory(_COPIES * num_bytes * together)


def _time_start(setup: Setup, workload: Workload, hardware: Hardware) -> float:
    """Returns the seconds in which hosts start an exchange of gradients between accelerators.

    Each gradient is copied into a buffer with others, and out of it, by an operation each.
    Processes have to agree first; the replicas of `mirrored` are in one process.
    """
    if hardware.is_tpu or hardware.sends_itself:
        return 0.0
    agreement = hardware.exchange_s if setup.traits.has_workers else 0.0
    return agreement + 2 * workload.tensors * hardware.operation_s


def list_ready(workload: Workload, layers_s: Sequence[float]) -> list[tuple[float, float]]:
    """Returns when the backward pass, which begins at 0, knows each gradient, and its bytes."""
    time, ready = 0.0, []
    backward = (TRAINING_PASSES - 1) / TRAINING_PASSES
    for layer, seconds in zip(reversed(workload.layers), reversed(layers_s), strict=True):
        time += seconds * backward
        ready.append((time, layer.gradients))
    return ready


def _time_gradients(
    setup: Setup, workload: Workload, hardware: Hardware, computed: Computation
) -> float:
    """Returns the seconds of the gradients' all-reduce that the backward pass does not hide.

    `multi_worker_mirrored` sums packs as soon as they are known, `mirrored` everything at the end,
    and a TPU's compiler in between. If a processor computes and sends, nothing is hidden.
    """
    has_packs = setup.traits.has_workers or setup.traits.fixes_shapes
    share = workload.compressed if setup.workers > 1 else 1.0
    pack = workload.bytes_per_pack * share if has_packs else 0.0
    # Stages and shards have the gradients of their own weights, and sum them at the same time.
    apart = setup.parts if setup.placement in ("layers", "shards") else 1
    parts = apart if setup.workers == 1 else 1
    ready = [(time, size * share / parts) for time, size in list_ready(workload, computed.layers_s)]
    if hardware.sends_itself:
        ready = [(0.0, size) for _, size in ready]
    return find_exposed(
        ready,
        lambda size: transfer(setup, hardware, size, all_reduce=workload.all_reduce),
        bytes_per_pack=pack,
    )
