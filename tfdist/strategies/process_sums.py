"""Sums over processes, without the time that TensorFlow 2.21 loses on CPUs.

Batch normalization of the global batch sums its moments at every layer, forward and backward, and
nothing hides the time of these sums. TensorFlow has three messages for each: the number of the sum,
from the first process to each other one, and then two messages of a ring. Here, each process gets
the values of all others by one message and sums them, in the same order everywhere, and sums have
the same number at each step, which TensorFlow asks for once.

TensorFlow computes the sums of a step one after the other, in the order in which they were traced,
as NCCL needs it. So the gradients of the last layers would wait for the moments of the first. Here,
packs of gradients are summed when they are known.
"""

import math
from typing import Any

import tensorflow as tf

from tfdist.replacing import replace_always, replaced

_MAX_BYTES = 1 << 17  # that a process receives; a ring sends fewer bytes if there are many
# Instance keys: 12 bits for the place in the step, 14 for the size, and 4 for the dtype.
_FIRST_KEY, _MAX_PLACES, _MAX_SIZE = 1 << 30, 1 << 12, 1 << 14
_DTYPES = (tf.float16, tf.float32, tf.float64, tf.int32, tf.int64)  # that can be gathered
_COUNTS = "_tfdist_small_sums"


def speed_up_sums(strategy: tf.distribute.MultiWorkerMirroredStrategy) -> None:
    """Makes a strategy compute small sums by one message, and others in any order.

    Small sums are those of one tensor of known shape in a `tf.function`. Only for replicas on CPUs.
    """
    extended = strategy.extended
    reducer = extended._cross_device_ops
    launchers = reducer._launchers
    kinds = tf.distribute.experimental.CommunicationImplementation
    is_nccl = extended._communication_options.implementation == kinds.NCCL
    on_cpus = all("CPU" in launcher._device for launcher in launchers)
    if not extended._in_multi_worker_mode() or is_nccl or not on_cpus:
        return
    all_reduce = reducer._all_reduce

    def reduce(
        reduce_op: tf.distribute.ReduceOp,
        value: tf.Tensor,
        replica_id: int,
        options: tf.distribute.experimental.CommunicationOptions | None,
    ) -> Any:
        if tf.executing_eagerly():
            return all_reduce(reduce_op, value, replica_id, options)
        values = tf.nest.flatten(value)
        if reduce_op == tf.distribute.ReduceOp.SUM and len(values) == 1:
            parts = gather_small(launchers[replica_id], values[0])
            if parts is not None:
                # Unlike `reduce_sum`, in an order that does not depend on the kind of processor.
                total = tf.add_n(tf.unstack(parts))
                return tf.nest.pack_sequence_as(value, [total])
        # The sums that are traced here begin as soon as their values are known.
        with replaced(launchers[replica_id], "_get_ordering_token", lambda: None):
            return all_reduce(reduce_op, value, replica_id, options)

    replace_always(reducer, "_all_reduce", reduce)


def gather_small(launcher: Any, value: tf.Tensor) -> tf.Tensor | None:
    """Returns the values of a small tensor of all members of a launcher's group, [members, ...].

    Returns None if TensorFlow must gather or sum them. Called in a `tf.function`.
    """
    if isinstance(value, tf.IndexedSlices):
        return None
    value = tf.convert_to_tensor(value)
    if value.dtype not in _DTYPES or not value.shape.is_fully_defined():
        return None
    size = math.prod(value.shape)
    if not 0 < size < _MAX_SIZE or size * value.dtype.size * launcher._group_size > _MAX_BYTES:
        return None
    place = _count_in_step(launcher._device)
    if place >= _MAX_PLACES:
        return None
    key = _FIRST_KEY | (place << 18) | (size << 4) | _DTYPES.index(value.dtype)
    with tf.device(launcher._device):
        parts = tf.raw_ops.CollectiveGatherV2(
            input=tf.reshape(value, [1, size]),
            group_size=launcher._group_size,
            group_key=launcher._group_key,
            instance_key=key,
            ordering_token=[launcher._get_ordering_token()],
            communication_hint="ring",
        )
        return tf.reshape(parts, [launcher._group_size, *value.shape])


def _count_in_step(device: str) -> int:
    """Returns the number of small sums of a device that were traced before in the same function.

    Processes that trace a function at different times give its sums the same numbers.
    """
    graph = tf.compat.v1.get_default_graph()
    while getattr(graph, "outer_graph", None) is not None and getattr(
        graph.outer_graph, "building_function", False
    ):
        graph = graph.outer_graph
    counts = getattr(graph, _COUNTS, {})
    counts[device] = counts.get(device, -1) + 1
    setattr(graph, _COUNTS, counts)
    return counts[device]
