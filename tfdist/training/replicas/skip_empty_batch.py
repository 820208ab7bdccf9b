"""Metrics that count no batch that did not come.

In the last step of data of unknown length, there are no data, but what needs none is still done.
The mean of a scalar, such as the loss of a `train_step`, adds 1 to its count then, and Keras 3.15
logs this mean for the epoch.
"""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.replacing import wrapped_in_subclasses


@contextlib.contextmanager
def updating_metrics_after(tensors: Sequence[tf.Tensor]) -> Iterator[None]:
    """Makes metrics wait for tensors before they are updated, while a step is traced."""

    def wrap(original: Any) -> Any:
        @functools.wraps(original)
        def update_state(metric: Any, *args: Any, **kwargs: Any) -> Any:
            with tf.control_dependencies(list(tensors)):
                return original(metric, *args, **kwargs)

        return update_state

    with wrapped_in_subclasses(keras.metrics.Metric, update_state=wrap):
        yield
