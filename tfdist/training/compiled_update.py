"""The optimizer's update on a GPU, compiled by XLA.

Keras's optimizers update one weight after another, Adam in thirty operations each. Every operation
is a kernel, which takes longer to start than to run. XLA makes a few kernels of all of them.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.internals import TFOptimizer, is_op_determinism_enabled
from tfdist.replacing import replaced


@contextlib.contextmanager
def compiling_updates(is_on: bool) -> Iterator[None]:
    """Compiles updates on GPUs while a step is traced.

    Results differ from Keras's by rounding. An update is left as it is if only deterministic
    kernels are allowed, because then the result can be Keras's to the bit.

    Args:
      is_on: whether it does so at all.
    """
    if not is_on or is_op_determinism_enabled():
        yield
        return
    original = TFOptimizer._distributed_tf_update_step

    def update(
        optimizer: Any, strategy: Any, pairs: Sequence[tuple[Any, Any]], learning_rate: Any
    ) -> None:
        fits = [_can_compile(optimizer, strategy, *pair) for pair in pairs]
        together = [pair for pair, can in zip(pairs, fits, strict=True) if can]
        others = [pair for pair, can in zip(pairs, fits, strict=True) if not can]
        if together:
            _update_together(optimizer, strategy, together, learning_rate)
        if others:
            original(optimizer, strategy, others, learning_rate)

    with replaced(TFOptimizer, "_distributed_tf_update_step", update):
        yield


def _update_together(
    optimizer: Any, strategy: Any, pairs: Sequence[tuple[Any, Any]], learning_rate: Any
) -> None:
    gradients, variables = zip(*pairs, strict=True)

    @tf.function(jit_compile=True, autograph=False)
    def update_all(gradients: Sequence[tf.Tensor], learning_rate: tf.Tensor) -> None:
        for gradient, variable in zip(gradients, variables, strict=True):
            optimizer.update_step(gradient, variable, learning_rate)

    def update(_: Any, gradients: Sequence[tf.Tensor], learning_rate: tf.Tensor) -> None:
        update_all(gradients, tf.convert_to_tensor(learning_rate))

    # This calls `update` once on each device, where every variable stands for its copy there.
    strategy.extended.update(variables[0], update, args=(gradients, learning_rate), group=False)


def _can_compile(optimizer: Any, strategy: Any, gradient: Any, variable: Any) -> bool:
    is_keras = type(optimizer).update_step.__module__.startswith(f"{keras.__name__}.")
    is_dense = isinstance(strategy.experimental_local_results(gradient)[0], tf.Tensor)
    return is_keras and is_dense and _is_on_gpu(variable)


def _is_on_gpu(variable: Any) -> bool:
    return "GPU" in variable.device
