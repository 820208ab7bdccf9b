"""What `tf.data` needs to keep an order, and to end: options, and calls of Python code."""

import atexit
import functools
import gc
import sys
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.aliases import Nested


def call_python(
    function: Callable[..., Any], inputs: Sequence[tf.Tensor], output_types: Nested[tf.DType]
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


def set_options(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns the dataset with a fixed order, unsharded and without autotuning.

    The end of an autotuned dataset can wait for the thread that tunes it, which may check whether
    to stop just before it sleeps (TensorFlow 2.21). It sleeps as long as the dataset was in use, at
    most a minute, plus any time by which the clock was set back. Without autotuning,
    `tf.data.AUTOTUNE` is the number of TensorFlow's threads, at most 16.
    """
    options = tf.data.Options()
    options.deterministic = True
    options.autotune.enabled = False
    # Each process already makes only the batches of its own replicas.
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return dataset.with_options(options)
