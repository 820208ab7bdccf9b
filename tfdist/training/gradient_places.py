"""Where gradients in flight are kept: on the parameter servers that hold the weights."""

import collections
import uuid
from collections.abc import Sequence

import keras
import tensorflow as tf

from tfdist.training.shards import Shard, make_shards


class GradientPlaces:
    """A place for each gradient in flight, given out by tickets.

    A worker that was taken for lost may still write when another one has computed its step. So
    each step has a ticket, and TensorFlow's accumulators drop a gradient whose ticket is older
    than what they wait for.

    Args:
      variables: whose gradients they are.
      count: how many may be in flight.

    Attributes:
      device: of a server that holds some of them.
    """

    def __init__(self, variables: Sequence[keras.Variable], count: int):
        self._shards = make_shards(variables)
        self._count = count
        # [shard][place]
        self._places: list[list[tf.Tensor]] = []
        self._ticket = 0
        self._given: collections.deque[tf.Tensor] = collections.deque()

    @property
    def device(self) -> str:
        return self._shards[0].device

    def clear(self) -> None:
        """Drops what steps have left that were given out and never applied."""
        if not self._places:
            self._create()
        self._given.clear()
        for shard, places in zip(self._shards, self._places, strict=True):
            for place in places:
                with tf.device(shard.device):
                    if tf.raw_ops.ResourceAccumulatorNumAccumulated(handle=place):
                        _take(place, shard)
                    _expect(place, tf.constant(self._ticket, tf.int64))

    def give_out(self) -> tf.Tensor:
        """Returns the next ticket."""
        ticket = tf.constant(self._ticket, tf.int64)
        self._ticket += 1
        self._given.append(ticket)
        return ticket

    def take_back(self) -> tf.Tensor:
        """Returns the ticket that was given out first."""
        return self._given.popleft()

    def find(self, ticket: tf.Tensor) -> list[tf.Tensor]:
        """Returns the places of a ticket, one on each server."""
        return [places[int(ticket) % self._count] for places in self._places]

    def write(
        self, places: Sequence[tf.Tensor], ticket: tf.Tensor, gradients: dict[int, tf.Tensor]
    ) -> None:
        """Leaves gradients, by the variables' ids, in their places; a worker does."""
        for shard, place in zip(self._shards, places, strict=True):
            row = shard.join(gradients)
            with tf.device(shard.device):
                tf.raw_ops.ResourceAccumulatorApplyGradient(
                    handle=place, local_step=ticket, gradient=row
                )

    def read(self, places: Sequence[tf.Tensor], ticket: tf.Tensor) -> dict[int, tf.Tensor]:
        """Returns the gradients in some places, by the variables' ids, and leaves none."""
        found: dict[int, tf.Tensor] = {}
        for shard, place in zip(self._shards, places, strict=True):
            with tf.device(shard.device):
                row = _take(place, shard)
                _expect(place, ticket + 1)
            found |= {id(variable): part for variable, part in shard.split(row)}
        return found

    def _create(self) -> None:
        name = uuid.uuid4().hex
        for index, shard in enumerate(self._shards):
            with tf.device(shard.device):
                self._places.append(
                    [
                        tf.raw_ops.ResourceConditionalAccumulator(
                            dtype=shard.dtype,
                            shape=[shard.size],
                            shared_name=f"{name}-{index}-{place}",
                        )
                        for place in range(self._count)
                    ]
                )


def _take(place: tf.Tensor, shard: Shard) -> tf.Tensor:
    """Returns the gradient of a place, on its server, and leaves none."""
    row = tf.raw_ops.ResourceAccumulatorTakeGradient(
        handle=place, num_required=1, dtype=shard.dtype
    )
    return tf.ensure_shape(row, [shard.size])


def _expect(place: tf.Tensor, ticket: tf.Tensor) -> None:
    """Lets a place drop gradients of older tickets."""
    tf.raw_ops.ResourceAccumulatorSetGlobalStep(handle=place, new_global_step=ticket)
