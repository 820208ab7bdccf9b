"""The single all-reduce of a training step, and its cost."""

import math
import statistics
import time
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

SUM = tf.distribute.ReduceOp.SUM

_ROUNDS = 5


def sum_over_replicas(
    gradients: Sequence[tf.Tensor | tf.IndexedSlices], *, is_compressed: bool
) -> list[tf.Tensor | tf.IndexedSlices]:
    """Returns the sums of the replicas' gradients, in bfloat16 if compressed; for replicas."""
    context = tf.distribute.get_replica_context()
    if context.num_replicas_in_sync == 1:
        return list(gradients)  # wherever they are
    # In replica context on GPUs, TensorFlow 2.21 ignores the strategy's own options.
    options = getattr(context.strategy.extended, "_communication_options", None)
    if is_compressed:
        small = [tf.cast(gradient, tf.bfloat16) for gradient in gradients]
        reduced = context.all_reduce(SUM, small, options)
        return [tf.cast(s, g.dtype) for s, g in zip(reduced, gradients, strict=True)]
    # TensorFlow 2.21 packs the tensors of a call, which fails if their dtypes differ.
    sums: dict[int, Any] = {}
    for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
        places = [i for i, gradient in enumerate(gradients) if gradient.dtype == dtype]
        reduced = context.all_reduce(SUM, [gradients[i] for i in places], options)
        sums |= dict(zip(places, reduced, strict=True))
    return [sums[i] for i in range(len(gradients))]


def count_gradient_bytes(model: keras.Model, *, is_compressed: bool) -> int:
    """Returns the size of a model's gradients as they are summed over the replicas, in bytes."""
    return sum(
        math.prod(variable.shape) * (2 if is_compressed else tf.as_dtype(variable.dtype).size)
        for variable in model.trainable_variables
    )


def measure_all_reduce(
    model: keras.Model, strategy: tf.distribute.Strategy, *, is_compressed: bool
) -> float:
    """Returns the seconds that the all-reduce of a model's gradients takes when nothing else runs.

    All workers must call this.
    """

    def reduce() -> tf.Tensor:
        # Like gradients: as large, on the device, and unknown when the graph is optimized.
        like_gradients = [tf.identity(v.value) for v in model.trainable_variables]
        sums = sum_over_replicas(like_gradients, is_compressed=is_compressed)
        return tf.add_n([tf.cast(tf.reshape(total, [-1])[0], tf.float64) for total in sums])

    @tf.function(autograph=False)
    def run() -> tf.Tensor:
        return strategy.experimental_local_results(strategy.run(reduce))

    def measure() -> float:
        began = time.perf_counter()
        for result in run():
            float(result)
        return time.perf_counter() - began

    measure()  # traces
    return statistics.median(measure() for _ in range(_ROUNDS))
