"""The numbers of TensorFlow's kernels, drawn without them."""

import numpy as np
import pytest
import tensorflow as tf

from tfdist.internals import random_ops
from tfdist.training.replicas import random_numbers

SEED = tf.constant([5, 77])
SHAPES = [[7], [3, 5], [4, 4], [0, 3]]


@pytest.fixture(params=[False, True], ids=["TensorFlow", "XLA"])
def call(request):
    return lambda draw, *args: tf.function(draw, jit_compile=request.param)(*args)


def test_key_and_counter(call):
    expected = random_ops.stateless_random_get_key_counter(SEED)
    found = call(random_numbers.get_key_counter, SEED)
    np.testing.assert_array_equal(tf.concat(found, 0), tf.concat(expected, 0))


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16, tf.float32, tf.float64])
def test_floating_point_numbers(call, dtype):
    key, counter = random_numbers.get_key_counter(SEED)
    alg = int(random_ops.stateless_random_get_alg())
    assert alg == random_numbers.get_algorithm()
    for shape in SHAPES:
        uniform = call(lambda s=shape: random_numbers.draw_uniform(s, key, counter, alg, dtype))
        expected = random_ops.stateless_random_uniform_v2(shape, key, counter, alg, dtype)
        np.testing.assert_array_equal(uniform, expected)
        normal = call(lambda s=shape: random_numbers.draw_normal(s, key, counter, alg, dtype))
        expected = random_ops.stateless_random_normal_v2(shape, key, counter, alg, dtype)
        assert normal.dtype == dtype
        atol = 1e-15 if dtype == tf.float64 else 1e-6
        normal, expected = tf.cast(normal, tf.float64), tf.cast(expected, tf.float64)
        np.testing.assert_allclose(normal, expected, rtol=0, atol=atol)


@pytest.mark.parametrize("dtype", [tf.int32, tf.int64])
def test_integers(call, dtype):
    key, counter = random_numbers.get_key_counter(SEED)
    low, high = tf.constant(-5, dtype), tf.constant(1000, dtype)
    for shape in SHAPES:
        found = call(lambda s=shape: random_numbers.draw_integers(s, key, counter, 1, low, high))
        expected = random_ops.stateless_random_uniform_int_v2(shape, key, counter, 1, low, high)
        np.testing.assert_array_equal(found, expected)
