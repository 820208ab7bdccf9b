"""The optimizer's update with fewer operations.

Keras's optimizers update one weight after another. For each, they read the number of the step, from
which Adam computes the same factors, and run a dozen small operations. On a GPU, each is a kernel
that takes longer to start than to run. TensorFlow has one operation for Adam's update.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdist.internals import BaseOptimizer, PerReplica, TFOptimizer, is_op_determinism_enabled
from tfdist.replacing import find_function, replaced


@contextlib.contextmanager
def fusing_updates() -> Iterator[None]:
    """Makes the updates of Keras's optimizers faster while a step is traced.

    The number of the step is read once, and what Adam computes from it is computed once a device,
    which changes no result. Tracing Adam takes half as long for it. On GPUs, Adam is computed by
    TensorFlow's kernel, from which results differ by rounding, unless only deterministic kernels
    are allowed: without them, Keras does not repeat its bits there either. On CPUs, the kernel made
    a step 4 % faster in bfloat16 and 4 % slower in float32. Not for updates that XLA compiles: it
    makes kernels of its own.
    """
    original = find_function(TFOptimizer, "_distributed_tf_update_step")

    def update_all(
        optimizer: keras.Optimizer,
        strategy: tf.distribute.Strategy,
        pairs: Sequence[tuple[Any, Any]],
        learning_rate: tf.Tensor,
    ) -> None:
        is_keras = type(optimizer).update_step.__module__.startswith(f"{keras.__name__}.")
        if not is_keras or optimizer.gradient_accumulation_steps:
            original(optimizer, strategy, pairs, learning_rate)
            return

        factors: dict[Any, _Factors] = {}

        def update(
            variable: tf.Variable, gradient: tf.Tensor, learning_rate: tf.Tensor, step: tf.Tensor
        ) -> None:
            is_whole = isinstance(variable, tf.Variable) and isinstance(gradient, tf.Tensor)
            if is_whole and _is_adam(optimizer):
                key = (variable.device, variable.dtype)
                if key not in factors:
                    factors[key] = _make_factors(optimizer, variable.dtype, learning_rate, step)
                apply = _apply_kernel if _needs_kernel(variable) else _apply_adam
                apply(optimizer, variable, gradient, factors[key])
                return
            with replaced(BaseOptimizer, "iterations", property(lambda _: step)):
                optimizer.update_step(gradient, variable, learning_rate)

        step = _read(strategy, optimizer.iterations)
        for gradient, variable in pairs:
            arguments = (gradient, learning_rate, step)
            strategy.extended.update(variable, update, args=arguments, group=False)

    with replaced(TFOptimizer, "_distributed_tf_update_step", update_all):
        yield


def _read(strategy: tf.distribute.Strategy, variable: keras.Variable) -> Any:
    """Returns the value of a variable, on each of the devices."""
    copies = strategy.experimental_local_results(variable.value)
    values = [tf.convert_to_tensor(copy) for copy in copies]
    return values[0] if len(values) == 1 else PerReplica(values)


def _needs_kernel(variable: tf.Variable) -> bool:
    return "GPU" in variable.device and not is_op_determinism_enabled()


def _is_adam(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether it is Adam or AdamW, which has the same step."""
    is_its_step = type(optimizer).update_step is keras.optimizers.Adam.update_step
    return is_its_step and not optimizer.amsgrad


class _Factors(NamedTuple):
    """What Adam computes once for all weights of a device and dtype: scalars."""

    rate: tf.Tensor
    power_1: tf.Tensor
    power_2: tf.Tensor
    alpha: tf.Tensor
    share_1: tf.Tensor
    share_2: tf.Tensor
    epsilon: tf.Tensor


def _make_factors(
    optimizer: keras.Optimizer, dtype: tf.DType, learning_rate: tf.Tensor, step: tf.Tensor
) -> _Factors:
    rate, number = tf.cast(learning_rate, dtype), tf.cast(step + 1, dtype)
    # Keras's powers in float64 are those of the betas in float32.
    power_1, power_2 = (
        tf.pow(tf.cast(beta, dtype), number) for beta in (optimizer.beta_1, optimizer.beta_2)
    )
    alpha = rate * tf.sqrt(1 - power_2) / (1 - power_1)
    constants = (1 - optimizer.beta_1, 1 - optimizer.beta_2, optimizer.epsilon)
    return _Factors(rate, power_1, power_2, alpha, *(tf.constant(c, dtype) for c in constants))


def _apply_adam(
    optimizer: keras.Optimizer, variable: tf.Variable, gradient: tf.Tensor, factors: _Factors
) -> None:
    """Updates a weight by the operations of Keras's Adam, in their order."""
    gradient = tf.cast(gradient, variable.dtype)
    place = optimizer._get_variable_index(variable)
    m, v = optimizer._momentums[place].value, optimizer._velocities[place].value
    m.assign_add((gradient - m) * factors.share_1)
    v.assign_add((tf.square(gradient) - v) * factors.share_2)
    variable.assign_sub(m * factors.alpha / (tf.sqrt(v) + factors.epsilon))


def _apply_kernel(
    optimizer: keras.Optimizer, variable: tf.Variable, gradient: tf.Tensor, factors: _Factors
) -> None:
    """Updates a weight by TensorFlow's kernel."""
    dtype = variable.dtype
    place = optimizer._get_variable_index(variable)
    tf.raw_ops.ResourceApplyAdam(
        var=variable.handle,
        m=optimizer._momentums[place].value.handle,
        v=optimizer._velocities[place].value.handle,
        beta1_power=factors.power_1,
        beta2_power=factors.power_2,
        lr=factors.rate,
        beta1=tf.constant(optimizer.beta_1, dtype),
        beta2=tf.constant(optimizer.beta_2, dtype),
        epsilon=factors.epsilon,
        grad=tf.cast(gradient, dtype),
    )
