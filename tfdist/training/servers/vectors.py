"""Shards: the variables on a parameter server, read and written as one vector per dtype."""

from collections.abc import Sequence
from dataclasses import dataclass

import keras
import tensorflow as tf

from tfdist.placement.shards.divided import find_divided


def make_shards(variables: Sequence[keras.Variable]) -> "list[Shard]":
    """Groups variables by server and dtype, without tables that are divided."""
    groups: dict[tuple[str, tf.DType], list[keras.Variable]] = {}
    for variable in (v for v in variables if not find_divided(v)):
        value = variable.value
        groups.setdefault((value.device, value.dtype), []).append(variable)
    return [Shard(device, dtype, tuple(group)) for (device, dtype), group in groups.items()]


@dataclass(frozen=True)
class Shard:
    """The variables of one parameter server and dtype, transferred as one vector.

    This takes one message in each direction instead of one per variable.
    """

    device: str
    dtype: tf.DType
    variables: tuple[keras.Variable, ...]

    @property
    def size(self) -> int:
        """The number of elements."""
        return sum(_count_elements(variable) for variable in self.variables)

    def read(self) -> list[tuple[keras.Variable, tf.Tensor]]:
        """Returns the variables with their values, which are split on the caller's device."""
        with tf.device(self.device):
            flat = tf.concat([tf.reshape(v.value.read_value(), [-1]) for v in self.variables], 0)
        return self.split(flat)

    def split(self, flat: tf.Tensor) -> list[tuple[keras.Variable, tf.Tensor]]:
        """Returns the variables with their parts of a vector."""
        parts = tf.split(flat, [_count_elements(variable) for variable in self.variables])
        return [
            (variable, tf.reshape(part, variable.shape))
            for variable, part in zip(self.variables, parts, strict=True)
        ]

    def join(self, values: dict[int, tf.Tensor]) -> tf.Tensor:
        """Returns the vector of values, given by the variables' ids; missing values are zero."""
        return tf.concat(
            [
                tf.reshape(values[id(v)], [-1])
                if id(v) in values
                else tf.zeros([_count_elements(v)], self.dtype)
                for v in self.variables
            ],
            0,
        )


def _count_elements(variable: keras.Variable) -> int:
    return variable.value.shape.num_elements()
