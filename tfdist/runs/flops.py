"""Counts a model's floating-point operations, and measures how fast a device can be."""

import math
from typing import Any

import keras
import tensorflow as tf

from tfdist.runs.clock import time_call
from tfdist.training.fit.trainer import Trainer

TRAINING_PASSES = 3
"""A training step computes as much as three forward passes."""

_ROUNDS = 5
_LEAST_S = 0.02  # shortest time of one measurement
_LAYERS = 3  # the costliest, whose convolutions define the peak of the devices


def count_flops(model: keras.Model) -> int:
    """Returns the operations of one example's forward pass; 0 if the input shapes are unknown.

    Counts convolutions and matrix products, with a multiplication and an addition as two
    operations, as is usual for model FLOPs. A training step needs three times as many.

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
    """Measures the highest speed that a device reaches on a model's convolutions, 1x1 ones aside.

    Only the forward pass of each is run, in the model's precision, on this process's first device.

    Args:
      most: how many convolutions to measure, the costliest first; all by default.

    Returns:
      (speed of the fastest, speed of all together), in operations per second; zeros without any.
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
    """Returns the seconds that one convolution takes, as the median of several rounds."""
    x = tf.cast(tf.random.stateless_normal(shape, [0, 1]), layer.compute_dtype)
    kernel = tf.random.stateless_normal(tuple(layer.kernel.shape), [0, 2])
    kernel = tf.cast(kernel, layer.compute_dtype)

    @tf.function(autograph=False)
    def convolve(x, kernel):
        strides, padding = layer.strides, layer.padding.upper()
        return tf.nn.conv2d(x, kernel, strides, padding, dilations=layer.dilation_rate)[0, 0, 0, 0]

    def run(times: int) -> None:
        for _ in range(times):
            result = convolve(x, kernel)
        float(tf.cast(result, tf.float32))

    run(2)
    times = max(1, round(_LEAST_S / time_call(lambda: run(1), rounds=1)))
    return time_call(lambda: run(times), rounds=_ROUNDS) / times


class Utilization(keras.callbacks.Callback):
    """Measures the peak speed of this process's device, before and after the timed steps.

    Other programs may slow down either measurement, but none makes the device faster, so the larger
    one counts. The first one follows the first step, which is not timed.
    """

    def __init__(self, trainer: Trainer, global_batch_size: int):
        super().__init__()
        self._trainer = trainer
        self._batch_size = -(-global_batch_size // trainer.engine.workers.num_replicas)
        self._peak = 0.0
        self._is_measured = False

    @property
    def async_safe(self) -> bool:
        """Whether steps may run ahead: not while the device's peak is measured."""
        return self._is_measured

    def on_train_batch_end(self, batch, logs=None):
        if not self._is_measured:
            self._measure()

    def summarize(self, examples_per_second: float) -> dict[str, float]:
        """Returns the run's floating-point operations per second, and its MFU.

        All workers must call it, although only the chief gets a result: they must trace the same
        functions, or the numbers of their collectives differ.

        Args:
          examples_per_second: the measured speed; with 0, the device is not measured again.

        Returns:
          An empty dict on other workers, or if the operations of the model cannot be counted.
        """
        of_example = TRAINING_PASSES * count_flops(self._trainer.model)
        if not (self._trainer.is_chief and of_example):
            return {}
        flops = of_example * examples_per_second
        if flops:
            self._measure()
        # The virtual devices of a CPU share its cores.
        is_cpu = all(":CPU:" in name for name in self._trainer.strategy.extended.worker_devices)
        devices = (
            self._trainer.engine.workers.count
            if is_cpu
            else self._trainer.engine.workers.num_replicas
        )
        share = flops / (devices * self._peak) if self._peak else 0.0
        return {"flops_per_second": round(flops), "mfu": round(share, 4)}

    def _measure(self) -> None:
        model = self._trainer.model
        fastest, _ = measure_convolutions(model, batch_size=self._batch_size, most=_LAYERS)
        self._peak = max(self._peak, fastest)
        self._is_measured = True
