"""A page that compares several runs."""

import os
from collections.abc import Sequence
from typing import Any

from tfdist.records.recorded_run import RecordedRun
from tfdist.report.charts import chart_runs
from tfdist.report.elements import Section, make_table, write_value
from tfdist.report.html_page import make_html
from tfdist.report.run_page import list_results

_SAME_FOR_NONE = {"run_dir"}
_AFTER_RESULTS = ("examples_per_second", "mfu", "seconds", "peak_memory_bytes")


def make_comparison(runs: Sequence[RecordedRun]) -> str:
    """Returns a page with the curves, options and results of several runs, as HTML."""
    names = name_runs([run.path for run in runs])
    sections = [
        Section("Results", _make_results(names, runs)),
        Section(
            "Losses and metrics",
            chart_runs({name: run.lines for name, run in zip(names, runs, strict=True)}),
        ),
        Section("Options that differ", _make_options(names, runs)),
    ]
    return make_html(f"{len(runs)} runs", sections)


def name_runs(paths: Sequence[str]) -> list[str]:
    """Returns a name for each run: its path without what all of them begin with.

    >>> name_runs(["runs/a", "runs/more/b"])
    ['a', 'more/b']
    >>> name_runs(["runs/a", "runs/a"])
    ['a', 'a (2)']
    """
    names: list[str] = []
    start = os.path.commonpath([os.path.dirname(path) or "." for path in paths]) if paths else ""
    for path in paths:
        name = path.removeprefix(start).lstrip("/") or path
        count = sum(other == name or other.startswith(f"{name} (") for other in names)
        names.append(f"{name} ({count + 1})" if count else name)
    return names


def _make_results(names: Sequence[str], runs: Sequence[RecordedRun]) -> str:
    found = [
        {
            "state": "finished" if run.summary else "not finished",
            "strategy": (run.options.get("strategy") or {}).get("strategy"),
            "replicas": run.summary.get("replicas"),
            **list_results(run),
            **{name: {**run.last, **run.summary}.get(name) for name in _AFTER_RESULTS},
        }
        for run in runs
    ]
    columns = [
        column
        for column in dict.fromkeys(column for results in found for column in results)
        if any(results.get(column) is not None for results in found)
    ]
    rows = [
        [name, *(results.get(column) for column in columns)]
        for name, results in zip(names, found, strict=True)
    ]
    heads = ["run", *(column.replace("_", " ") for column in columns)]
    return make_table(heads, rows, is_sortable=True)


def _make_options(names: Sequence[str], runs: Sequence[RecordedRun]) -> str:
    flat: list[dict[str, Any]] = [
        {
            name: value
            for group in run.options.values()
            if isinstance(group, dict)
            for name, value in group.items()
        }
        for run in runs
    ]
    options = {name: None for values in flat for name in values if name not in _SAME_FOR_NONE}
    rows = [
        [name, *(write_value(values.get(name)) for values in flat)]
        for name in options
        if any(values.get(name) != flat[0].get(name) for values in flat)
    ]
    return make_table(["option", *names], rows) if rows else "<p>None.</p>"
