"""Runs exported files, and scores their outputs as Keras scores those of the model."""

import importlib
import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.cli.quiet import hide_standard_error
from tfdist.data.source import Source

Predict = Callable[[np.ndarray], np.ndarray]

_COMPARED = 10  # examples


def open_file(path: str, file_format: str) -> Predict:
    """Returns a function from one input [1, ...] to its output [1, ...], on all CPU cores."""
    with hide_standard_error():
        return _open_litert(path) if file_format == "litert" else _open_onnx(path)


def _open_litert(path: str) -> Predict:
    module: Any = importlib.import_module("ai_edge_litert.interpreter")
    interpreter = module.Interpreter(path, num_threads=os.cpu_count())
    (given,), (found,) = interpreter.get_input_details(), interpreter.get_output_details()
    interpreter.allocate_tensors()

    def predict(x: np.ndarray) -> np.ndarray:
        interpreter.set_tensor(given["index"], x)
        interpreter.invoke()
        return interpreter.get_tensor(found["index"])

    return predict


def _open_onnx(path: str) -> Predict:
    module: Any = importlib.import_module("onnxruntime")
    session = module.InferenceSession(path, providers=["CPUExecutionProvider"])
    (given,) = session.get_inputs()
    return lambda x: session.run(None, {given.name: x})[0]


@dataclass(frozen=True)
class Score:
    """How well and how fast examples are predicted, one at a time; `seconds` is the median."""

    logs: dict[str, float]
    seconds: float


def read_one_by_one(
    source: Source, model: keras.Model, indices: Iterable[int] | None = None
) -> Iterator[tuple[Any, ...]]:
    """Yields batches of one: (x, y) or (x, y, sample_weight), with x in the model's dtype."""
    for index in range(source.num_examples) if indices is None else indices:
        x, *rest = source.load_batch(tf.constant([index], tf.int64))
        yield np.asarray(x).astype(model.inputs[0].dtype), *rest


def measure_difference(model: keras.Model, predict: Predict, source: Source) -> float:
    """Returns the mean difference of the first outputs, as a fraction of their mean size."""
    difference, size = 0.0, 0.0
    for x, *_ in itertools.islice(read_one_by_one(source, model), _COMPARED):
        expected = np.asarray(model.predict_on_batch(x))
        difference += float(np.abs(predict(x) - expected).mean())
        size += float(np.abs(expected).mean())
    return difference / size


def score_examples(
    model: keras.Model, predict: Predict, examples: Iterator[tuple[Any, ...]]
) -> Score:
    """Returns the score of a function's predictions.

    Args:
      model: a compiled model, for its loss and metrics.
      predict: a function from x [1, ...] to y_pred [1, ...].
    """
    model.reset_metrics()
    seconds, losses = [], []
    logs: dict[str, Any] = {}
    for x, y, *rest in examples:
        started = time.perf_counter()
        found = predict(x)
        seconds.append(time.perf_counter() - started)
        y_pred, weight = tf.constant(found), rest[0] if rest else None
        losses.append(float(model.compute_loss(x, y, y_pred, weight, training=False)))
        logs = dict(model.compute_metrics(x, y, y_pred, weight))
    scores: dict[str, float] = {}
    for name, value in logs.items():
        # A metric can have several values.
        values = value if isinstance(value, dict) else {name: value}
        scores |= {key: float(number) for key, number in values.items()}
    # The first call prepares what the others use.
    return Score(
        {**scores, "loss": float(np.mean(losses))}, float(np.median(seconds[1:] or seconds))
    )
