"""Reads and writes the JSON of TensorFlow Serving's REST interface.

Source: https://www.tensorflow.org/tfx/serving/api_rest
"""

import base64
import binascii
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
import tensorflow as tf

from tfdist.serve.servable import Arrays, RequestError, Signature

DEFAULT_SIGNATURE = "serving_default"
_FIELDS = {"signature_name", "instances", "inputs", "output_filter"}
_MAX_DEPTH = 32


@dataclass(frozen=True)
class PredictRequest:
    """A request, as arrays.

    Attributes:
      inputs: name -> array, with the dtype and shape of the signature.
      is_row: whether it has `instances`, so that the answer has one prediction for each.
    """

    signature: Signature
    inputs: Arrays
    is_row: bool
    outputs: Sequence[str]


def parse_request(
    body: bytes, signatures: Mapping[str, Signature], *, max_instances: int
) -> PredictRequest:
    """Returns the request in a body.

    Besides TensorFlow Serving's fields, `output_filter` may list the outputs to answer with, as
    in its gRPC interface.

    Raises:
      RequestError: the body is not such a request, or does not suit the signature.
    """
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise RequestError(f"The body is not JSON: {error}.") from error
    if not isinstance(fields, dict) or ("instances" in fields) == ("inputs" in fields):
        raise RequestError('Send an object with either "instances" or "inputs".')
    if unknown := sorted(set(fields) - _FIELDS):
        raise RequestError(f"Unknown field {unknown[0]!r}. Valid: {', '.join(sorted(_FIELDS))}.")
    name = fields.get("signature_name") or DEFAULT_SIGNATURE
    if not isinstance(name, str) or name not in signatures:
        raise RequestError(f"Unknown signature {name!r}. Valid: {', '.join(sorted(signatures))}.")
    signature = signatures[name]
    outputs = fields.get("output_filter", list(signature.outputs))
    if not isinstance(outputs, list) or not outputs or not _are_names(outputs, signature.outputs):
        raise RequestError(f"output_filter must list outputs: {', '.join(signature.outputs)}.")
    is_row = "instances" in fields
    if is_row:
        columns = _split_instances(fields["instances"], list(signature.inputs))
    else:
        columns = _split_inputs(fields["inputs"], list(signature.inputs))
    inputs = {key: _to_array(columns[key], key, spec) for key, spec in signature.inputs.items()}
    _check_rows(inputs, signature, is_row=is_row, max_instances=max_instances)
    return PredictRequest(signature, inputs, is_row, outputs)


def format_response(request: PredictRequest, outputs: Arrays) -> bytes:
    """Returns the JSON of an answer."""
    values = {name: _to_json(name, outputs[name]) for name in request.outputs}
    content: Any = values
    if len(request.outputs) == 1:
        content = values[request.outputs[0]]
    elif request.is_row:
        content = [
            dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True)
        ]
    key = "predictions" if request.is_row else "outputs"
    return orjson.dumps({key: content}, option=orjson.OPT_SERIALIZE_NUMPY)


def _are_names(values: list[Any], names: Mapping[str, Any]) -> bool:
    return all(isinstance(value, str) and value in names for value in values)


def _split_instances(instances: Any, names: list[str]) -> dict[str, Any]:
    if not isinstance(instances, list) or not instances:
        raise RequestError('"instances" must be a list with at least one instance.')
    if not all(isinstance(instance, dict) and not _is_b64(instance) for instance in instances):
        if len(names) > 1:
            raise RequestError(f"Each instance must be an object of {', '.join(names)}.")
        return {names[0]: instances}
    for index, instance in enumerate(instances):
        if set(instance) != set(names):
            raise RequestError(
                f"instances[{index}] has {', '.join(sorted(instance)) or 'nothing'}, but the "
                f"signature's inputs are {', '.join(names)}."
            )
    return {name: [instance[name] for instance in instances] for name in names}


def _split_inputs(inputs: Any, names: list[str]) -> dict[str, Any]:
    if isinstance(inputs, dict) and not _is_b64(inputs):
        if set(inputs) != set(names):
            raise RequestError(
                f'"inputs" has {", ".join(sorted(inputs)) or "nothing"}, but the signature\'s '
                f"inputs are {', '.join(names)}."
            )
        return inputs
    if len(names) != 1:
        raise RequestError(f'"inputs" must be an object of {", ".join(names)}.')
    return {names[0]: inputs}


def _is_b64(value: dict[str, Any]) -> bool:
    return set(value) == {"b64"}


def _to_array(value: Any, name: str, spec: tf.TensorSpec) -> np.ndarray:
    convert: Callable[..., np.ndarray] = _to_strings if spec.dtype == tf.string else _to_numbers
    try:
        array = convert(value, spec)
    except (ValueError, TypeError, OverflowError, binascii.Error) as error:
        raise RequestError(f"{name} is not {spec.dtype.name} of one shape: {error}") from error
    if not spec.shape.is_compatible_with(array.shape):
        raise RequestError(
            f"{name} has the shape {array.shape}, but the signature expects {spec.shape}."
        )
    return array


def _to_numbers(value: Any, spec: tf.TensorSpec) -> np.ndarray:
    array = np.asarray(value)
    kinds = "b" if spec.dtype.is_bool else "iu" if spec.dtype.is_integer else "iuf"
    if array.dtype.kind not in kinds and array.size:
        raise ValueError(f"found values of the type {array.dtype}")
    if spec.dtype.is_integer and array.size:
        limits = np.iinfo(spec.dtype.as_numpy_dtype)
        if array.min() < limits.min or array.max() > limits.max:
            raise ValueError("a value is out of range")
    with np.errstate(over="ignore"):
        return array.astype(spec.dtype.as_numpy_dtype)


def _to_strings(value: Any, spec: tf.TensorSpec) -> np.ndarray:
    array = np.array(_decode(value, 0), dtype=object)
    if not all(isinstance(item, bytes) for item in array.flat):
        raise ValueError("lists differ in length")
    return array


def _decode(value: Any, depth: int) -> Any:
    if isinstance(value, list) and depth < _MAX_DEPTH:
        return [_decode(item, depth + 1) for item in value]
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, dict) and _is_b64(value) and isinstance(value["b64"], str):
        return base64.b64decode(value["b64"], validate=True)
    raise ValueError('found neither a string nor {"b64": "..."}')


def _check_rows(inputs: Arrays, signature: Signature, *, is_row: bool, max_instances: int) -> None:
    if not (is_row or signature.is_batched):
        return
    numbers = {len(array) if array.ndim else -1 for array in inputs.values()}
    if len(numbers) != 1 or numbers <= {-1, 0}:
        raise RequestError("All inputs must have the same number of rows, at least one.")
    if max(numbers) > max_instances:
        raise RequestError(
            f"The request has {max(numbers)} instances, but {max_instances} are allowed. Send "
            "several requests.",
            status=413,
        )


def _to_json(name: str, array: np.ndarray) -> Any:
    if array.dtype == object:
        return _encode(array.tolist(), is_binary=name.endswith("_bytes"))
    if array.dtype.kind not in "biuf":  # bfloat16, which JSON libraries do not know
        array = array.astype(np.float32)
    return np.ascontiguousarray(array)


def _encode(value: Any, *, is_binary: bool) -> Any:
    if isinstance(value, list):
        return [_encode(item, is_binary=is_binary) for item in value]
    if not is_binary:
        try:
            return value.decode()
        except UnicodeDecodeError:
            pass
    return {"b64": base64.b64encode(value).decode()}
