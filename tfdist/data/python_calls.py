"""Python that TensorFlow calls while it reads data."""

import atexit
import functools
import gc
import sys
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf


def call_python(
    function: Callable[..., Any], inputs: Sequence[tf.Tensor], output_types: Any
) -> Any:
    """`tf.numpy_function`, in a process that can end whatever its iterators are doing.

    An iterator ends when its last call has; once the interpreter shuts down, a call waits for
    ever. An iterator that a failure's traceback still holds is therefore let go before that.
    """
    _end_iterators_at_exit()
    return tf.numpy_function(function, inputs, output_types)


@functools.cache
def _end_iterators_at_exit() -> None:
    atexit.register(_end_iterators)


def _end_iterators() -> None:
    sys.last_type = sys.last_value = sys.last_traceback = None
    gc.collect()
