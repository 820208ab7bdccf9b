"""What stands in for the variables of an optimizer, and for a weight, while they are cut."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.errors import TfdistError
from tfdist.placement.optimizer.cutting import Piece
from tfdist.placement.stand_in import StandIn

Gather = Callable[[np.ndarray], np.ndarray]
"""Returns the elements of all workers, one worker after another; all of them must call it."""


class CutVariable(StandIn):
    """A variable of an optimizer whose pieces are on the replicas that use them.

    With several workers, all of them must read and assign it together.

    Args:
      parts: replica -> the variable of its piece, for the replicas of this process.
      gather: gathers the elements of all workers; None if there is one.
    """

    def __init__(
        self,
        shape: Sequence[int],
        pieces: Sequence[Piece],
        parts: Mapping[int, tf.Variable],
        *,
        dtype: tf.DType,
        name: str,
        gather: Gather | None,
    ):
        self.shape, self.dtype, self.name = tf.TensorShape(shape), dtype, name
        self.parts = dict(parts)
        self._pieces, self._gather = list(pieces), gather

    def numpy(self) -> np.ndarray:
        """Returns the whole value."""
        own = [np.zeros([0], self.dtype.as_numpy_dtype)]
        own += [part.numpy().reshape(-1) for part in self.parts.values()]
        elements = np.concatenate(own)
        return (self._gather(elements) if self._gather else elements).reshape(self.shape)

    def read_value(self) -> tf.Tensor:
        """Returns the whole value."""
        if tf.executing_eagerly():
            return tf.constant(self.numpy())
        if self._gather:
            raise TfdistError(
                f"Cannot read {self.name} within a step, because `shard_optimizer` divides it over "
                "the workers. Leave out `shard_optimizer`."
            )
        flat = [tf.reshape(part, [-1]) for part in self.parts.values()]
        return tf.reshape(tf.concat(flat, 0), self.shape)

    def _update(self, method: str, value: Any, options: Mapping[str, Any]) -> None:
        value = tf.convert_to_tensor(value, self.dtype)
        for piece in self._pieces:
            part = self.parts.get(piece.replica)
            if part is not None:
                own = tf.reshape(piece.take(value), part.shape)
                getattr(part, method)(own, **options)


class WeightPiece(StandIn):
    """A piece of a weight, which an optimizer updates in place of the weight's variable."""

    def __init__(self, value: tf.Tensor, weight: Any):
        self._value = value
        self.dtype, self.shape, self.name = value.dtype, value.shape, weight.name
        self._unique_id = weight._unique_id  # optimizers find the state of a weight by this

    def read_value(self) -> tf.Tensor:
        """Returns the elements."""
        return self._value

    def scatter_add(self, slices: tf.IndexedSlices, **_: Any) -> None:
        """Adds to some rows."""
        self._scatter(tf.tensor_scatter_nd_add, slices)

    def scatter_sub(self, slices: tf.IndexedSlices, **_: Any) -> None:
        """Subtracts from some rows."""
        self._scatter(tf.tensor_scatter_nd_sub, slices)

    def scatter_update(self, slices: tf.IndexedSlices, **_: Any) -> None:
        """Sets some rows."""
        self._scatter(tf.tensor_scatter_nd_update, slices)

    def _update(self, method: str, value: Any, options: Mapping[str, Any]) -> None:
        value = tf.convert_to_tensor(value, self.dtype)
        if method != "assign":
            value = self._value + value if method == "assign_add" else self._value - value
        self._value = tf.ensure_shape(value, self.shape)

    def _scatter(self, function: Callable[..., tf.Tensor], slices: tf.IndexedSlices) -> None:
        self.assign(function(self._value, slices.indices[:, None], slices.values))
