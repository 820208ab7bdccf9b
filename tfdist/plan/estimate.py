"""The estimate of a setup: memory, time of a step, throughput, and what is wrong with it."""

import math
from dataclasses import dataclass, replace

from tfdist.plan.collectives import expect_slowest, make_path, time_servers
from tfdist.plan.communicate import time_communication
from tfdist.plan.compute import compute_replica
from tfdist.plan.hardware import Hardware
from tfdist.plan.memory import USABLE, Memory, estimate_memory
from tfdist.plan.setup import Setup
from tfdist.plan.workload import Workload

# A core's seconds in which the chief of parameter servers hands out a step and applies it: measured
# are 0.011 for an MLP with 8 weights, 0.013 for a U-Net with 50, and 0.020 for ResNet-50.
_CHIEF_S = 0.013


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What a setup is expected to need.

    Attributes:
      memory: of the fullest device.
      missing: bytes that this device lacks; 0 if everything fits.
      refusal: why tfdist would refuse it, or why it makes no sense; empty if it is possible.
      computation_s, communication_s, bubble_s, wait_s, input_s, host_s: the parts of a step:
        computation; communication that is not hidden; a replica's devices waiting for each other;
        replicas waiting for the slowest of them; waiting for examples; the host.
      step_s: their sum.
      efficiency: of the throughput of as many single devices.
      epoch_s: seconds of an epoch; 0 if its number of examples is unknown.
      price: of an epoch; 0 if no price is given.
    """

    setup: Setup
    memory: Memory
    missing: float
    refusal: str
    computation_s: float
    communication_s: float
    bubble_s: float
    wait_s: float
    input_s: float
    host_s: float
    step_s: float
    examples_per_s: float
    efficiency: float
    epoch_s: float
    price: float

    @property
    def is_possible(self) -> bool:
        """Whether it fits and is not refused."""
        return not self.refusal and not self.missing

    @property
    def shown_parts_s(self) -> tuple[float, ...]:
        """The parts of a step that tables show, in their order: all but the host."""
        return self.computation_s, self.communication_s, self.bubble_s, self.wait_s, self.input_s


def estimate(
    setup: Setup,
    workload: Workload,
    hardware: Hardware,
    *,
    alone: float = 0.0,
    price_per_hour: float = 0.0,
) -> Estimate:
    """Returns the estimate of a setup.

    Args:
      alone: examples per second of one device, for the efficiency; estimated by default.
    """
    alone = alone or estimate_alone(workload, hardware)
    hardware = _divide_cores(setup, hardware)
    batch = workload.global_batch_size
    rows = math.ceil(batch / setup.sharing)
    computed = compute_replica(setup, workload, hardware, rows)
    turns = setup.workers * setup.replicas if hardware.shares_cores else 1
    communication = time_communication(setup, workload, hardware, computed)
    if setup.servers:
        communication *= turns  # each worker's own
    communication += computed.exchange_s * turns
    computation = computed.computation_s
    wait = _expect_wait(setup, workload, hardware, computation)
    busy = computation + communication + computed.bubble_s + wait + hardware.host_s
    examples = rows * setup.replicas
    step_s = max(busy, hardware.time_input(examples, workload.example_core_s))
    rate = batch / step_s
    if setup.servers:
        rate = batch / _find_interval(setup, workload, hardware, step_s)
    memory = estimate_memory(setup, workload, hardware, rows)
    epoch_s = workload.num_examples / rate
    return Estimate(
        setup=setup,
        memory=memory,
        missing=max(0.0, memory.total - USABLE * hardware.memory_bytes),
        refusal=_find_refusal(setup, workload),
        computation_s=computation,
        communication_s=communication,
        bubble_s=computed.bubble_s,
        wait_s=wait,
        input_s=step_s - busy,
        host_s=hardware.host_s,
        step_s=step_s,
        examples_per_s=rate,
        efficiency=rate / (setup.devices * alone),
        epoch_s=epoch_s,
        price=epoch_s / 3600 * setup.devices * price_per_hour,
    )


def _divide_cores(setup: Setup, hardware: Hardware) -> Hardware:
    """Returns the hardware with the measured steps that hold for a setup.

    `tfdist.launch` gives each worker of one machine its own cores, if there are enough.
    """
    apart = [m for m in hardware.measured if m.share < 1]
    cores = hardware.devices_per_machine
    if not apart or setup.servers or not 1 < setup.workers <= cores:
        return hardware
    return replace(hardware, measured=tuple(m.divide(setup.workers) for m in apart))


def estimate_alone(workload: Workload, hardware: Hardware) -> float:
    """Returns the examples per second of one device, whether they fit in its memory or not."""
    one = Setup(strategy="one_device")
    computed = compute_replica(one, workload, hardware, workload.global_batch_size)
    return workload.global_batch_size / (computed.computation_s + hardware.host_s)


def _expect_wait(setup: Setup, workload: Workload, hardware: Hardware, busy: float) -> float:
    """Returns the time for which the replicas are expected to wait for the slowest of them.

    The times of devices vary, and so do those of machines, for all devices of one at once. Workers
    of local SGD wait only when they sync; by then, their delays have partly evened out.
    """
    if setup.servers or hardware.shares_cores:
        return 0.0
    apart = workload.sync_every**0.5 if setup.traits.local_updates else 1.0
    deviations = expect_slowest(setup.devices) + expect_slowest(setup.workers)
    return hardware.jitter * busy * deviations / apart


def _find_interval(setup: Setup, workload: Workload, hardware: Hardware, step_s: float) -> float:
    """Returns the seconds between two updates: the workers', or the servers' if they are slower.

    Where the chief has no core of its own, its time for each update is added.
    """
    served = time_servers(
        setup.workers, setup.servers, workload.gradients, make_path(hardware, hardware.between)
    )
    chief = _CHIEF_S / hardware.devices_per_machine if hardware.shares_cores else 0.0
    return max(step_s, served) / setup.workers + chief


def _find_refusal(setup: Setup, workload: Workload) -> str:
    if setup.sharing > workload.global_batch_size:
        return f"a batch of {workload.global_batch_size} has no example for every replica"
    if setup.micro_batches > 1 and workload.refusal:
        return workload.refusal
    if setup.parts > len(workload.layers):
        return f"the model has only {len(workload.layers)} operations"
    if setup.placement == "strips" and not any(x.halo > 0 or x.side > 0 for x in workload.layers):
        return "the model has no convolutions of images"
    if setup.placement == "shards" and not any(x.is_divisible for x in workload.layers):
        return "no layer's units can be divided"
    return ""
