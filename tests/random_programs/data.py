"""What random programs train on."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.random_programs.inputs import Input

ROWS = {"30 rows": 30, "32 rows": 32, "25 rows": 25, "7 rows": 7}
BATCH = 8
FORMS = {
    name: name for name in ("arrays", "dataset", "shuffled", "batches", "endless", "generator")
}

_FIT: dict[str, dict[str, Any]] = {
    "plain": {},
    "first epoch": {"initial_epoch": 1},
    "seldom validated": {"validation_freq": 2},
    "few validation steps": {"validation_steps": 2},
    "class weights": {"class_weight": {0: 0.5, 1: 2.0, 2: 1.0, 3: 0.1}},
    "split": {"validation_split": 0.3},
}


def list_fit_options(form: str, kind: str, *, is_weighted: bool) -> dict[str, dict[str, Any]]:
    """Returns those arguments of `fit` that Keras takes with such data."""
    refused = {
        "class weights": kind != "classes" or is_weighted,
        "split": form != "arrays",
    }
    return {name: found for name, found in _FIT.items() if not refused.get(name)}


@dataclasses.dataclass(frozen=True)
class Data:
    """What a program trains on."""

    rows: int
    kind: str
    make_input: Callable[[], "Input"]
    make_weights: Callable[[int], Any]
    form: str
    fit: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def make_arrays(self) -> tuple[Any, Any, Any]:
        rng = np.random.default_rng(self.rows)
        y = {"numbers": rng.normal(size=(self.rows, 3)), "classes": rng.integers(0, 4, self.rows)}
        return (
            self.make_input().draw(rng, self.rows),
            y if self.kind == "two" else y[self.kind],
            self.make_weights(self.rows),
        )

    def make_arguments(self, *, validates: bool = False) -> dict[str, Any]:
        """Returns arguments of `fit`."""
        x, y, _ = self.make_arrays()
        validation = {"validation_data": (x, y), "validation_batch_size": 8}
        return {
            **self._make_training_data(),
            **(validation if validates else {}),
            **self.fit,
        }

    def _make_training_data(self) -> dict[str, Any]:
        x, y, weights = self.make_arrays()
        if self.form == "arrays":
            return {"x": x, "y": y, "sample_weight": weights, "batch_size": BATCH}
        parts = (x, y) if weights is None else (x, y, weights)
        if self.form == "batches":
            return {"x": Batches(parts)}
        dataset = tf.data.Dataset.from_tensor_slices(parts)
        if self.form == "shuffled":
            dataset = dataset.shuffle(self.rows, seed=3)
        dataset = dataset.batch(BATCH)
        if self.form == "endless":
            return {"x": dataset.repeat(), "steps_per_epoch": 4}
        if self.form == "generator":
            return {"x": _generate(dataset.repeat()), "steps_per_epoch": 4}
        return {"x": dataset}


def _generate(dataset):
    yield from dataset.as_numpy_iterator()


class Batches(keras.utils.PyDataset):
    """Batches of arrays, as a Keras sequence."""

    def __init__(self, parts):
        super().__init__()
        self._parts = parts
        self._rows = len(keras.tree.flatten(parts)[0])

    def __len__(self):
        return -(-self._rows // BATCH)

    def __getitem__(self, index):
        rows = slice(index * BATCH, (index + 1) * BATCH)
        return keras.tree.map_structure(lambda part: part[rows], self._parts)
