"""Normalization of parts of an image: values and gradients, against plain operations."""

import numpy as np
import pytest
import tensorflow as tf

from tfdist.models import batch_norm

EPSILON = 1e-3


def compute_in_parts(x, gamma, beta):
    """Normalizes the first half of x by the moments of the second, and the other way round."""
    halves = tf.split(x, 2, axis=1)
    moments = [batch_norm.measure_part(half) for half in halves]
    y = [
        batch_norm.normalize_part(half, gamma, beta, other.mean, other.variance, EPSILON)
        for half, other in zip(halves, reversed(moments), strict=True)
    ]
    return moments, tf.concat(y, axis=1)


def compute_plainly(x, gamma, beta):
    """Computes the same by plain operations."""
    halves = tf.split(x, 2, axis=1)
    moments = [batch_norm.measure_moments(half) for half in halves]
    y = [
        (half - other.mean) * (gamma * tf.math.rsqrt(other.variance + EPSILON)) + beta
        for half, other in zip(halves, reversed(moments), strict=True)
    ]
    return moments, tf.concat(y, axis=1)


def differentiate(compute, dtype):
    """Returns the output, and the gradients of a loss that also depends on the moments."""
    rng = np.random.default_rng(0)
    given = [rng.normal(5.0, 2.0, (2, 6, 4, 3)), rng.uniform(0.5, 2.0, 3), rng.normal(size=3)]
    x, gamma, beta = (tf.constant(value, tf.float64) for value in given)
    weights = tf.constant(rng.normal(size=x.shape), tf.float64)
    wide = tf.float64 if dtype == "float64" else tf.float32
    with tf.GradientTape() as tape:
        tape.watch([x, gamma, beta])
        moments, y = compute(tf.cast(x, dtype), tf.cast(gamma, wide), tf.cast(beta, wide))
        loss = tf.reduce_sum(weights * tf.cast(y, tf.float64) ** 2)
        for place, found in enumerate(moments):
            both = tf.cast(found.mean + (place + 2) * found.variance, tf.float64)
            loss += tf.reduce_sum(tf.sin(both))
    return y, tape.gradient(loss, [x, gamma, beta])


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float64", 1e-12), ("float32", 1e-4), ("bfloat16", 5e-2)]
)
def test_parts_have_the_values_and_gradients_of_plain_operations(dtype, tolerance):
    y, gradients = differentiate(compute_in_parts, dtype)
    expected_y, expected = differentiate(compute_plainly, "float64")
    assert y.dtype == dtype
    for found, right in zip([y, *gradients], [expected_y, *expected], strict=True):
        scale = float(tf.reduce_max(tf.abs(right)))
        difference = tf.abs(tf.cast(found, tf.float64) - right)
        assert float(tf.reduce_max(difference)) < tolerance * scale


def test_parts_run_on_the_fused_kernel():
    @tf.function(autograph=False)
    def compute(x, gamma, beta):
        with tf.GradientTape() as tape:
            tape.watch(x)
            _, y = compute_in_parts(x, gamma, beta)
        return tape.gradient(y, x)

    vector = tf.TensorSpec([3], tf.float32)
    graph = compute.get_concrete_function(
        tf.TensorSpec([2, 6, 4, 3], tf.float32), vector, vector
    ).graph
    kinds = [op.type for op in graph.get_operations()]
    assert "FusedBatchNormGradV3" in kinds
    assert "SquaredDifference" not in kinds
