"""Python code that TensorFlow calls while it reads data."""

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
    """Calls `tf.numpy_function` so that the process can exit whatever its iterators are doing.

    An iterator ends only after its last call, and once the interpreter shuts down, a call never
    returns. An iterator that a traceback still refers to is therefore released before that.
    """
    _end_iterators_at_exit()
    return tf.numpy_function(function, inputs, output_types)


@functools.cache
def _end_iterators_at_exit() -> None:
    atexit.register(_end_iterators)


def _end_iterators() -> None:
    sys.last_type = sys.last_value = sys.last_traceback = None
    gc.collect()
