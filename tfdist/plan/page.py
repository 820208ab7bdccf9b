"""The answer of a plan as one HTML page: curves over the number of devices, and a table."""

from collections.abc import Callable, Sequence

from tfdist.plan.answer import Answer
from tfdist.plan.estimate import Estimate
from tfdist.report.charts import Chart, make_charts
from tfdist.report.elements import Section, make_html, make_pairs, make_table

_HEADS = (
    *("setup", "machines", "devices", "GiB", "step, ms", "computation, ms", "communication, ms"),
    *("bubble, ms", "waiting, ms", "input, ms", "examples/s", "efficiency", "epoch, s", "price"),
    "remark",
)


def format_page(answer: Answer) -> str:
    """Returns an answer as HTML."""
    workload, best = answer.workload, answer.recommendation.best
    advice = {
        "use": best.setup.name if best else "nothing fits",
        "why": answer.recommendation.reason,
        "command": answer.command,
        "limit": answer.recommendation.limit,
    }
    cards = {
        "parameters": f"{workload.weights / 4e6:.3g} million",
        "step of one example": f"{3 * workload.flops / 1e9:.3g} GFLOP",
        "global batch": str(workload.global_batch_size),
        "precision": workload.precision,
    }
    possible = [found for found in answer.estimates if found.is_possible]
    sections = [
        Section("Recommendation", make_pairs(advice | answer.simulated.get("text", {}))),
        Section("Curves", _draw(possible)),
        Section(
            "All setups", make_table(_HEADS, map(_list_values, answer.estimates), is_sortable=True)
        ),
    ]
    return make_html("Plan", sections, subtitle=answer.hardware.title, cards=cards)


def _draw(estimates: Sequence[Estimate]) -> str:
    """Returns the curves of all strategies and placements that are possible."""
    counts = sorted({found.setup.devices for found in estimates})
    kinds = {_name_kind(found): None for found in estimates}

    def draw(title: str, read: Callable[[Estimate], float]) -> Chart:
        curves: dict[str, list[float | None]] = {kind: [None] * len(counts) for kind in kinds}
        for found in sorted(estimates, key=lambda e: e.examples_per_s):
            curves[_name_kind(found)][counts.index(found.setup.devices)] = read(found)
        return Chart(title, curves)

    charts = [
        draw("examples per second", lambda e: e.examples_per_s),
        draw("efficiency, %", lambda e: 100 * e.efficiency),
        draw("memory of a device, GiB", lambda e: e.memory.total / 2**30),
        draw("step, ms", lambda e: 1e3 * e.step_s),
    ]
    if any(found.price for found in estimates):
        charts.append(draw("price of an epoch", lambda e: e.price))
    return make_charts("devices", counts, charts)


def _name_kind(found: Estimate) -> str:
    """Returns what a setup has in common with those of other sizes."""
    setup = found.setup
    if setup.placement != "none":
        return setup.placement
    return f"{setup.strategy}, sharded optimizer" if setup.shards_optimizer else setup.strategy


def _list_values(found: Estimate) -> list[object]:
    setup = found.setup
    remark = found.refusal
    if found.missing:
        remark = remark or f"{found.missing / 2**30:.1f} GiB too much"
    return [
        setup.name,
        setup.workers,
        setup.devices,
        round(found.memory.total / 2**30, 2),
        *(round(1e3 * seconds, 3) for seconds in (found.step_s, *found.shown_parts_s)),
        round(found.examples_per_s, 1),
        f"{found.efficiency:.0%}",
        round(found.epoch_s, 2) or None,
        round(found.price, 4) or None,
        remark,
    ]
