"""One version of a servable: a SavedModel with signatures, loaded on one or several devices."""

import queue
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf
from google.protobuf import json_format
from tensorflow.core.protobuf import saved_model_pb2

from tfdist.errors import TfdistError, shorten_error
from tfdist.serve.model_files import SAVED_MODEL
from tfdist.tasks.divided_signature import find_parts, list_inputs

_CLASS_NAMES = "assets/class_names.txt"
_MOST_NARROWED = 32  # because clients choose the outputs, and each function takes memory

Arrays = Mapping[str, np.ndarray]


class RequestError(Exception):
    """A request is not answered; the client gets a status, and one line with what to do."""

    def __init__(self, message: str, *, status: int = 400):
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Signature:
    """A signature of a servable: the dtypes and shapes of its inputs and outputs."""

    name: str
    inputs: Mapping[str, tf.TensorSpec]
    outputs: Mapping[str, tf.TensorSpec]

    @property
    def is_batched(self) -> bool:
        """Whether the first axis of all inputs and outputs is that of the examples."""
        specs = [*self.inputs.values(), *self.outputs.values()]
        return all(spec.shape.rank and spec.shape[0] is None for spec in specs)


class Servable:
    """A loaded SavedModel.

    Args:
      path: the directory of `saved_model.pb`, on any file system of `tf.io.gfile`.
      num_calls: the number of calls of `run` at the same time, at most.

    Attributes:
      class_names: the lines of the asset `class_names.txt`, if there is one.

    Raises:
      TfdistError: it cannot be loaded, or has no signatures.
    """

    def __init__(self, path: str, *, version: int, devices: Sequence[str], num_calls: int):
        self.path = path
        self.version = version
        try:
            self._copies = [_load(path, device) for device in devices]
        except Exception as error:  # TensorFlow raises errors of many classes.
            raise TfdistError(f"Cannot load {path}: {shorten_error(error)}") from error
        self.signatures = {
            name: Signature(name, list_inputs(function), _list_outputs(function))
            for name, function in self._copies[0].signatures.items()
        }
        if not self.signatures:
            raise TfdistError(
                f"Cannot serve {path}: it has no signatures. Save it with `signatures=`, or use "
                "tfdist.export."
            )
        self.class_names = _read_class_names(path)
        self._devices = tuple(devices)
        parts = (
            {name: find_parts(copy, name) for name in self.signatures} for copy in self._copies
        )
        self._parts = [{name: both for name, both in found.items() if both} for found in parts]
        self._narrowed: dict[tuple[int, str, frozenset[str]], Any] = {}
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        for call in range(num_calls):
            self._free.put(call % len(devices))

    def is_divided(self, signature: str) -> bool:
        """Whether a signature reads each example alone; see `DividedSignature`."""
        return signature in self._parts[0]

    def read(self, signature: str, inputs: Arrays) -> Arrays:
        """Returns what `run` expects for the inputs of a signature, example by example."""
        if not self.is_divided(signature):
            return inputs
        read = self._parts[0][signature][0]
        rows = []
        for index, example in enumerate(zip(*inputs.values(), strict=True)):
            try:
                with tf.device("CPU:0"):
                    found = read(**dict(zip(inputs, map(tf.constant, example), strict=True)))
            except tf.errors.OpError as error:
                raise RequestError(
                    f"{', '.join(inputs)}[{index}] cannot be read: {shorten_error(error)}"
                ) from error
            rows.append({name: value.numpy() for name, value in found.items()})
        return {name: np.stack([row[name] for row in rows]) for name in rows[0]}

    def run(
        self, signature: str, inputs: Arrays, *, outputs: Collection[str] = ()
    ) -> dict[str, np.ndarray]:
        """Returns the outputs of a signature, computed on a device that is free.

        Args:
          outputs: the outputs that are needed; the others may be left out. Empty for all.
        """
        index = self._free.get()
        try:
            with tf.device(self._devices[index]):
                function = self._narrow(index, signature, frozenset(outputs))
                found = function(**{name: tf.constant(a) for name, a in inputs.items()})
            return {name: value.numpy() for name, value in found.items()}
        finally:
            self._free.put(index)

    def _narrow(self, index: int, signature: str, outputs: frozenset[str]) -> Any:
        """Returns the function of a signature, which computes nothing for other outputs."""
        whole = self._copies[index].signatures[signature]
        if self.is_divided(signature):
            whole = self._parts[index][signature][1]
        key = index, signature, outputs
        if not outputs or outputs == set(whole.structured_outputs):
            return whole
        if key not in self._narrowed and len(self._narrowed) < _MOST_NARROWED:

            def compute(**inputs: tf.Tensor) -> dict[str, tf.Tensor]:
                found = whole(**inputs)
                return {name: found[name] for name in outputs}

            self._narrowed[key] = tf.function(compute, autograph=False).get_concrete_function(
                **list_inputs(whole)
            )
        return self._narrowed.get(key, whole)

    def warm_up(self) -> None:
        """Runs every signature once on every device, because the first call is slow."""
        for signature in self.signatures.values():
            inputs = {name: make_example(spec, name) for name, spec in signature.inputs.items()}
            for _ in self._devices:
                try:
                    self.run(signature.name, self.read(signature.name, inputs))
                except (tf.errors.OpError, RequestError):
                    break  # The made-up inputs do not suit this model.

    def describe(self) -> dict[str, Any]:
        """Returns signature name -> its SignatureDef, ready for JSON."""
        with tf.io.gfile.GFile(f"{self.path}/{SAVED_MODEL}", "rb") as file:
            graph = saved_model_pb2.SavedModel.FromString(file.read()).meta_graphs[0]
        return {
            name: json_format.MessageToDict(
                definition,
                preserving_proto_field_name=True,
                always_print_fields_with_no_presence=True,
            )
            for name, definition in graph.signature_def.items()
            if name in self.signatures
        }


def make_example(spec: tf.TensorSpec, name: str) -> np.ndarray:
    """Returns a batch of one example for an input: zeros, or one black pixel as a PNG file.

    Axes of unknown size get the size 1.
    """
    shape = [size or 1 for size in spec.shape] if spec.shape.rank is not None else [1]
    if spec.dtype == tf.string:
        return np.full(shape, _encode_pixel() if name == "image_bytes" else b"", object)
    return np.zeros(shape, spec.dtype.as_numpy_dtype)


def _encode_pixel() -> bytes:
    return tf.io.encode_png(np.zeros((1, 1, 3), np.uint8)).numpy()


def _load(path: str, device: str) -> Any:
    with tf.device(device):
        return tf.saved_model.load(path)


def _list_outputs(function: tf.types.experimental.ConcreteFunction) -> dict[str, tf.TensorSpec]:
    return {
        name: tf.TensorSpec(output.shape, output.dtype)
        for name, output in function.structured_outputs.items()
    }


def _read_class_names(path: str) -> tuple[str, ...]:
    if not tf.io.gfile.exists(f"{path}/{_CLASS_NAMES}"):
        return ()
    with tf.io.gfile.GFile(f"{path}/{_CLASS_NAMES}") as file:
        return tuple(file.read().splitlines())
