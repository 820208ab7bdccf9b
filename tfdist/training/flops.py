"""How much a model computes, and how fast the machine can."""

import math
import statistics
import time
from typing import Any

import keras
import tensorflow as tf

TRAINING_PASSES = 3
"""A training step computes as much as three forward passes."""

_ROUNDS = 5
_LEAST_S = 0.02  # of one measurement


def count_flops(model: keras.Model) -> int:
    """Returns the floating-point operations of one example's forward pass.

    Of convolutions and matrix products, a multiplication and an addition counting as two, as is
    usual for model FLOPs; a training step takes three times as many.

    Args:
      model: a built model.

    Returns:
      0 where the shapes of its inputs are not known, as of a subclass of `keras.Model`.

    Source: Chowdhery et al. 2022 (arXiv:2204.02311), appendix B, for the convention.
    """
    inputs = getattr(model, "inputs", None)
    if not inputs or any(None in x.shape[1:] for x in inputs):
        return 0
    spec = [tf.TensorSpec((1, *x.shape[1:]), x.dtype) for x in inputs]

    @tf.function(autograph=False)
    def run(*x: tf.Tensor) -> Any:
        return model(x[0] if len(x) == 1 else list(x))

    graph = run.get_concrete_function(*spec)
    builder = tf.compat.v1.profiler.ProfileOptionBuilder
    options = (
        builder(builder.float_operation())
        .with_empty_output()
        .with_node_names(show_name_regexes=[".*(Conv|MatMul|Einsum|conv).*"])
        .build()
    )
    return tf.compat.v1.profiler.profile(graph.graph, options=options).total_float_ops


def measure_convolutions(
    model: keras.Model, *, batch_size: int, most: int | None = None
) -> tuple[float, float]:
    """Measures what a device can do at most with a model's own 3x3 convolutions.

    Each is run forwards alone, in the model's precision, on this process's first device.

    Args:
      model: a built model.
      batch_size: examples.
      most: how many of them, the costliest first; all by default.

    Returns:
      (of the fastest, of all together): operations a second; zeros if there are none.
    """
    costs = {
        layer: 2.0 * math.prod(layer.kernel.shape) * batch_size * math.prod(layer.output.shape[1:3])
        for layer in model.layers
        if type(layer) is keras.layers.Conv2D and tuple(layer.kernel_size) != (1, 1)
    }
    operations, seconds, fastest = 0.0, 0.0, 0.0
    for layer in sorted(costs, key=lambda layer: -costs[layer])[:most]:
        shape = (batch_size, *layer.input.shape[1:])
        spent = _time_convolution(layer, shape)
        operations, seconds = operations + costs[layer], seconds + spent
        fastest = max(fastest, costs[layer] / spent)
    return fastest, operations / seconds if seconds else 0.0


def _time_convolution(layer: keras.layers.Conv2D, shape: tuple[int, ...]) -> float:
    """Returns the seconds of one convolution, the median of several rounds."""
    x = tf.cast(tf.random.stateless_normal(shape, [0, 1]), layer.compute_dtype)
    kernel = tf.random.stateless_normal(tuple(layer.kernel.shape), [0, 2])
    kernel = tf.cast(kernel, layer.compute_dtype)

    @tf.function(autograph=False)
    def convolve(x, kernel):
        strides, padding = layer.strides, layer.padding.upper()
        return tf.nn.conv2d(x, kernel, strides, padding, dilations=layer.dilation_rate)[0, 0, 0, 0]

    def run(times: int) -> float:
        began = time.perf_counter()
        for _ in range(times):
            result = convolve(x, kernel)
        float(tf.cast(result, tf.float32))
        return (time.perf_counter() - began) / times

    run(2)
    times = max(1, round(_LEAST_S / run(1)))
    return statistics.median(run(times) for _ in range(_ROUNDS))
