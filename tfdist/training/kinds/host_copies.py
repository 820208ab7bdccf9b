"""Copies of results to the host that do not wait for the steps after them."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import tensorflow as tf


class HostCopies:
    """Copies tensors to the host, in a thread of its own.

    TensorFlow starts such a copy after all that the device was told before. If it were requested
    only when a next step has started, it would wait for that, too.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "results")

        @tf.function(autograph=False, reduce_retracing=True)
        def copy(tensors: list[tf.Tensor]) -> list[tf.Tensor]:
            with tf.device("CPU:0"):
                return [tf.identity(t) for t in tensors]

        self._copy = copy

    def start(self, tensors: Any) -> Callable[[], Any]:
        """Starts to copy a structure of tensors; returns a function that waits for the copy."""
        has_begun = threading.Event()

        def copy() -> list[tf.Tensor]:
            has_begun.set()
            return self._copy(tf.nest.flatten(tensors))

        copied = self._thread.submit(copy)
        has_begun.wait()
        return lambda: tf.nest.pack_sequence_as(tensors, copied.result())
