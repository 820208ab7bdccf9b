"""Random numbers that are pure functions of seeds, for many examples at a time."""

import tensorflow as tf

_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIER_1 = 0xBF58476D1CE4E5B9
_MULTIPLIER_2 = 0x94D049BB133111EB


def hash_uniform(seeds: tf.Tensor, count: int) -> tf.Tensor:
    """Returns `count` uniform numbers for each seed.

    Row i depends on seed i alone, never on the rest of the batch. With
    `tf.random.stateless_uniform`, this would require a loop over the examples.

    Args:
      seeds: int64 [batch, 2].

    Returns:
      float32 [batch, count], in [0, 1), multiples of 2**-24.

    Source: splitmix64, Steele, Lea and Flood, "Fast splittable pseudorandom number
    generators", OOPSLA 2014.
    """
    seeds = tf.bitcast(tf.cast(seeds, tf.int64), tf.uint64)
    golden = tf.constant(_GOLDEN, tf.uint64)
    state = _mix(seeds[:, 0] + golden)
    state = _mix(tf.bitwise.bitwise_xor(state, seeds[:, 1]) + golden)
    steps = tf.cast(tf.range(1, count + 1, dtype=tf.int64), tf.uint64) * golden
    bits = tf.bitwise.right_shift(_mix(state[:, None] + steps), tf.constant(40, tf.uint64))
    return tf.cast(tf.cast(bits, tf.int64), tf.float32) * tf.constant(2.0**-24)


def _mix(bits: tf.Tensor) -> tf.Tensor:
    bits = _xor_shift(bits, 30) * tf.constant(_MULTIPLIER_1, tf.uint64)
    bits = _xor_shift(bits, 27) * tf.constant(_MULTIPLIER_2, tf.uint64)
    return _xor_shift(bits, 31)


def _xor_shift(bits: tf.Tensor, shift: int) -> tf.Tensor:
    return tf.bitwise.bitwise_xor(bits, tf.bitwise.right_shift(bits, tf.constant(shift, tf.uint64)))
