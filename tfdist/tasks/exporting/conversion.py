"""Converts Keras models to LiteRT and ONNX files."""

import warnings
from collections.abc import Iterable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.cli.quiet import hide_standard_error
from tfdist.errors import TfdistError, shorten_error


def convert_model(
    model: keras.Model,
    path: str,
    *,
    file_format: str,
    quantize: str = "none",
    samples: Iterable[np.ndarray] = (),
) -> None:
    """Writes a model as a file.

    Args:
      model: a float32 model of Keras's own layers, with one input and one output.
      quantize: for LiteRT: "none"; "float16", which stores the weights in half of the bytes; or
        "int8", which also computes in 8 bits.
      samples: for int8: inputs [1, ...] that represent all inputs.

    Raises:
      TfdistError: the model has several inputs or outputs, or an operation that the format or
        its converter lacks.

    Source: https://ai.google.dev/edge/litert/models/post_training_quantization
    """
    counts = len(keras.tree.flatten(model.inputs)), len(keras.tree.flatten(model.outputs))
    if counts != (1, 1):
        raise TfdistError(
            f"Cannot export `format={file_format}`: the model has {counts[0]} inputs and "
            f"{counts[1]} outputs, but files are of models with one of each. Leave out `format`."
        )
    if file_format == "litert":
        options = _make_options(quantize, samples)
    else:
        given = model.inputs[0]
        options = {"input_signature": [tf.TensorSpec(given.shape, given.dtype, given.name)]}
    try:
        with hide_standard_error(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.export(path, format=file_format, verbose=False, **options)
    except TfdistError:
        raise
    except Exception as error:  # The converters raise whatever they like.
        raise TfdistError(
            f"Cannot export `format={file_format}` with `quantize={quantize}`: the converter "
            f"fails with {type(error).__name__}: {shorten_error(error)}. Leave out `format`."
        ) from error


def to_float32(model: keras.Model) -> keras.Model:
    """Returns the model, or a copy of a functional model whose layers compute in float32."""
    if all(layer.compute_dtype == "float32" for layer in model.layers):
        return model

    def clone(layer: keras.layers.Layer) -> keras.layers.Layer:
        return type(layer).from_config({**layer.get_config(), "dtype": "float32"})

    made = keras.models.clone_model(model, clone_function=clone)
    made.set_weights(model.get_weights())
    return made


def _make_options(quantize: str, samples: Iterable[np.ndarray]) -> dict[str, Any]:
    """Returns the settings of TensorFlow's converter.

    All of them exclude operations of TensorFlow itself, which the interpreter does not have.
    """
    kind = tf.lite.OpsSet
    options: dict[str, Any] = {"target_spec": {"supported_ops": [kind.TFLITE_BUILTINS]}}
    if quantize != "none":
        options["optimizations"] = [tf.lite.Optimize.DEFAULT]
    if quantize == "float16":
        options["target_spec"]["supported_types"] = [tf.float16]
    if quantize == "int8":
        options["target_spec"]["supported_ops"] = [kind.TFLITE_BUILTINS_INT8]
        options["representative_dataset"] = lambda: ([sample] for sample in samples)
    return options
