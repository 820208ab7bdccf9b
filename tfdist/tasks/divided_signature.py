"""Signatures in two parts: what is done for each example, and what for a batch."""

from dataclasses import dataclass
from typing import Any

import tensorflow as tf

_READ, _ANSWER = "read_{}", "answer_{}"


@dataclass(frozen=True)
class DividedSignature:
    """A signature that a server may run in two parts.

    A server that knows the parts reads each example when it arrives, so that what cannot be read
    does not get into a batch, and puts only what was read into batches. For others, the signature
    is a function as any other.

    Args:
      read: a `tf.function` with an input signature: one example, without the batch axis -> name ->
        tensor.
      answer: a `tf.function` with an input signature: a batch of what `read` returns -> the
        signature's outputs.
    """

    name: str
    read: Any
    answer: Any

    @property
    def whole(self) -> Any:
        """The signature: a function of a batch of examples."""
        read = self.read.get_concrete_function()
        inputs = read.structured_input_signature[0]
        outputs = read.structured_outputs.items()
        specs = {name: tf.TensorSpec(output.shape, output.dtype) for name, output in outputs}

        def run(*examples: tf.Tensor) -> dict[str, tf.Tensor]:
            found = tf.map_fn(lambda one: self.read(*one), examples, fn_output_signature=specs)
            return self.answer(**found)

        return tf.function(
            run,
            input_signature=[
                tf.TensorSpec([None, *spec.shape], spec.dtype, name=spec.name) for spec in inputs
            ],
            autograph=False,
        )

    @property
    def functions(self) -> dict[str, Any]:
        """Attribute -> function, for the object that is saved."""
        return {_READ.format(self.name): self.read, _ANSWER.format(self.name): self.answer}


def find_parts(saved: Any, name: str) -> tuple[Any, Any] | None:
    """Returns both parts of a signature, as concrete functions; None if it is not divided."""
    names = _READ.format(name), _ANSWER.format(name)
    read, answer = (getattr(saved, name, None) for name in names)
    if read is None or answer is None:
        return None
    return read.concrete_functions[0], answer.concrete_functions[0]


def list_inputs(function: tf.types.experimental.ConcreteFunction) -> dict[str, tf.TensorSpec]:
    """Returns the inputs of a concrete function: name -> dtype and shape."""
    positional, named = function.structured_input_signature
    return {**{spec.name: spec for spec in positional}, **named}
