"""How a model can be distributed: a strategy, a placement, and how many of what."""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass

from tfdist.placement.options import NONE
from tfdist.plan.hardware import Hardware
from tfdist.plan.workload import Workload
from tfdist.strategies.base import Traits
from tfdist.strategies.registry import find_strategy

MICRO_BATCHES_PER_STAGE = 4  # Huang et al. 2019 (arXiv:1811.06965), section 3: the bubble is small


@dataclass(frozen=True, kw_only=True)
class Setup:
    """One way to distribute a model.

    Attributes:
      strategy, placement: see `tfdist.train`.
      workers: the processes that compute.
      replicas: the replicas of each worker.
      parts: the devices of each replica.
      grid: with strips: into how many parts the height and the width are divided; by default, the
        height alone.
      servers: the parameter servers.
      micro_batches: the parts in which a replica computes its examples.
      shards_optimizer: whether the replicas of a worker divide the optimizer's state.
    """

    strategy: str
    placement: str = NONE
    workers: int = 1
    replicas: int = 1
    parts: int = 1
    grid: tuple[int, int] | None = None
    servers: int = 0
    micro_batches: int = 1
    shards_optimizer: bool = False

    @property
    def devices(self) -> int:
        """The devices that compute."""
        return self.workers * self.replicas * self.parts

    @property
    def fields(self) -> tuple[int, int]:
        """Into how many parts strips divide the height and the width."""
        return self.grid or (self.parts, 1)

    @property
    def sharing(self) -> int:
        """The replicas that share a global batch."""
        return 1 if self.servers else self.workers * self.replicas

    @property
    def traits(self) -> Traits:
        """The properties of the strategy."""
        return find_strategy(self.strategy).traits

    @property
    def is_exact(self) -> bool:
        """Whether the result is that of one device."""
        return not (self.traits.local_updates or self.traits.has_servers)

    @property
    def name(self) -> str:
        """The name in tables."""
        text = self.strategy
        if self.placement != NONE:
            size = "x".join(map(str, self.grid)) if self.grid else f"x{self.parts}"
            text += f" + {self.placement} {size}"
        if self.shards_optimizer:
            text += " + shard_optimizer"
        return f"{text}, {self.micro_batches} micro-batches" if self.micro_batches > 1 else text

    @property
    def flags(self) -> str:
        """The flags of `tfdist.train` that choose it."""
        flags = [f"--strategy={self.strategy}"]
        if self.placement != NONE:
            flags.append(f"--placement={self.placement}")
            flags.append(f"--mesh=data:{self.replicas},model:{self.parts}")
        if self.grid:
            flags.append(f"--grid={self.grid[0]},{self.grid[1]}")
        if self.micro_batches > 1:
            flags.append(f"--micro_batches={self.micro_batches}")
        if self.shards_optimizer:
            flags.append("--shard_optimizer")
        return " ".join(flags)

    def split(self, micro_batches: int) -> "Setup":
        """Returns the setup with a command's micro-batches, unless it has its own or none."""
        if self.placement == "layers" or self.servers:
            return self
        return dataclasses.replace(self, micro_batches=micro_batches)

    def format_command(self, rest: str) -> str:
        """Returns the command that trains with it and with the other flags, `rest`."""
        train = f"{self.flags} {rest}".strip()
        if self.workers == 1:
            return f"python -m tfdist.train {train}"
        servers = f" --ps={self.servers}" if self.servers else ""
        return f"python -m tfdist.launch --workers={self.workers}{servers} -- {train}"


def list_setups(
    hardware: Hardware, workload: Workload, *, workers: int, devices: int
) -> list[Setup]:
    """Returns all setups of up to so many machines, in powers of two, each with so many devices."""
    found = list(_list_of_one_machine(hardware, workload, devices))
    for count in list_powers(workers)[1:]:
        if hardware.is_tpu:
            found.append(Setup(strategy="tpu", workers=count, replicas=devices))
            continue
        found += _list_of_machines(count, devices)
        if devices > 1:
            found += _list_placements(workload, "multi_worker_mirrored", 1, devices, workers=count)
    return found


def list_sweep(hardware: Hardware, least: int, most: int, *, devices: int) -> list[Setup]:
    """Returns the data-parallel setups over so many machines, in powers of two."""
    found = []
    for count in list_powers(most):
        if count < least:
            continue
        if hardware.is_tpu:
            found.append(Setup(strategy="tpu", workers=count, replicas=devices))
        elif count == 1:
            alone = "mirrored" if devices > 1 else "one_device"
            found.append(Setup(strategy=alone, replicas=devices))
        else:
            found += _list_of_machines(count, devices)
    return found


def list_powers(most: int) -> list[int]:
    """Returns the powers of two up to a number, and the number.

    >>> list_powers(6)
    [1, 2, 4, 6]
    """
    powers = [2**exponent for exponent in range(most.bit_length()) if 2**exponent < most]
    return [*powers, most]


def _list_of_one_machine(hardware: Hardware, workload: Workload, devices: int) -> Iterator[Setup]:
    if hardware.is_tpu:
        yield from (Setup(strategy="tpu", replicas=n) for n in list_powers(devices))
        return
    yield Setup(strategy="one_device")
    for count in list_powers(devices)[1:]:
        yield Setup(strategy="mirrored", replicas=count)
        yield Setup(strategy="mirrored", replicas=count, shards_optimizer=True)
        yield Setup(strategy="central_storage", replicas=count)
        yield from _list_placements(workload, "one_device", 1, count)
        if count >= 4:
            yield from _list_placements(workload, "mirrored", count // 2, 2)


def _list_of_machines(count: int, devices: int) -> list[Setup]:
    return [
        Setup(strategy="multi_worker_mirrored", workers=count, replicas=devices),
        Setup(strategy="local_sgd", workers=count, replicas=devices),
        Setup(strategy="parameter_server", workers=count, servers=max(1, count // 4)),
    ]


def _list_placements(
    workload: Workload, strategy: str, replicas: int, parts: int, *, workers: int = 1
) -> Iterator[Setup]:
    rows = max(1, workload.global_batch_size // (workers * replicas))
    many = _choose_micro_batches(rows, parts) if not workload.refusal else 1
    grid = _make_grid(parts)
    for placement in ("layers", "shards", "strips"):
        setup = Setup(
            strategy=strategy,
            placement=placement,
            workers=workers,
            replicas=replicas,
            parts=parts,
            micro_batches=many if placement == "layers" else 1,
        )
        yield setup
        if placement == "strips" and min(grid) > 1:
            yield dataclasses.replace(setup, grid=grid)


def _make_grid(parts: int) -> tuple[int, int]:
    """Returns the grid of so many parts whose sides differ least."""
    rows = next(n for n in range(math.isqrt(parts), 0, -1) if parts % n == 0)
    return rows, parts // rows


def _choose_micro_batches(rows: int, parts: int) -> int:
    most = min(rows, MICRO_BATCHES_PER_STAGE * parts)
    return next(count for count in range(most, 0, -1) if rows % count == 0)
