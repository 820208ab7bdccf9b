"""Several training steps in one call, and those of one device as one program of XLA."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.graphs import list_operations

Take = Callable[[], tuple[Sequence[tf.Tensor], tf.Tensor]]
# With larger batches, a step takes so long that what is between steps does not matter.
_MOST_BYTES = 1 << 26
# Whether a program has the results of its steps.
_UNKNOWN, _SAME, _DIFFERS = 0, 1, 2


def run_steps(step: Callable[[tf.Tensor], Any], num_steps: int | tf.Tensor, results: Any) -> Any:
    """Runs steps one after the other.

    Args:
      step: takes the number of a step, from 0, and returns a structure of tensors.
      results: a structure of tensors of the same types and shapes, which the loop must know before
        its body is traced.

    Returns:
      The structure with the results of all steps, [steps, ...].
    """
    leaves = tf.nest.flatten(results)
    arrays = [tf.TensorArray(leaf.dtype, num_steps, element_shape=leaf.shape) for leaf in leaves]

    def run(number: tf.Tensor, arrays: list[Any]) -> tuple[tf.Tensor, list[Any]]:
        written = zip(arrays, tf.nest.flatten(step(number)), strict=True)
        return number + 1, [array.write(number, leaf) for array, leaf in written]

    _, arrays = tf.while_loop(
        lambda number, _: number < num_steps,
        run,
        (tf.zeros([], tf.int32), arrays),
        parallel_iterations=1,
    )
    return tf.nest.pack_sequence_as(results, [array.stack() for array in arrays])


class Program:
    """Steps as one program of XLA, with the results that they have one by one.

    A program has `size` steps with batches of one shape, which are in memory together. For another
    number of steps, or large batches, or those of different shapes, each step is a program. So it
    is if the first program has other results than its steps, which are all compared: XLA does not
    promise that a loop rounds as what is in it.

    Args:
      size: the number of steps.
    """

    def __init__(self, size: int):
        self._size = size
        self._state = tf.Variable(_UNKNOWN, trainable=False, name="is_one_program")

    @property
    def is_used(self) -> bool:
        """Whether the program has the results of its steps; False before it was tried."""
        return int(self._state) == _SAME

    def run(
        self, step: Callable[..., Any], take: Take, num_steps: tf.Tensor
    ) -> tuple[Any, tf.Tensor]:
        """Runs steps.

        Args:
          step: takes the tensors of a batch; XLA compiles it.
          take: returns the tensors of the next batch, and another one, which is returned.

        Returns:
          The results of all steps, and the other tensors, each [steps, ...].
        """
        first, other = take()
        function = tf.function(step, autograph=False)
        trace = function.get_concrete_function(*first)

        def take_number(number: tf.Tensor) -> tuple[Sequence[tf.Tensor], tf.Tensor]:
            return tf.cond(tf.equal(number, 0), lambda: (first, other), take)

        def run_each() -> tuple[Any, tf.Tensor]:
            def run(number: tf.Tensor) -> tuple[Any, tf.Tensor]:
                tensors, other = take_number(number)
                return function(*tensors), other

            return run_steps(run, num_steps, (trace.structured_outputs, other))

        def run_together() -> tuple[Any, tf.Tensor]:
            batches, others, are_alike = self._collect(take_number, first, other)
            state = tf.where(are_alike, self._state, _DIFFERS)

            def run_read() -> Any:
                def run(number: tf.Tensor) -> Any:
                    return function(*[array.read(number) for array in batches])

                return run_steps(run, self._size, trace.structured_outputs)

            @tf.function(jit_compile=True, autograph=False)
            def run_stacked(*stacked: tf.Tensor) -> Any:
                def run(number: tf.Tensor) -> Any:
                    return function(*[tensor[number] for tensor in stacked])

                return run_steps(run, self._size, trace.structured_outputs)

            def run_program() -> Any:
                return run_stacked(*[array.stack() for array in batches])

            def check() -> Any:
                return self._check(run_read, run_program, trace.graph.variables)

            ways = {_UNKNOWN: check, _SAME: run_program, _DIFFERS: run_read}
            return tf.switch_case(state, ways), others

        # XLA rounds convolutions in loops otherwise, and compiles them for long.
        if any("Conv" in operation.op for operation in list_operations(trace.graph)):
            return run_each()
        num_bytes = sum(tf.size(tensor) * tensor.dtype.size for tensor in first)
        fits = tf.equal(num_steps, self._size) & (num_bytes <= _MOST_BYTES // self._size)
        return tf.cond(fits, run_together, run_each)

    def _collect(
        self, take: Callable[[tf.Tensor], Any], first: Sequence[tf.Tensor], other: tf.Tensor
    ) -> tuple[list[tf.TensorArray], tf.Tensor, tf.Tensor]:
        """Returns the batches, the other tensors, and whether the batches have one shape."""
        make = functools.partial(tf.TensorArray, size=self._size, infer_shape=False)

        def add(number: tf.Tensor, arrays: Any, others: Any, are_alike: tf.Tensor) -> Any:
            tensors, other = take(number)
            for tensor, like in zip(tensors, first, strict=True):
                are_alike &= tf.reduce_all(tf.equal(tf.shape(tensor), tf.shape(like)))
            written = zip(arrays, tensors, strict=True)
            arrays = [array.write(number, tensor) for array, tensor in written]
            return number + 1, arrays, others.write(number, other), are_alike

        arrays = [make(tensor.dtype, element_shape=tensor.shape) for tensor in first]
        _, arrays, others, are_alike = tf.while_loop(
            lambda number, *_: number < self._size,
            add,
            (0, arrays, make(other.dtype, element_shape=other.shape), True),
            parallel_iterations=1,
        )
        return arrays, others.stack(), are_alike

    def _check(
        self,
        read: Callable[[], Any],
        run: Callable[[], Any],
        variables: Sequence[tf.Variable],
    ) -> Any:
        """Runs both, notes whether they have the same results, and returns those of the steps."""
        before = [tf.identity(variable) for variable in variables]
        found = read()
        after = [tf.identity(variable) for variable in variables]
        for variable, value in zip(variables, before, strict=True):
            variable.assign(value)
        again = [*tf.nest.flatten(run()), *[tf.identity(variable) for variable in variables]]
        for variable, value in zip(variables, after, strict=True):
            variable.assign(value)
        pairs = zip([*tf.nest.flatten(found), *after], again, strict=True)
        are_same = tf.reduce_all([tf.reduce_all(tf.equal(a, b)) for a, b in pairs])
        self._state.assign(tf.where(are_same, _SAME, _DIFFERS))
        return found
