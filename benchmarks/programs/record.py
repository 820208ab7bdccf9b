"""Records the results of a program's training, and compares two records."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

# How far two runs may be apart, by precision. Rounding differs if sums are taken in another order,
# and an optimizer such as Adam amplifies it, because it divides small gradients by themselves.
FIRST_EPOCH_TOLERANCE = {"float64": 1e-9, "float32": 1e-4}
LOSS_TOLERANCE = {"float64": 1e-7, "float32": 1e-2}
WEIGHT_TOLERANCE = {"float64": 1e-7, "float32": 2e-2}
_MOST_VALUES = 100_000


class Recorder:
    """Collects the results of `fit`, `evaluate` and `predict`, and the models that were fitted."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self._predictions: list[np.ndarray] = []
        self._models: list[Any] = []

    def add_fit(self, model: Any, history: dict[str, list[float]]) -> None:
        self.calls.append({"call": "fit", "history": _to_plain(history)})
        if not any(model is other for other in self._models):
            self._models.append(model)

    def add_evaluate(self, results: Any) -> None:
        self.calls.append({"call": "evaluate", "results": _to_plain(results)})

    def add_predict(self, outputs: Any) -> None:
        import keras

        leaves = [_sample(leaf) for leaf in keras.tree.flatten(outputs)]
        self.calls.append({"call": "predict", "outputs": len(leaves)})
        self._predictions += leaves

    def save(self, path: Path) -> None:
        """Writes the collected results, with the models' current weights."""
        weights = [_sample(w) for model in self._models for w in model.get_weights()]
        np.savez(
            path,
            calls=json.dumps(self.calls),
            **{f"prediction_{index}": value for index, value in enumerate(self._predictions)},
            **{f"weight_{index}": value for index, value in enumerate(weights)},
        )


@dataclass(frozen=True)
class Difference:
    """How far two runs are apart.

    Attributes:
      text: the first difference beyond the tolerances, or an empty text.
      loss: the largest relative difference of a loss or metric.
      weights: the relative difference of all weights.
    """

    text: str
    loss: float
    weights: float


def compare(reference: Path, other: Path, floatx: str) -> Difference:
    """Compares two files that `Recorder` saved."""
    first, second = np.load(reference), np.load(other)
    calls, others = json.loads(str(first["calls"])), json.loads(str(second["calls"]))
    worst, text = 0.0, ""
    if len(calls) != len(others):
        text = f"{len(others)} calls instead of {len(calls)}"
    for index, (call, same) in enumerate(zip(calls, others, strict=False)):
        found = _compare_calls(call, same, floatx, is_first=index == 0)
        worst = max(worst, found[0])
        text = text or (f"call {index + 1}, {call['call']}: {found[1]}" if found[1] else "")
    weights = _compare_arrays(first, second, "weight_")
    predictions = _compare_arrays(first, second, "prediction_")
    tolerance = WEIGHT_TOLERANCE[floatx]
    for what, value in (("weights", weights), ("predictions", predictions)):
        if not text and not value <= tolerance:
            text = f"{what} by {value:.1e}"
    return Difference(text, worst, weights)


def _compare_calls(call: dict, other: dict, floatx: str, *, is_first: bool) -> tuple[float, str]:
    if call["call"] != other["call"]:
        return np.inf, f"{other['call']} instead"
    if call["call"] == "predict":
        return 0.0, ""
    if call["call"] == "evaluate":
        values, others = _name_results(call["results"]), _name_results(other["results"])
    else:
        values, others = call["history"], other["history"]
    if set(values) != set(others):
        return np.inf, f"{_list(others)} instead of {_list(values)}"
    worst, text = 0.0, ""
    for name, ours in values.items():
        theirs = others[name]
        if np.shape(ours) != np.shape(theirs):
            text = text or f"{name} has {len(theirs)} epochs instead of {len(ours)}"
            continue
        for epoch, (a, b) in enumerate(zip(np.ravel(ours), np.ravel(theirs), strict=True)):
            # The floor keeps one example more or less from being a large gap in a small share.
            is_share = floatx == "float32" and "loss" not in name
            gap = _get_relative_gap(a, b, floor=0.1 if is_share else 1e-6)
            worst = max(worst, gap)
            if not gap <= _get_tolerance(name, floatx, is_first=is_first and epoch == 0):
                text = text or f"{name} of epoch {epoch + 1} is {b:.6g} instead of {a:.6g}"
    return worst, text


def _get_tolerance(name: str, floatx: str, *, is_first: bool) -> float:
    if floatx == "float32" and "loss" not in name:
        return 5e-2  # one example more or less may be classified correctly
    return (FIRST_EPOCH_TOLERANCE if is_first else LOSS_TOLERANCE)[floatx]


def _get_relative_gap(a: float, b: float, *, floor: float) -> float:
    if np.isnan(a) and np.isnan(b):
        return 0.0
    return float(abs(a - b) / max(abs(a), abs(b), floor)) if a != b else 0.0


def _compare_arrays(first: Any, second: Any, prefix: str) -> float:
    names = [name for name in first.files if name.startswith(prefix)]
    if names != [name for name in second.files if name.startswith(prefix)]:
        return np.inf
    gap = size = 0.0
    for name in names:
        a, b = first[name], second[name]
        if a.shape != b.shape:
            return np.inf
        if a.dtype.kind not in "fiub":
            continue
        a, b = a.astype("float64"), b.astype("float64")
        if np.array_equal(np.isnan(a), np.isnan(b)):
            a, b = np.nan_to_num(a), np.nan_to_num(b)
        gap += float(np.sum((a - b) ** 2))
        size += float(np.sum(a**2))
    return float(np.sqrt(gap / max(size, 1e-12)))


def _name_results(results: Any) -> dict[str, Any]:
    if isinstance(results, dict):
        return results
    return {f"loss or metric {index}": value for index, value in enumerate(np.ravel(results))}


def _list(values: dict) -> str:
    return ", ".join(values) or "nothing"


def _sample(value: Any) -> np.ndarray:
    array = np.asarray(value)
    flat = array.ravel()
    return flat[:: max(1, -(-flat.size // _MOST_VALUES))] if array.ndim else array


def _to_plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): _to_plain(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_plain(part) for part in value]
    return np.asarray(value, dtype="float64").tolist()
