"""Runs LiteRT and ONNX files."""

import importlib
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import numpy as np

from tfdist.cli.quiet import hide_standard_error

Predict = Callable[[np.ndarray], np.ndarray]


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
