"""Which setup to use, and why."""

from collections.abc import Sequence
from dataclasses import dataclass

from tfdist.plan.estimate import Estimate

LEAST_EFFICIENCY = 0.5
"""Below it, half of what one pays for waits."""


@dataclass(frozen=True)
class Recommendation:
    """A setup to use.

    Attributes:
      best: its estimate; None if nothing fits.
      reason: why, in a sentence.
      limit: when not to distribute, or not further, in a sentence.
    """

    best: Estimate | None
    reason: str
    limit: str


def recommend(estimates: Sequence[Estimate], *, batch: int) -> Recommendation:
    """Returns the fastest setup that is equal to one device and that uses its devices well.

    Among setups that are about as fast (5 %), the one with the fewest devices is taken, and then
    the one with the fewest parts.
    """
    possible = [e for e in estimates if e.is_possible and e.setup.is_exact]
    if not possible:
        least = min(estimates, key=lambda e: e.missing or float("inf"))
        return Recommendation(
            None,
            f"Nothing fits: even {least.setup.name} on {least.setup.devices} devices lacks "
            f"{least.missing / 2**30:.1f} GiB per device.",
            "Try a smaller --global_batch_size, --rematerialize or --precision=mixed_bfloat16, or "
            "more devices.",
        )
    # A placement is for what does not fit otherwise.
    possible = [e for e in possible if e.setup.placement == "none"] or possible
    useful = [e for e in possible if e.efficiency >= LEAST_EFFICIENCY] or possible
    most = max(e.examples_per_s for e in useful)
    close = [e for e in useful if e.examples_per_s >= 0.95 * most]
    best = min(close, key=_rank)
    return Recommendation(best, _explain(best, estimates), _find_limit(best, possible, batch))


def _rank(found: Estimate) -> tuple[float, ...]:
    setup = found.setup
    return (setup.devices, setup.parts, setup.shards_optimizer, -found.examples_per_s)


def _explain(best: Estimate, estimates: Sequence[Estimate]) -> str:
    alone = next((e for e in estimates if e.setup.devices == 1), None)
    speed = f"{best.examples_per_s:.4g} examples/s"
    if best.setup.devices == 1 and all(e.setup.devices == 1 for e in estimates):
        return f"One device computes {speed}."
    if best.setup.devices == 1:
        return (
            f"One device is enough: it computes {speed}, and more would be used by less than half."
        )
    if alone is not None and alone.missing:
        return (
            f"One device lacks {alone.missing / 2**30:.1f} GiB; {best.setup.name} on "
            f"{best.setup.devices} devices fits, with {speed}."
        )
    return (
        f"{best.setup.name} on {best.setup.devices} devices computes {speed}, with "
        f"{best.efficiency:.0%} of what as many single devices would."
    )


def _find_limit(best: Estimate, possible: Sequence[Estimate], batch: int) -> str:
    more = [e for e in possible if e.setup.devices > best.setup.devices]
    if not more:
        return "More devices were not considered: see --workers and --devices_per_worker."
    next_size = min(e.setup.devices for e in more)
    fastest = max((e for e in more if e.setup.devices == next_size), key=lambda e: e.examples_per_s)
    parts = {
        "communication": fastest.communication_s,
        "the update and the least time of each operation": fastest.computation_s,
        "devices that wait for each other": fastest.bubble_s + fastest.wait_s,
        "input": fastest.input_s,
        "the host": fastest.host_s,
    }
    reason = max(parts, key=lambda key: parts[key])
    gain = fastest.examples_per_s / best.examples_per_s
    return (
        f"Do not use more: {fastest.setup.devices} devices ({fastest.setup.name}) would be "
        f"{gain:.2f} times as fast, with {fastest.efficiency:.0%} of what they could, because most "
        f"of a step of {batch} examples is {reason}."
    )
