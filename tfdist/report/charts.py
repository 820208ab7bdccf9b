"""The curves of a page, which uPlot draws in the browser."""

import html
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_MOST_POINTS = 200  # of a curve; more are not told apart on a screen
_MOST_MARKS = 25
_MOST_CURVES = 10  # of one picture; groups with more, such as 100 classes, are left out
_NOT_CURVES = ("step", "epoch")
_SPEED = "examples_per_second"


@dataclass(frozen=True)
class Chart:
    """A picture with a title and curves, with a value or None for each horizontal place."""

    title: str
    curves: Mapping[str, Sequence[float | None]]


def make_charts(
    x_label: str,
    places: Sequence[float],
    charts: Iterable[Chart],
    *,
    marks: Mapping[str, float] | None = None,
) -> str:
    """Returns pictures that share a horizontal axis.

    Args:
      x_label: what the horizontal axis counts.
      places: the places on it, in ascending order.
      marks: text -> place of a vertical line on the horizontal axis.
    """
    shown = [
        chart
        for chart in charts
        if any(value is not None for curve in chart.curves.values() for value in curve)
    ]
    if not shown:
        return "<p>No epoch has ended yet.</p>"
    figures = "".join(
        f"<figure><figcaption>{html.escape(chart.title)}</figcaption><div></div></figure>"
        for chart in shown
    )
    data = {
        "x": list(places),
        "label": x_label,
        "marks": [[text, place] for text, place in (marks or {}).items()],
        "charts": [
            {
                "names": list(chart.curves),
                "curves": [[_shorten(value) for value in c] for c in chart.curves.values()],
            }
            for chart in shown
        ],
    }
    content = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    return f'<div class="charts">{figures}<script type="application/json">{content}</script></div>'


def chart_run(
    lines: Sequence[Mapping[str, Any]], *, first: str = "", within: Sequence[Mapping[str, Any]] = ()
) -> str:
    """Returns the curves of one run over its steps, training and validation together.

    Args:
      first: the metric whose picture comes first.
      within: lines within epochs.
    """
    by_step = _thin(_join_lines([*within, *lines], "step"))
    groups = _group_metrics(_list_metrics(by_step.values()))
    groups[_SPEED] = groups.pop(_SPEED, {})  # the last one
    titles = sorted(groups, key=lambda title: title != first.removeprefix("val_"))
    charts = (
        Chart(
            title.replace("_", " "),
            {label: [line.get(name) for line in by_step.values()] for label, name in of.items()},
        )
        for title in titles
        if len(of := groups[title]) <= _MOST_CURVES
    )
    return make_charts("step", list(by_step), charts, marks=_mark_epochs(lines))


def _mark_epochs(lines: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Returns epoch -> its last step, for no more epochs than a picture can show."""
    ends = {line["epoch"]: line["step"] for line in lines if "epoch" in line and "step" in line}
    stride = math.ceil(len(ends) / _MOST_MARKS) or 1
    return {str(epoch): step for epoch, step in ends.items() if epoch % stride == 0}


def _group_metrics(names: Sequence[str]) -> dict[str, dict[str, str]]:
    """Returns title -> label -> metric, with one title for each picture."""
    groups: dict[str, dict[str, str]] = {}
    for name in names:
        base = name.removeprefix("val_")
        is_validation = name != base
        if "/" not in base:
            label = "validation" if is_validation else "training"
            groups.setdefault(base, {})[label] = name
        elif is_validation or f"val_{base}" not in names:
            group, _, member = base.partition("/")
            title = f"{group}, validation" if is_validation else group
            groups.setdefault(title, {})[member] = name
    return groups


def chart_runs(
    runs: Mapping[str, Sequence[Mapping[str, Any]]], *, notes: Mapping[str, str] | None = None
) -> str:
    """Returns the curves of several runs over their epochs, one picture for each metric.

    Args:
      runs: name -> the lines of `metrics.jsonl`.
      notes: metric -> what its title says about it.
    """
    by_epoch = {name: _join_lines(lines, "epoch") for name, lines in runs.items()}
    epochs = sorted({epoch for lines in by_epoch.values() for epoch in lines})
    names = _list_metrics(line for lines in by_epoch.values() for line in lines.values())
    charts = (
        Chart(
            metric.replace("_", " ") + (notes or {}).get(metric, ""),
            {
                name: [lines.get(epoch, {}).get(metric) for epoch in epochs]
                for name, lines in by_epoch.items()
            },
        )
        for metric in sorted(names, key=lambda name: not name.startswith("val_"))
        if "/" not in metric
    )
    return make_charts("epoch", epochs, charts)


def _join_lines(
    lines: Sequence[Mapping[str, Any]], key: str
) -> dict[float, dict[str, float | None]]:
    """Returns step or epoch -> the numbers that all its lines have together, the last one first."""
    joined: dict[float, dict[str, float | None]] = {}
    for line in lines:
        numbers = {
            name: float(value)
            for name, value in line.items()
            if isinstance(value, (int, float)) and math.isfinite(value)
        }
        if key in numbers:
            joined.setdefault(numbers[key], {}).update(numbers)
    return dict(sorted(joined.items()))


def _list_metrics(lines: Iterable[Mapping[str, Any]]) -> list[str]:
    """Returns the names of the metrics, the loss first."""
    names = {name: None for line in lines for name in line if name not in _NOT_CURVES}
    return sorted(names, key=lambda name: "loss" not in name)


def _thin(lines: dict[float, dict[str, float | None]]) -> dict[float, dict[str, float | None]]:
    """Returns at most `_MOST_POINTS` lines: those with validation first, which are of epochs."""
    kept: set[float] = set()
    for has_validation in (True, False):
        left = _MOST_POINTS - len(kept)
        places = [
            place
            for place, line in lines.items()
            if any(name.startswith("val_") for name in line) == has_validation
        ]
        if left:
            stride = math.ceil(len(places) / left) or 1
            kept |= {*places[::-stride]}  # from the last one, which is always shown
    return {place: line for place, line in lines.items() if place in kept}


def _shorten(value: float | None) -> float | None:
    """Returns a value with six digits, which are more than a picture shows."""
    return None if value is None else float(f"{value:.6g}")
