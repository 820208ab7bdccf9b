"""Functions that run on different devices one after the other, and their backward passes.

TensorFlow's tape puts the operations of a backward pass, and the sums of gradients, on one device.
Here each function has a tape of its own, and the gradients are passed on by hand: a function's
backward pass runs where the function ran, and the gradients of a tensor are added where it was
computed.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfdist.placement.tracing import copy_with_mask, has_gradient

Compute = Callable[..., Sequence[tf.Tensor]]


class _Cell(NamedTuple):
    device: str
    tape: tf.GradientTape
    inputs: Sequence[tf.Tensor]
    copies: Sequence[tf.Tensor]
    outputs: Sequence[tf.Tensor]


class DeviceTape:
    """Runs functions on devices, by default on `first`."""

    def __init__(self, first: str, *, is_recorded: bool):
        self._first = first
        self._is_recorded = is_recorded
        self._cells: list[_Cell] = []
        self._devices: dict[int, str] = {}

    def run(
        self, device: str | None, function: Compute, inputs: Sequence[tf.Tensor]
    ) -> list[tf.Tensor]:
        """Returns the tensors that a function of the inputs returns, computed on a device."""
        device = device or self._first
        tape = tf.GradientTape(persistent=True, watch_accessed_variables=False)
        with tf.device(device), tape if self._is_recorded else contextlib.nullcontext():
            copies = [copy_with_mask(tensor) for tensor in inputs]
            if self._is_recorded:
                tape.watch([copy for copy in copies if has_gradient(copy)])
            outputs = list(function(*copies))
        if self._is_recorded:
            self._cells.append(_Cell(device, tape, list(inputs), copies, outputs))
            self._devices |= {id(output): device for output in outputs}
        return outputs

    def differentiate(
        self,
        targets: Sequence[tf.Tensor],
        upstream: Sequence[tf.Tensor | None],
        sources: Sequence[tf.Tensor],
    ) -> list[Any]:
        """Returns the gradients of tensors that functions took; None where they do not matter."""
        found: dict[int, Any] = {}

        def add(tensor: tf.Tensor, gradient: tf.Tensor | tf.IndexedSlices) -> None:
            if id(tensor) in found:
                with tf.device(self._devices.get(id(tensor), self._first)):
                    dense = map(tf.convert_to_tensor, (found[id(tensor)], gradient))
                    gradient = tf.add(*dense)
            found[id(tensor)] = gradient

        for target, gradient in zip(targets, upstream, strict=True):
            if gradient is not None:
                add(target, gradient)
        for cell in reversed(self._cells):
            results = {id(o): o for o in cell.outputs if id(o) in found}
            if not results:
                continue
            taken = [i for i, copy in enumerate(cell.copies) if has_gradient(copy)]
            with tf.device(cell.device):
                gradients = cell.tape.gradient(
                    list(results.values()),
                    [cell.copies[i] for i in taken],
                    [found[key] for key in results],
                )
            for i, gradient in zip(taken, gradients, strict=True):
                if gradient is not None:
                    add(cell.inputs[i], gradient)
        return [found.get(id(source)) for source in sources]
