"""TensorFlow's random numbers, computed from the integers of its generator.

XLA's generator gives the same integers as that of TensorFlow's kernels, but XLA takes other bits of
them: the upper ones, where the kernels take the lower ones. Here, integers become numbers as in the
kernels (`tensorflow/core/lib/random/random_distributions.h`), so that both draw the same. Uniform
numbers are equal, and normal numbers are equal up to the rounding of log, sin and cos.
"""

import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.errors import TfdistError
from tfdist.internals import random_ops

PHILOX = 1  # of `tf.random.Algorithm`

# dtype -> its integers, those of the generator, the bits of the fraction, and the bits of 1.
_FORMATS = {
    tf.float16: (tf.uint16, tf.uint32, 10, 0x3C00),
    tf.bfloat16: (tf.uint16, tf.uint32, 7, 0x3F80),
    tf.float32: (tf.uint32, tf.uint32, 23, 0x3F800000),
    tf.float64: (tf.uint64, tf.uint64, 52, 0x3FF0000000000000),
}
_draw_integers = random_ops.stateless_random_uniform_full_int_v2


def get_algorithm(**_: Any) -> tf.Tensor:
    """Returns Philox, which CPUs and GPUs use; on a TPU, XLA would use another algorithm."""
    return tf.constant(PHILOX)


def get_key_counter(seed: tf.Tensor, **_: Any) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns Philox's key, uint64 [1], and counter, uint64 [2], for a seed, [2]."""
    key = tf.constant([0x02461E293EC8F720], tf.uint64)
    mixed = _draw_integers([2], key, tf.cast(seed, tf.uint64), PHILOX, dtype=tf.uint64)
    return mixed[:1], tf.stack([tf.zeros([], tf.uint64), mixed[1]])


def draw_uniform(
    shape: tf.Tensor | Sequence[int],
    key: tf.Tensor,
    counter: tf.Tensor,
    alg: Any,
    dtype: tf.DType = tf.float32,
    name: str | None = None,
) -> tf.Tensor:
    """Draws numbers of [0, 1), as the operation `StatelessRandomUniformV2`."""
    _, drawn, _, _ = _FORMATS[tf.as_dtype(dtype)]
    return _to_uniform(_draw_integers(shape, key, counter, alg, dtype=drawn), dtype)


def draw_normal(
    shape: tf.Tensor | Sequence[int],
    key: tf.Tensor,
    counter: tf.Tensor,
    alg: Any,
    dtype: tf.DType = tf.float32,
    name: str | None = None,
) -> tf.Tensor:
    """Draws standard normal numbers, as the operation `StatelessRandomNormalV2`."""
    dtype = tf.as_dtype(dtype)
    computed = tf.float64 if dtype == tf.float64 else tf.float32
    size = tf.reduce_prod(tf.cast(shape, tf.int64))
    pairs = draw_uniform(tf.stack([(size + 1) // 2, 2]), key, counter, alg, dtype=computed)
    # Box-Muller's method.
    radius = tf.sqrt(-2 * tf.math.log(tf.maximum(pairs[:, 0], tf.constant(1e-7, computed))))
    angle = tf.constant(2 * math.pi, computed) * pairs[:, 1]
    numbers = tf.stack([tf.sin(angle) * radius, tf.cos(angle) * radius], axis=1)
    flat = tf.slice(tf.reshape(numbers, [-1]), tf.zeros([1], tf.int64), size[None])
    return tf.cast(tf.reshape(flat, shape), dtype)


def draw_integers(
    shape: tf.Tensor | Sequence[int],
    key: tf.Tensor,
    counter: tf.Tensor,
    alg: tf.Tensor,
    minval: tf.Tensor,
    maxval: tf.Tensor,
    name: str | None = None,
) -> tf.Tensor:
    """Draws integers of [minval, maxval), as the operation `StatelessRandomUniformIntV2`."""
    drawn = tf.uint32 if minval.dtype.size == 4 else tf.uint64
    integers = _draw_integers(shape, key, counter, alg, dtype=drawn)
    offset = integers % tf.bitcast(maxval - minval, drawn)
    return minval + tf.bitcast(offset, minval.dtype)


def refuse_truncated(shape: tf.Tensor | Sequence[int], *_: Any, **__: Any) -> tf.Tensor:
    """Refuses to draw truncated normal numbers, for which a kernel may need several tries."""
    raise TfdistError(
        "Cannot compile the step with XLA: the model draws truncated normal numbers, and XLA would "
        "draw different ones. Leave out `jit_compile`, or draw normal numbers."
    )


def _to_uniform(integers: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    dtype = tf.as_dtype(dtype)
    kept, drawn, fraction, one = _FORMATS[dtype]
    if dtype == tf.float64:
        # The first one of the generator's two integers has the upper bits.
        integers = tf.bitwise.left_shift(integers, tf.constant(32, drawn)) | (
            tf.bitwise.right_shift(integers, tf.constant(32, drawn))
        )
    lower = tf.cast(integers & tf.constant(2**fraction - 1, drawn), kept)
    return tf.bitcast(lower | tf.constant(one, kept), dtype) - tf.constant(1, dtype)
