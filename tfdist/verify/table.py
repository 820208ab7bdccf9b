"""Formats a comparison as a text table and as JSON."""

import math
from collections.abc import Sequence
from typing import Any

from tfdist.verify.comparison import KINDS
from tfdist.verify.runs import Verdict

_HEADS = ("strategy", *KINDS, "verdict")


def format_table(verdicts: Sequence[Verdict]) -> str:
    """Returns the head, one row per strategy, and notes."""
    lines = [format_head(), *map(format_row, verdicts), *list_notes(verdicts)]
    return "\n".join(lines)


def format_head() -> str:
    """Returns the names of the columns."""
    return _join(_HEADS)


def format_row(verdict: Verdict) -> str:
    """Returns the largest relative difference of each kind, and the verdict.

    A star marks a number that exceeds its tolerance.
    """
    cells = []
    for kind in KINDS:
        difference = verdict.comparison.find(kind) if verdict.comparison else None
        star = "" if difference is None or difference.holds else " *"
        cells.append("-" if difference is None else f"{difference.value:.1e}{star}")
    return _join((verdict.strategy, *cells, _judge(verdict)))


def list_notes(verdicts: Sequence[Verdict]) -> list[str]:
    """Returns notes on how each strategy ran, and what is wrong with it."""
    notes = []
    for verdict in verdicts:
        if verdict.form:
            notes.append(f"{verdict.strategy}: {verdict.form}.")
        if verdict.comparison and verdict.comparison.start:
            notes.append(f"{verdict.strategy} differs from {verdict.comparison.start}.")
        if verdict.problem:
            notes.append(f"{verdict.strategy}: {verdict.problem}")
    return notes


def to_json(verdicts: Sequence[Verdict]) -> list[dict[str, Any]]:
    """Returns the verdicts, ready for JSON."""
    return [
        {
            "strategy": verdict.strategy,
            "form": verdict.form,
            "verdict": _judge(verdict),
            "problem": verdict.problem,
            "start": verdict.comparison.start if verdict.comparison else "",
            "differences": {
                d.kind: {
                    "largest": d.value if math.isfinite(d.value) else None,
                    "of": d.name,
                    "holds": d.holds,
                    "wrong": list(d.wrong),
                }
                for d in (verdict.comparison.differences if verdict.comparison else ())
            },
        }
        for verdict in verdicts
    ]


def _join(cells: Sequence[str]) -> str:
    first, *rest = cells
    return f"{first:<22}" + "".join(f"{cell:<12}" for cell in rest).rstrip()


def _judge(verdict: Verdict) -> str:
    if verdict.skip_reason:
        return verdict.skip_reason
    if verdict.comparison is None:
        return "failed"
    return "equal" if verdict.comparison.holds else "DIFFERENT"
