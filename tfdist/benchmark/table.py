"""Formats a benchmark's findings as a table, as JSON and as a page."""

import html
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tfdist.benchmark.configurations import Configuration, find_lone_worker
from tfdist.benchmark.runs import Findings, median_of
from tfdist.report.elements import Section, make_bars, make_html, make_table

HEADS = (
    *("configuration", "precision", "examples/s", "range", "vs. one device", "scaling"),
    *("vs. convolutions", "MFU", "memory MiB", "first step s"),
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """The medians of one configuration over the rounds, relative to the machine's best.

    Attributes:
      examples_per_second, lowest, highest: median, minimum and maximum; None if it failed.
      of_one_device: its speed relative to the trainer on one device, at the same precision.
      scaling: its speed relative to one process on a worker's cores, times the workers.
      of_convolutions: its operations per second relative to the model's convolutions alone.
      of_peak: the same relative to the fastest of these convolutions (MFU).
      memory_mib: the peak memory of its (chief's) process.
    """

    configuration: Configuration
    examples_per_second: float | None = None
    lowest: float | None = None
    highest: float | None = None
    of_one_device: float | None = None
    scaling: float | None = None
    of_convolutions: float | None = None
    of_peak: float | None = None
    memory_mib: float | None = None
    first_step_s: float | None = None
    error: str = ""


def make_rows(found: Findings) -> list[Row]:
    """Returns one row per configuration, without the ceilings."""
    return [_make_row(c, found) for c in found if c.kind != "ceiling"]


def _make_row(configuration: Configuration, found: Findings) -> Row:
    findings = found[configuration]
    rate = median_of(findings, "examples_per_second")
    if rate is None:
        error = next((f["error"] for f in findings if "error" in f), "not measured")
        return Row(configuration=configuration, error=error)
    rates = [f["examples_per_second"] for f in findings if "examples_per_second" in f]
    precision = configuration.precision
    one_device = _find_rate(found, Configuration(precision=precision))
    ceiling = found.get(Configuration(kind="ceiling", precision=precision), [])
    # Other programs can only slow the machine down, so the largest finding is nearest to its limit.
    per_image, together, fastest = (
        max((finding[key] for finding in ceiling if key in finding), default=None)
        for key in ("flops_per_example", "own_flops_per_second", "flops_per_second")
    )
    memory = median_of(findings, "peak_memory_bytes")
    return Row(
        configuration=configuration,
        examples_per_second=rate,
        lowest=min(rates),
        highest=max(rates),
        of_one_device=rate / one_device if one_device else None,
        scaling=_find_scaling(configuration, rate, found),
        of_convolutions=rate * per_image / together if per_image and together else None,
        of_peak=rate * per_image / fastest if per_image and fastest else None,
        memory_mib=memory / 2**20 if memory else None,
        first_step_s=median_of(findings, "first_step_s"),
    )


def _find_scaling(configuration: Configuration, rate: float, found: Findings) -> float | None:
    lone = find_lone_worker(configuration) if configuration.workers > 1 else None
    alone = _find_rate(found, lone) if lone else None
    return rate / (configuration.workers * alone) if alone else None


def _find_rate(found: Findings, configuration: Configuration) -> float | None:
    return median_of(found.get(configuration, []), "examples_per_second")


def format_table(rows: Sequence[Row]) -> str:
    """Returns the rows as a text table, followed by the errors."""
    lines = [_join(HEADS), *(_join(_list_cells(row)) for row in rows)]
    lines += [f"{_name(row)}: {row.error}" for row in rows if row.error]
    return "\n".join(lines)


def to_json(found: Findings) -> dict[str, Any]:
    """Returns the rows and the findings of each round, ready for JSON."""
    return {
        "rows": [asdict(row) | {"name": row.configuration.name} for row in make_rows(found)],
        "rounds": [
            {"configuration": asdict(configuration), "findings": findings}
            for configuration, findings in found.items()
        ],
    }


def make_page(rows: Sequence[Row]) -> str:
    """Returns an HTML page with the table, whose columns can be sorted, and the speeds as bars."""
    rates = {_name(row): row.examples_per_second for row in rows if row.examples_per_second}
    fastest = max(rates.values(), default=1.0)
    bars = make_bars({name: rate / fastest for name, rate in rates.items()})
    failures = "".join(f"<p>{html.escape(f'{_name(r)}: {r.error}')}</p>" for r in rows if r.error)
    cells = ([_to_number(cell) for cell in _list_cells(row)] for row in rows)
    sections = [
        Section("Results", make_table(HEADS, cells, is_sortable=True)),
        Section("Examples per second, relative to the fastest", bars),
        Section("Failures", failures),
    ]
    return make_html("tfdist.benchmark", sections)


def _name(row: Row) -> str:
    return f"{row.configuration.name}, {row.configuration.precision}"


def _to_number(cell: str) -> float | str:
    """Returns the number that a cell shows, so that its column is sorted by numbers."""
    try:
        return float(cell)
    except ValueError:
        return cell


def _list_cells(row: Row) -> list[str]:
    rate = row.examples_per_second
    if rate is None:
        return [
            row.configuration.name,
            row.configuration.precision,
            "failed",
            *[""] * (len(HEADS) - 3),
        ]
    ratios = (row.of_one_device, row.scaling, row.of_convolutions, row.of_peak)
    return [
        row.configuration.name,
        row.configuration.precision,
        f"{rate:.2f}",
        f"{row.lowest:.1f}-{row.highest:.1f}",
        *("-" if ratio is None else f"{ratio:.2f}" for ratio in ratios),
        "-" if row.memory_mib is None else f"{row.memory_mib:.0f}",
        "-" if row.first_step_s is None else f"{row.first_step_s:.1f}",
    ]


def _join(cells: Sequence[str]) -> str:
    name, precision, *numbers = cells
    widths = [max(len(head), 11) + 2 for head in HEADS[2:]]
    return f"{name:<34}{precision:<16}" + "".join(
        f"{cell:>{width}}" for cell, width in zip(numbers, widths, strict=True)
    )
