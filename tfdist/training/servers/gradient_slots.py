"""Slots for the gradients in flight, on the parameter servers that hold the weights."""

import collections
import uuid
from collections.abc import Sequence

import keras
import tensorflow as tf

from tfdist.training.servers.vectors import Shard, make_shards


class GradientSlots:
    """A slot for each gradient in flight, assigned by tickets.

    A worker that was considered lost may still write after another one has computed its step. So
    each step has a ticket, and TensorFlow's accumulators drop a gradient whose ticket is older
    than the one they wait for.

    Args:
      variables: the variables whose gradients are stored. Those of divided tables are not.

    Attributes:
      device: the device of the server that holds the first variable.
    """

    def __init__(self, variables: Sequence[keras.Variable], count: int):
        self._variables = variables
        self._shards = make_shards(variables)
        self._count = count
        # [shard][slot]
        self._slots: list[list[tf.Tensor]] = []
        self._ticket = 0
        self._given: collections.deque[tf.Tensor] = collections.deque()

    @property
    def device(self) -> str:
        return self._variables[0].value.device

    def clear(self) -> None:
        """Drops the gradients of steps that were scheduled but never applied."""
        if not self._slots:
            self._create()
        self._given.clear()
        for shard, slots in zip(self._shards, self._slots, strict=True):
            for slot in slots:
                with tf.device(shard.device):
                    if tf.raw_ops.ResourceAccumulatorNumAccumulated(handle=slot):
                        _take(slot, shard)
                    _expect(slot, tf.constant(self._ticket, tf.int64))

    def give_out(self) -> tf.Tensor:
        """Returns the next ticket."""
        ticket = tf.constant(self._ticket, tf.int64)
        self._ticket += 1
        self._given.append(ticket)
        return ticket

    def take_back(self) -> tf.Tensor:
        """Returns the oldest ticket in use, and frees it."""
        return self._given.popleft()

    def find(self, ticket: tf.Tensor) -> list[tf.Tensor]:
        """Returns the slots of a ticket, one per shard."""
        return [slots[int(ticket) % self._count] for slots in self._slots]

    def write(
        self, slots: Sequence[tf.Tensor], ticket: tf.Tensor, gradients: dict[int, tf.Tensor]
    ) -> None:
        """Writes gradients, given by the variables' ids, to their slots. Called on a worker."""
        for shard, slot in zip(self._shards, slots, strict=True):
            row = shard.join(gradients)
            with tf.device(shard.device):
                tf.raw_ops.ResourceAccumulatorApplyGradient(
                    handle=slot, local_step=ticket, gradient=row
                )

    def read(self, slots: Sequence[tf.Tensor], ticket: tf.Tensor) -> dict[int, tf.Tensor]:
        """Empties some slots, and returns their gradients by the variables' ids."""
        found: dict[int, tf.Tensor] = {}
        for shard, slot in zip(self._shards, slots, strict=True):
            with tf.device(shard.device):
                row = _take(slot, shard)
                _expect(slot, ticket + 1)
                found |= {id(variable): part for variable, part in shard.split(row)}
        return found

    def _create(self) -> None:
        name = uuid.uuid4().hex
        for index, shard in enumerate(self._shards):
            with tf.device(shard.device):
                self._slots.append(
                    [
                        tf.raw_ops.ResourceConditionalAccumulator(
                            dtype=shard.dtype,
                            shape=[shard.size],
                            shared_name=f"{name}-{index}-{slot}",
                        )
                        for slot in range(self._count)
                    ]
                )


def _take(slot: tf.Tensor, shard: Shard) -> tf.Tensor:
    """Empties a slot, and returns its gradient on the slot's server."""
    row = tf.raw_ops.ResourceAccumulatorTakeGradient(handle=slot, num_required=1, dtype=shard.dtype)
    return tf.ensure_shape(row, [shard.size])


def _expect(slot: tf.Tensor, ticket: tf.Tensor) -> None:
    """Makes a slot drop gradients with older tickets."""
    tf.raw_ops.ResourceAccumulatorSetGlobalStep(handle=slot, new_global_step=ticket)
