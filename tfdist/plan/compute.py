"""How long a model's layers take to compute, on one device and divided over several."""

from collections.abc import Sequence
from dataclasses import dataclass

from tfdist.plan.hardware import Hardware, Measured
from tfdist.plan.setup import Setup
from tfdist.plan.workload import TRAINING_PASSES, Layer, Workload

# Times that a step reads or writes an image more, to normalize it with the moments of all replicas:
# forward, the image and its discarded output; backward, the same and three for the correction.
_REREADS = 7
# Operations of a layer more, to pool these moments and the sums of their gradients.
_POOLING = 57


@dataclass(frozen=True)
class Computation:
    """The time in which a replica computes its examples.

    Attributes:
      computation_s: forward and backward pass, and update, of the busiest device.
      bubble_s: time in which the devices of a replica wait for each other.
      exchange_s: time in which they exchange activations.
      layers_s: the seconds of each layer, forward and backward, without communication.
    """

    computation_s: float
    bubble_s: float
    exchange_s: float
    layers_s: tuple[float, ...]


def time_layers(workload: Workload, hardware: Hardware, rows: float) -> list[float]:
    """Returns the seconds of each layer in a training step: forward and backward pass.

    A layer is limited by its operations, or by the bytes that it moves (the roofline model). If the
    hardware's file has a measurement of this model, the layers' shares are as estimated and their
    sum is as measured.

    Args:
      rows: the examples that it computes at a time.

    Source: Williams, Waterman and Patterson 2009, "Roofline: an insightful visual performance
    model for multicore architectures".
    """
    speed = hardware.find_peak(workload.precision) * hardware.peak_share
    passes = TRAINING_PASSES + (workload.rematerialized is not None)
    times = [
        passes
        * (max(rows * x.flops / speed, hardware.time_memory(rows * x.moved)) + hardware.operation_s)
        if x.moved or x.flops
        else 0.0
        for x in workload.layers
    ]
    measured = find_measured(workload, hardware)
    if measured is None:
        return times
    return [time / sum(times) * rows * measured.example_s for time in times]


def time_update(workload: Workload, hardware: Hardware, share: float = 1.0) -> float:
    """Returns the seconds of the optimizer's update, or of a share of it: it moves memory.

    What a measured step takes whatever its number of examples is counted here, too.
    """
    measured = find_measured(workload, hardware)
    if measured is not None:
        return measured.step_s
    # Reads gradient, weight and state; writes weight and state.
    moved = workload.gradients * (3 + 2 * workload.optimizer) * share
    return hardware.time_memory(moved)


def find_measured(workload: Workload, hardware: Hardware) -> Measured | None:
    """Returns the measurement of this model on all cores, if the hardware's file has one."""
    return next(
        (
            m
            for m in hardware.measured
            if m.parameters == count_parameters(workload)
            and abs(m.flops - workload.flops) <= 0.01 * workload.flops
            and m.precision == workload.precision
            and m.share == 1
        ),
        None,
    )


def count_parameters(workload: Workload) -> int:
    """Returns the number of a model's parameters, all as float32."""
    return round(workload.weights / 4)


def compute_replica(setup: Setup, workload: Workload, hardware: Hardware, rows: int) -> Computation:
    """Returns the time in which a replica computes its examples on all of its devices."""
    if setup.placement == "layers":
        return _compute_stages(setup, workload, hardware, rows)
    slower, slower_update = _share_processor(setup, workload, hardware)
    parts = 1 if hardware.shares_cores else setup.parts
    count = setup.micro_batches
    layers = time_layers(workload, hardware, rows / parts / count)
    layers = [count * slower * time for time in layers]
    share = 1 / setup.replicas if setup.shards_optimizer else 1.0
    update = slower_update * time_update(workload, hardware, share)
    normalizing = _time_normalization(setup, workload, hardware, rows)
    if setup.placement == "strips":
        update += normalizing / parts  # each device has its part of the images
        return _compute_strips(setup, workload, hardware, rows, layers, update)
    if setup.placement == "shards":
        return _compute_shards(setup, workload, hardware, rows, layers, update, normalizing)
    return Computation(sum(layers) + update + normalizing, 0.0, 0.0, tuple(layers))


def _share_processor(setup: Setup, workload: Workload, hardware: Hardware) -> tuple[float, float]:
    """Returns how much longer layers and update take because the replicas share a processor.

    They compute at the same time if one of them leaves cores idle, and in turns otherwise.
    """
    if not hardware.shares_cores:
        return 1.0, 1.0
    count = setup.workers * setup.replicas
    starting = float(count)
    if setup.placement == "strips":
        # What a step takes whatever its number of examples is mostly that of starting operations.
        # Every device has as many, and two more where it needs rows of its neighbors, or columns.
        operations = [x for x in workload.layers if x.moved or x.flops]
        near = sum(_count_border(setup, x) > 0 for x in operations) / max(1, len(operations))
        starting *= setup.parts * (1 + 2 * near * sum(count > 1 for count in setup.fields))
    found = find_measured(workload, hardware)
    busy = (found.example_busy, found.step_busy) if found else (1.0, 1.0)
    return max(1.0, count * busy[0]), max(1.0, starting * busy[1])


def _time_normalization(setup: Setup, workload: Workload, hardware: Hardware, rows: int) -> float:
    """Returns the seconds that batch normalization of several replicas or strips takes besides."""
    apart = setup.servers or setup.traits.local_updates
    together = setup.replicas if apart else setup.sharing
    is_divided = setup.placement == "strips"
    if together == 1 and not is_divided:
        return 0.0
    least = 1 if is_divided else 2
    layers = [layer for layer in workload.layers if layer.sums >= least]
    taken = sum(map(workload.count_taken, layers))
    in_turns = setup.workers * setup.replicas if hardware.shares_cores else 1
    pooling = len(layers) * _POOLING * hardware.operation_s
    return hardware.time_memory(_REREADS * rows * taken * in_turns) + pooling


def cut_stages(workload: Workload, hardware: Hardware, count: int) -> list[tuple[int, int]]:
    """Returns the first and the end position of the layers of each stage, as training cuts them."""
    from tfdist.placement.stages.cutting import balance

    memory = None if hardware.shares_cores else hardware.memory_bytes
    places = balance(workload.layers, count, device_memory=memory)  # type: ignore[arg-type]
    return list(zip([0, *places], [*places, len(workload.layers)], strict=True))


def count_crossing(workload: Workload, stages: Sequence[tuple[int, int]]) -> list[float]:
    """Returns the bytes per example that each stage but the first takes from stages before it."""
    taken = []
    for first, end in stages[1:]:
        needed = {i for x in workload.layers[first:end] for i in x.inputs if i < first}
        taken.append(sum(workload.layers[i].activations for i in needed))
    return taken


def time_pipeline(stages_s: Sequence[float], micro_batches: int) -> float:
    """Returns the seconds in which stages, each on a device, compute all micro-batches of a step.

    The slowest stage computes all of them; the others fill and drain the pipeline.

    Args:
      stages_s: the seconds of each stage for a micro-batch.

    Source: Huang et al. 2019 (arXiv:1811.06965), section 2.3.
    """
    return sum(stages_s) + (micro_batches - 1) * max(stages_s)


def _compute_stages(setup: Setup, workload: Workload, hardware: Hardware, rows: int) -> Computation:
    count = setup.micro_batches
    part = rows / count
    slower, slower_update = _share_processor(setup, workload, hardware)
    layers = [slower * time for time in time_layers(workload, hardware, part)]
    stages = cut_stages(workload, hardware, setup.parts)
    times = [sum(layers[a:b]) for a, b in stages]
    crossing = count_crossing(workload, stages)
    hops = [2 * hardware.time(hardware.inside, part * b) for b in crossing]
    update = slower_update * time_update(workload, hardware)
    update += _time_normalization(setup, workload, hardware, rows)
    layers_s = tuple(count * time for time in layers)
    if hardware.shares_cores:
        return Computation(count * sum(times) + update, 0.0, count * sum(hops), layers_s)
    whole, busy = time_pipeline(times, count), count * sum(times) / len(stages)
    return Computation(busy + update / len(stages), whole - busy, sum(hops), layers_s)


def _compute_strips(
    setup: Setup,
    workload: Workload,
    hardware: Hardware,
    rows: int,
    layers: list[float],
    update: float,
) -> Computation:
    """Each device computes its part; layers without a rule get whole images on the first device."""
    parts = 1 if hardware.shares_cores else setup.parts
    divided, whole, exchange = 0.0, 0.0, 0.0
    for layer, time in zip(workload.layers, layers, strict=True):
        if layer.halo < 0:
            whole += time * parts
            exchange += 2 * hardware.time(hardware.inside, rows * workload.count_taken(layer))
            continue
        divided += time
        border = _count_border(setup, layer)
        if border > 0:
            # The rows of a device are copied to be beside those of its neighbors, and back.
            taken = rows * workload.count_taken(layer) / parts
            divided += hardware.time_memory(4 * taken)
            # All neighbors at the same time; forward, and their gradients backward.
            exchange += 2 * hardware.time(hardware.inside, rows * border)
    exchange += hardware.time(hardware.inside, 2 * workload.gradients)  # weights are on the first
    busy = divided + whole / parts + update
    return Computation(busy, whole * (1 - 1 / parts), exchange, tuple(layers))


def _count_border(setup: Setup, layer: Layer) -> float:
    """Returns the bytes per example that a part of an image takes from its neighbors, at most."""
    rows, columns = setup.fields
    return min(rows - 1, 2) * layer.halo / columns + min(columns - 1, 2) * layer.side / rows


def _compute_shards(
    setup: Setup,
    workload: Workload,
    hardware: Hardware,
    rows: int,
    layers: list[float],
    update: float,
    normalizing: float,
) -> Computation:
    """The devices compute parts of a layer's units, and gather its outputs."""
    parts = 1 if hardware.shares_cores else setup.parts
    divided, whole, exchange = 0.0, normalizing, 0.0
    for layer, time in zip(workload.layers, layers, strict=True):
        if layer.is_divisible:
            divided += time
            taken = (setup.parts - 1) / setup.parts * rows * layer.activations
            exchange += 2 * hardware.time(hardware.inside, taken, messages=setup.parts - 1)
        else:
            whole += time * parts
    busy = divided + (whole + update) / parts
    return Computation(busy, whole * (1 - 1 / parts), exchange, tuple(layers))
