"""The collectives of a process: those of each strategy apart, and with few operations."""

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfdist.internals import CollectiveReplicaLauncher
from tfdist.replacing import find_function, replaced

_MOST_GROUPS = 1000  # of one strategy: one for each list of devices that it sums over
_bases = itertools.count(_MOST_GROUPS, _MOST_GROUPS)


def separate_collectives(strategy: tf.distribute.Strategy) -> None:
    """Gives a MirroredStrategy keys of its own for its collectives, once.

    TensorFlow 2.21 numbers the collectives of every MirroredStrategy from one, so that those of
    two strategies in a process meet, and both abort. This does not affect functions that were
    traced before.
    """
    extended: Any = strategy.extended
    old = getattr(extended, "_collective_ops", None)  # logical replicas have none
    if old is None or extended._collective_key_base:
        return
    extended._collective_key_base = next(_bases)
    extended._collective_ops = extended._make_collective_ops_with_fallbacks()
    if extended._cross_device_ops is old:
        extended._cross_device_ops = extended._collective_ops


@contextlib.contextmanager
def packing_known_shapes() -> Iterator[None]:
    """Packs tensors of known shapes without the operations that compute their shapes.

    TensorFlow 2.21 has six operations for each tensor and replica, and five for each pack; all are
    traced, optimized and placed at each start.
    """
    original = find_function(CollectiveReplicaLauncher, "batch_all_reduce")

    def batch_all_reduce(
        launcher: CollectiveReplicaLauncher,
        packs: Sequence[Sequence[tf.Tensor]],
        options: tf.distribute.experimental.CommunicationOptions | None = None,
    ) -> list[tf.Tensor]:
        tensors = [tensor for pack in packs for tensor in pack]
        if tf.executing_eagerly() or not all(t.shape.is_fully_defined() for t in tensors):
            return original(launcher, packs, options)
        kinds = tf.distribute.experimental.CommunicationImplementation
        is_nccl = launcher._options.merge(options).implementation == kinds.NCCL
        outputs: list[tf.Tensor] = []
        for pack in packs:
            with tf.device(launcher._device):
                vector = _join([_reshape(tensor, [tensor.shape.num_elements()]) for tensor in pack])
                last = outputs[-1] if is_nccl and outputs else None
                reduced = launcher.all_reduce(vector, last, options)
                sizes = [tensor.shape.num_elements() for tensor in pack]
                parts = tf.split(reduced, sizes) if len(pack) > 1 else [reduced]
                outputs += [_reshape(p, t.shape) for p, t in zip(parts, pack, strict=True)]
        return outputs

    with replaced(CollectiveReplicaLauncher, "batch_all_reduce", batch_all_reduce):
        yield


def _join(vectors: Sequence[tf.Tensor]) -> tf.Tensor:
    return tf.concat(vectors, 0) if len(vectors) > 1 else vectors[0]


def _reshape(tensor: tf.Tensor, shape: Any) -> tf.Tensor:
    return tensor if tensor.shape == shape else tf.reshape(tensor, shape)
