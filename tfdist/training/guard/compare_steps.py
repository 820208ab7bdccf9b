"""What a step computes, and whether two computations of it agree up to rounding."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import numpy as np

# Operations that compute in float32 for every dtype of their input.
_FLOAT32 = {"CropAndResize", "ResizeArea", "ResizeBicubic", "ResizeBilinear", "ScaleAndTranslate"}
# A difference that is rounding in float32, whatever its effect on other numbers.
FLOAT32_TOLERANCE = 1e-5
# Dtype -> the relative difference of two computations, and by how much numbers are rounded.
_PRECISIONS = {
    "float64": (1e-8, 1e-12),
    "float32": (FLOAT32_TOLERANCE, 1e-7),
    "bfloat16": (0.1, 1e-5),
    "float16": (0.1, 1e-5),
}
# How many times the effect of slightly moved weights is allowed.
_MOVES = 30
# In float32, gradients and states of deep networks differ by up to three times this effect, and
# losses and outputs by little. What is beyond both of the others is no rounding.
_MOVES_OF_ROUNDING, _LOG_LIMIT = 10, 1e-3
_CLEARLY_BEYOND_TOLERANCE, _CLEARLY_BEYOND_MOVES = 5, 100


class Outcome(NamedTuple):
    """The results of a step: name -> number or array.

    Attributes:
      logs: the losses and metrics, or the outputs of a prediction.
      states: the values of variables after the step.
    """

    logs: dict[str, Any]
    gradients: dict[str, np.ndarray]
    states: dict[str, np.ndarray]


def find_precision(model: keras.Model, operations: Sequence[str]) -> tuple[float, float]:
    """Returns the relative difference that two computations of a model may have, and a rounding.

    Args:
      operations: the types of the operations of its step.
    """
    dtypes = {layer.compute_dtype for layer in model._flatten_layers()}
    dtypes.add(keras.dtype_policies.get(model.dtype_policy).compute_dtype)
    # Such as LoRA's weights, which are in float32 whatever the layer computes in.
    dtypes.update(keras.backend.standardize_dtype(v.dtype) for v in model.trainable_variables)
    single = _PRECISIONS["float32"]
    precision = max(_PRECISIONS.get(dtype, single) for dtype in dtypes)
    return precision if _FLOAT32.isdisjoint(operations) else max(precision, single)


def is_rounding(divided: Outcome, whole: Outcome, moved: Outcome) -> bool:
    """Returns whether outcomes in float32 differ as after a change of the weights by rounding.

    Args:
      divided, whole: the outcomes to compare.
      moved: the whole batch computed with slightly moved weights.
    """
    found = find_difference(
        divided, whole, FLOAT32_TOLERANCE, moved, moves=_MOVES_OF_ROUNDING, log_limit=_LOG_LIMIT
    )
    return found is None


def is_finite(outcome: Outcome) -> bool:
    """Returns whether all logs and gradients are finite."""
    numbers = [*outcome.logs.values(), *outcome.gradients.values()]
    return all(np.isfinite(np.asarray(each, "float64")).all() for each in numbers)


def find_clear_difference(divided: Outcome, whole: Outcome, moved: Outcome) -> str | None:
    """Describes a difference that is too large for rounding in float32; None if there is none.

    Args:
      divided, whole: the outcomes to compare.
      moved: the whole batch computed with slightly moved weights.
    """
    if not is_finite(divided):
        return None  # An overflow, which float64 may not have.
    tolerance = _CLEARLY_BEYOND_TOLERANCE * FLOAT32_TOLERANCE
    return find_difference(divided, whole, tolerance, moved, moves=_CLEARLY_BEYOND_MOVES)


def find_difference(
    divided: Outcome,
    whole: Outcome,
    tolerance: float,
    moved: Outcome | None = None,
    *,
    moves: float = _MOVES,
    log_limit: float = np.inf,
    log_tolerance: float = np.inf,
) -> str | None:
    """Describes the first difference between two outcomes; returns None if there is none.

    Args:
      moved: the whole batch computed with slightly moved weights. A multiple of its distance from
        `whole` is allowed as well.
      moves: this multiple.
      log_limit: the relative difference beyond which it is not for losses, metrics and outputs.
      log_tolerance: the tolerance for these, if it is smaller.
    """

    def is_other(kind: str, name: str, expected: np.ndarray | float, *, floor: float) -> bool:
        found = getattr(divided, kind).get(name)
        other = getattr(moved, kind).get(name) if moved else None
        least = 0.0 if other is None else moves * measure_gap(other, expected)
        if kind == "logs" and differs(found, expected, log_limit, floor=floor):
            least = 0.0
        least = max(least, tolerance * floor)
        allowed = min(tolerance, log_tolerance) if kind == "logs" else tolerance
        return differs(found, expected, allowed, floor=floor, least=least)

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


def list_different_states(
    divided: Outcome, whole: Outcome, tolerance: float, moved: Outcome | None = None
) -> list[str]:
    """Returns the paths of the variables whose values differ after the step."""
    different: dict[str, None] = {}
    for name, expected in whole.states.items():
        state = Outcome({}, {}, {name: expected})
        if find_difference(divided, state, tolerance, moved) is not None:
            different[name.partition("#")[0]] = None
    return list(different)


def _find_floor(state: np.ndarray) -> float:
    return max(np.abs(state).max(initial=0) * 1e-2, 1e-6)


def differs(
    found: np.ndarray | float,
    expected: np.ndarray | float,
    tolerance: float,
    *,
    floor: float,
    least: float = 0.0,
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


def measure_gap(found: np.ndarray | float, expected: np.ndarray | float) -> float:
    """Returns the largest difference of two arrays; infinite if their shapes differ."""
    found, expected = np.asarray(found, "float64"), np.asarray(expected, "float64")
    if found.shape != expected.shape:
        return np.inf
    same = (found == expected) | (np.isnan(found) & np.isnan(expected))
    gap = np.abs(found - expected, where=~same, out=np.zeros(found.shape))
    return float(np.where(np.isnan(gap), np.inf, gap).max(initial=0))
