"""The answer of a plan: the estimates of all setups, as a table and as JSON."""

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tfdist.plan.estimate import Estimate, estimate, estimate_alone
from tfdist.plan.hardware import Hardware
from tfdist.plan.recommend import Recommendation
from tfdist.plan.setup import Setup
from tfdist.plan.workload import Workload

_HEADS = (
    ("setup", 46),
    ("machines", 9),
    ("devices", 8),
    ("batch", 7),
    ("GiB", 7),
    ("step ms", 9),
    ("compute", 8),
    ("comm.", 7),
    ("bubble", 7),
    ("wait", 6),
    ("input", 6),
    ("examples/s", 11),
    ("effic.", 7),
    ("epoch", 10),
    ("price", 9),
)


@dataclass(frozen=True)
class Answer:
    """All estimates.

    Attributes:
      recommendation: the setup to use.
      command: how to run it; empty if nothing fits.
      simulated: lines of a simulation.
    """

    workload: Workload
    hardware: Hardware
    estimates: Sequence[Estimate]
    recommendation: Recommendation
    command: str
    simulated: dict[str, Any]


def estimate_all(
    setups: Iterable[Setup],
    workload: Workload,
    hardware: Hardware,
    *,
    batch_per_replica: int = 0,
    price_per_hour: float = 0.0,
) -> list[Estimate]:
    """Returns the estimates of setups.

    Args:
      batch_per_replica: the examples of a replica, if the batch grows with the replicas.
    """
    base = batch_per_replica or workload.global_batch_size
    alone = estimate_alone(dataclasses.replace(workload, global_batch_size=base), hardware)
    found = []
    for setup in setups:
        size = batch_per_replica * setup.sharing or workload.global_batch_size
        given = dataclasses.replace(workload, global_batch_size=size)
        found.append(estimate(setup, given, hardware, alone=alone, price_per_hour=price_per_hour))
    return found


def format_answer(answer: Answer) -> str:
    """Returns the answer as text."""
    workload, hardware = answer.workload, answer.hardware
    lines = [
        f"{hardware.title}, {workload.precision}: {len(workload.layers)} operations, "
        f"{workload.weights / 4e6:.3g} million parameters, {3 * workload.flops / 1e9:.3g} GFLOP "
        f"and {workload.activations / 2**20:.3g} MiB of activations per example.",
        "",
        _join([head for head, _ in _HEADS]),
    ]
    lines += [_join(_list_cells(found)) for found in answer.estimates]
    found = answer.recommendation
    lines += ["", found.reason, *([f"  {answer.command}"] if answer.command else [])]
    if found.best and found.best.setup.workers > 1 and not hardware.shares_cores:
        lines.append(
            "On several machines, give --hosts=HOST:PORT,... and --task instead of --workers."
        )
    lines.append(found.limit)
    lines += [f"{name}: {text}" for name, text in answer.simulated.get("text", {}).items()]
    return "\n".join(lines)


def to_json(answer: Answer) -> dict[str, Any]:
    """Returns the answer, ready for JSON."""
    workload, best = answer.workload, answer.recommendation.best
    return {
        "hardware": dataclasses.asdict(answer.hardware),
        "model": {
            "parameters": round(workload.weights / 4),
            "forward_flops_per_example": workload.flops,
            "activation_bytes_per_example": workload.activations,
            "global_batch_size": workload.global_batch_size,
            "precision": workload.precision,
        },
        "estimates": [
            dataclasses.asdict(found)
            | {"name": found.setup.name, "devices": found.setup.devices}
            | {"memory_bytes": found.memory.total}
            for found in answer.estimates
        ],
        "recommendation": {
            "name": best.setup.name if best else None,
            "devices": best.setup.devices if best else None,
            "reason": answer.recommendation.reason,
            "limit": answer.recommendation.limit,
            "command": answer.command,
        },
        "simulation": answer.simulated,
    }


def _list_cells(found: Estimate) -> list[str]:
    setup = found.setup
    cells = [
        setup.name,
        f"{setup.workers}+{setup.servers}" if setup.servers else str(setup.workers),
        str(setup.devices),
        str(round(found.step_s * found.examples_per_s)) if not setup.servers else "",
        f"{found.memory.total / 2**30:.1f}",
    ]
    if found.refusal:
        return [*cells[:3], f"  refused: {found.refusal}"]
    if found.missing:
        return [*cells, f"  does not fit: {found.missing / 2**30:.1f} GiB too much"]
    return [
        *cells,
        f"{found.step_s * 1e3:.4g}",
        *(f"{part / found.step_s:.0%}" for part in found.shown_parts_s),
        f"{found.examples_per_s:.4g}",
        f"{found.efficiency:.0%}",
        _format_time(found.epoch_s) if found.epoch_s else "-",
        f"{found.price:.3g}" if found.price else "-",
    ]


def _format_time(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.2g} s"
    return f"{seconds / 60:.3g} min" if seconds < 5400 else f"{seconds / 3600:.3g} h"


def _join(cells: Sequence[str]) -> str:
    name, *others = cells
    text = f"{name:<{_HEADS[0][1]}}"
    for cell, (_, width) in zip(others, _HEADS[1:], strict=False):
        text += f"{cell:>{width}}"
    return text
