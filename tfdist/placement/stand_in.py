"""What takes the place of a variable whose value is held in another way."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf


class StandIn:
    """Takes the place of the `tf.Variable` of a `keras.Variable`, whole for whoever uses it.

    A subclass has `shape`, `dtype` and `name`, reads the value and updates it.
    """

    dtype: tf.DType
    trainable = False

    def read_value(self) -> tf.Tensor:
        """Returns the value."""
        raise NotImplementedError

    def _update(
        self, method: str, value: tf.Tensor | tf.IndexedSlices, options: Mapping[str, Any]
    ) -> None:
        """Updates the value as a variable's method of this name does."""
        raise NotImplementedError

    def value(self) -> tf.Tensor:
        """Returns the value."""
        return self.read_value()

    def numpy(self) -> np.ndarray:
        """Returns the value."""
        return self.read_value().numpy()

    def assign(self, value: tf.Tensor | tf.IndexedSlices, **options: Any) -> None:
        """Assigns a value."""
        self._update("assign", value, options)

    def assign_add(self, value: tf.Tensor | tf.IndexedSlices, **options: Any) -> None:
        """Adds a value."""
        self._update("assign_add", value, options)

    def assign_sub(self, value: tf.Tensor | tf.IndexedSlices, **options: Any) -> None:
        """Subtracts a value."""
        self._update("assign_sub", value, options)

    def __tf_tensor__(self, dtype: tf.DType | None = None, name: str | None = None) -> tf.Tensor:
        return tf.convert_to_tensor(self.read_value(), dtype, name=name)

    def __array__(self, dtype: np.dtype | None = None) -> np.ndarray:
        return np.asarray(self.numpy(), dtype)
