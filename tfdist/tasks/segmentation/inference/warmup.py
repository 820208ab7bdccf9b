"""Encodes TensorFlow Serving's warm-up requests without its Python package.

The few fields that a request needs are all nested messages and strings, which the wire format
of protocol buffers encodes in the same way: a key, a length, the bytes.

Source: tensorflow_serving/apis/prediction_log.proto, predict.proto and model.proto, and
https://protobuf.dev/programming-guides/encoding/
"""

from collections.abc import Mapping

import numpy as np
import tensorflow as tf

# PredictionLog.predict_log, PredictLog.request, PredictRequest.model_spec and .inputs,
# ModelSpec.name and .signature_name, and the two fields of a map's entry.
_PREDICT_LOG, _REQUEST, _MODEL_SPEC, _INPUTS = 6, 1, 1, 2
_NAME, _SIGNATURE_NAME = 1, 3
_KEY, _VALUE = 1, 2
_LENGTH_DELIMITED = 2

_MODEL_NAME = "tfdist"  # Any name: a server warms up the model in which it finds the request.


def encode_predict_request(signature: str, inputs: Mapping[str, np.ndarray]) -> bytes:
    """Returns a `tensorflow.serving.PredictionLog` with one request; bytes have dtype object."""
    spec = _encode(_NAME, _MODEL_NAME.encode()) + _encode(_SIGNATURE_NAME, signature.encode())
    request = _encode(_MODEL_SPEC, spec)
    for name, value in inputs.items():
        tensor = tf.make_tensor_proto(value).SerializeToString()
        request += _encode(_INPUTS, _encode(_KEY, name.encode()) + _encode(_VALUE, tensor))
    return _encode(_PREDICT_LOG, _encode(_REQUEST, request))


def _encode(field: int, content: bytes) -> bytes:
    return _encode_varint(field << 3 | _LENGTH_DELIMITED) + _encode_varint(len(content)) + content


def _encode_varint(value: int) -> bytes:
    """Returns a number in groups of 7 bits, lowest first, with a mark on all but the last.

    >>> _encode_varint(300).hex()
    'ac02'
    """
    groups = bytearray()
    while value > 0x7F:
        groups.append(value & 0x7F | 0x80)
        value >>= 7
    groups.append(value)
    return bytes(groups)
