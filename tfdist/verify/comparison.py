"""Measures how much two recordings differ, and where the difference begins."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tfdist.training.guard.compare_steps import measure_gap
from tfdist.verify.recording import FIRST, GRADIENTS, OPTIMIZER, STATISTICS, WEIGHTS, Recording

LOSSES, EVALUATION = "losses", "evaluation"
KINDS = (LOSSES, GRADIENTS, WEIGHTS, OPTIMIZER, STATISTICS, EVALUATION)


@dataclass(frozen=True)
class Tolerance:
    """The largest relative differences that rounding alone may cause.

    Attributes:
      first: the limit within the first step, where only the order of summation differs.
      later: the limit after it. Adam divides each gradient by its own size, so a rounding error in
        a small gradient can grow to the size of a whole step: in float32, 4e-3 after ten steps with
        batch normalization, even on one device.
      floor: numbers below this fraction of the largest of their kind (for losses and metrics, of 1)
        are compared with it instead, since a gradient that is zero on paper is all rounding.
    """

    first: float
    later: float
    floor: float


# In float64, rounding stays below 1e-12 (3e-15 was measured for the weights after ten steps), so
# that any real difference shows.
TOLERANCES = {
    "float64": Tolerance(1e-8, 1e-7, 1e-4),
    "float32": Tolerance(1e-4, 2e-2, 1e-2),
    "mixed_bfloat16": Tolerance(5e-2, 0.2, 1e-1),
}


@dataclass(frozen=True)
class Difference:
    """The largest relative difference of one kind.

    Attributes:
      kind: one of `KINDS`.
      name: the name of the variable, loss or metric with this difference.
      wrong: the names of all that are not within it, in the model's order.
    """

    kind: str
    value: float
    name: str
    holds: bool
    wrong: tuple[str, ...]


@dataclass(frozen=True)
class Comparison:
    """The comparison of one strategy with one device.

    Attributes:
      differences: one per kind, without the kinds that the model does not have.
      start: a description of where a difference begins; empty if all are within the tolerance.
      first_update_holds: whether the weights after the first step are within the tolerance.
    """

    differences: tuple[Difference, ...]
    start: str
    first_update_holds: bool

    @property
    def holds(self) -> bool:
        """Whether all differences are within the tolerance."""
        return all(difference.holds for difference in self.differences)

    def find(self, kind: str) -> Difference | None:
        """Returns the difference of a kind, or None if the model does not have it."""
        return next((d for d in self.differences if d.kind == kind), None)


def compare(found: Recording, expected: Recording, tolerance: Tolerance) -> Comparison:
    """Returns the comparison of a strategy's recording with that of one device."""
    differences = []
    for kind in KINDS:
        if kind == LOSSES:
            difference = _compare_logs(found.logs, expected.logs, tolerance)
        elif kind == EVALUATION:
            difference = _compare_values(
                kind, found.evaluation, expected.evaluation, tolerance.later, tolerance, scale=1.0
            )
        elif expected.arrays.get(kind):
            limit = tolerance.first if kind == GRADIENTS else tolerance.later
            difference = _compare_values(
                kind, found.arrays[kind], expected.arrays[kind], limit, tolerance
            )
        else:
            continue
        differences.append(difference)
    first = _compare_values(
        FIRST, found.arrays[FIRST], expected.arrays[FIRST], tolerance.later, tolerance
    )
    comparison = Comparison(tuple(differences), "", first.holds)
    if comparison.holds:
        return comparison
    start = _find_start(found, expected, comparison, first, tolerance)
    return Comparison(comparison.differences, start, first.holds)


def measure_difference(
    found: np.ndarray | float, expected: np.ndarray | float, *, floor: float
) -> float:
    """Returns the largest difference, relative to the largest expected value or the floor."""
    gap = measure_gap(found, expected)
    expected = np.asarray(expected, "float64")
    size = max(float(np.abs(expected[np.isfinite(expected)]).max(initial=0.0)), floor)
    return gap / size if size else float(gap > 0)


def _compare_logs(found: list, expected: list, tolerance: Tolerance) -> Difference:
    values = [
        _compare_values(
            LOSSES, ours, theirs, tolerance.later if step else tolerance.first, tolerance, scale=1.0
        )
        for step, (ours, theirs) in enumerate(zip(found, expected, strict=True))
    ]
    worst = max(values, key=lambda difference: difference.value)
    wrong = tuple(dict.fromkeys(name for value in values for name in value.wrong))
    return Difference(LOSSES, worst.value, worst.name, not wrong, wrong)


def _compare_values(
    kind: str,
    found: Mapping[str, Any],
    expected: Mapping[str, Any],
    limit: float,
    tolerance: Tolerance,
    scale: float | None = None,
) -> Difference:
    if scale is None:
        # Counters and learning rates say nothing about the size of the other values.
        sizes = [np.abs(value).max(initial=0.0) for value in expected.values() if np.ndim(value)]
        scale = float(max(sizes, default=0.0))
    values = {
        name: measure_difference(found[name], value, floor=scale * tolerance.floor)
        if name in found
        else float("inf")
        for name, value in expected.items()
    }
    worst = max(values, key=lambda name: values[name])
    wrong = tuple(name for name, value in values.items() if value > limit)
    return Difference(kind, values[worst], worst, not wrong, wrong)


def _find_start(
    found: Recording,
    expected: Recording,
    comparison: Comparison,
    first: Difference,
    tolerance: Tolerance,
) -> str:
    losses = _compare_values(
        LOSSES, found.logs[0], expected.logs[0], tolerance.first, tolerance, scale=1.0
    )
    gradients = comparison.find(GRADIENTS)
    assert gradients is not None
    if not (losses.holds and gradients.holds and first.holds):
        parts = [
            f"{what} {', '.join(wrong[:3])}{' ...' if len(wrong) > 3 else ''}"
            for what, wrong in (
                ("loss or metric", losses.wrong),
                ("gradient of", gradients.wrong),
                ("weight", () if gradients.wrong else first.wrong),
            )
            if wrong
        ]
        return f"step 1: {'; '.join(parts)}"
    for step, (ours, theirs) in enumerate(zip(found.norms, expected.norms, strict=True), 1):
        scale = max(theirs.values(), default=0.0)
        norms = _compare_values("", ours, theirs, tolerance.later, tolerance, scale=scale)
        logs = _compare_values(
            "", found.logs[step - 1], expected.logs[step - 1], tolerance.later, tolerance, scale=1.0
        )
        if not (norms.holds and logs.holds):
            return f"step {step}: {', '.join([*logs.wrong, *norms.wrong][:4])}"
    wrong = [name for d in comparison.differences if not d.holds for name in d.wrong]
    return f"after the last step: {', '.join(wrong[:4])}"
