"""What a step computes, and whether two computations of it agree up to rounding."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import numpy as np

# Operations that compute in float32 for every dtype of their input.
_FLOAT32 = {"CropAndResize", "ResizeArea", "ResizeBicubic", "ResizeBilinear", "ScaleAndTranslate"}
FLOAT32_TOLERANCE = 1e-3
_TOLERANCES = {"float64": 1e-8, "float32": FLOAT32_TOLERANCE, "bfloat16": 0.1, "float16": 0.1}
# How many times the effect of slightly moved weights is allowed.
_MOVES = 30
# How many times the tolerance and this effect no rounding reaches.
_CLEARLY_BEYOND_TOLERANCE, _CLEARLY_BEYOND_MOVES = 10, 1000


class Outcome(NamedTuple):
    """The results of a step: name -> number or array.

    Attributes:
      logs: the losses and metrics, or the outputs of a prediction.
      states: the values of variables after the step.
    """

    logs: dict[str, Any]
    gradients: dict[str, np.ndarray]
    states: dict[str, np.ndarray]


def find_tolerance(model: keras.Model, operations: Sequence[str]) -> float:
    """Returns the relative difference that two computations of a model may have."""
    dtypes = {layer.compute_dtype for layer in model._flatten_layers()}
    dtypes.add(keras.dtype_policies.get(model.dtype_policy).compute_dtype)
    tolerance = max(_TOLERANCES.get(dtype, FLOAT32_TOLERANCE) for dtype in dtypes)
    if tolerance < FLOAT32_TOLERANCE and not _FLOAT32.isdisjoint(operations):
        return FLOAT32_TOLERANCE
    return tolerance


def find_clear_difference(
    divided: Outcome, whole: Outcome, tolerance: float, moved: Outcome
) -> str | None:
    """Describes a difference too large for rounding; `moved` has slightly moved weights."""
    numbers = [*divided.logs.values(), *divided.gradients.values()]
    if not all(np.isfinite(np.asarray(each, "float64")).all() for each in numbers):
        return None  # An overflow, which float64 may not have.
    return find_difference(
        divided, whole, _CLEARLY_BEYOND_TOLERANCE * tolerance, moved, moves=_CLEARLY_BEYOND_MOVES
    )


def find_difference(
    divided: Outcome,
    whole: Outcome,
    tolerance: float,
    moved: Outcome | None = None,
    *,
    moves: int = _MOVES,
) -> str | None:
    """Describes the first difference between two outcomes; returns None if there is none.

    Args:
      moved: the whole batch computed with slightly moved weights. A multiple of its distance from
        `whole` is allowed as well.
    """

    def is_other(kind: str, name: str, expected: Any, *, floor: float) -> bool:
        found = getattr(divided, kind).get(name)
        other = getattr(moved, kind).get(name) if moved else None
        least = 0.0 if other is None else moves * measure_gap(other, expected)
        return differs(found, expected, tolerance, floor=floor, least=least)

    for name, expected in whole.logs.items():
        if is_other("logs", name, expected, floor=1e-3):
            if name.startswith("output "):
                return "the output"
            is_loss = name == "loss" or name.endswith("_loss")
            return f"the {'loss' if is_loss else 'metric'} {name!r}"
    largest = max((np.abs(g).max(initial=0) for g in whole.gradients.values()), default=0.0)
    for name, expected in whole.gradients.items():
        if is_other("gradients", name, expected, floor=largest * 1e-2):
            return "the gradient"
    for name, expected in whole.states.items():
        if is_other("states", name, expected, floor=_find_floor(expected)):
            return f"the state {name.partition('#')[0]}"
    return None


def list_different_states(divided: Outcome, whole: Outcome, tolerance: float) -> list[str]:
    """Returns the paths of the variables whose values differ after the step."""
    different = {
        name.partition("#")[0]: None
        for name, expected in whole.states.items()
        if differs(divided.states.get(name), expected, tolerance, floor=_find_floor(expected))
    }
    return list(different)


def _find_floor(state: np.ndarray) -> float:
    return max(np.abs(state).max(initial=0) * 1e-2, 1e-6)


def differs(
    found: Any, expected: Any, tolerance: float, *, floor: float, least: float = 0.0
) -> bool:
    """Returns whether two arrays differ by more than rounding.

    Args:
      tolerance: the largest difference, relative to the largest number expected.
      floor: the least size to which the tolerance is applied.
      least: a difference that is allowed in any case.
    """
    expected = np.asarray(expected, "float64")
    size = np.abs(np.where(np.isfinite(expected), expected, 0)).max(initial=0)
    return bool(measure_gap(found, expected) > max(tolerance * max(size, floor), least))


def measure_gap(found: Any, expected: Any) -> float:
    """Returns the largest difference of two arrays; infinite if their shapes differ."""
    found, expected = np.asarray(found, "float64"), np.asarray(expected, "float64")
    if found.shape != expected.shape:
        return np.inf
    same = (found == expected) | (np.isnan(found) & np.isnan(expected))
    gap = np.abs(found - expected, where=~same, out=np.zeros(found.shape))
    return float(np.where(np.isnan(gap), np.inf, gap).max(initial=0))
