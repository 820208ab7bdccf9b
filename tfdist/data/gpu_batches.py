"""Batches on their way to GPUs: from memory that GPUs read by themselves, and before their step.

TensorFlow starts a copy between a GPU and the host only after all that the GPU was told before. A
step that needs such a copy, or waits for a batch that does, cannot start before the last one ends.
"""

from typing import Any, NamedTuple

import keras
import tensorflow as tf

_AT_ONCE = 2  # copies to page-locked memory
_BUFFERED = 2  # batches on the GPU


class _Bits(NamedTuple):
    """An int32 tensor as uint32; TensorFlow copies int32 back to the host, and to the GPU again."""

    uint32: Any


def prepare_for_gpus(dataset: tf.data.Dataset, *, hides_int32: bool) -> tf.data.Dataset:
    """Returns the dataset for GPUs of this process. `read_element` returns its elements.

    They lie in page-locked memory. From other memory, the driver copies a batch in pieces, and
    starts no kernel meanwhile: in a step of 42 ms on an H200, the GPU waited for 33 MB for 5 ms.

    Args:
      dataset: a dataset. It stays as it is if not all of its elements are dense numbers.
      hides_int32: whether int32 tensors travel as `_Bits`.
    """
    spec = dataset.element_spec
    if not all(map(_is_dense_number, tf.nest.flatten(spec))):
        return dataset
    # The only operation of tf.data that asks for such memory is this one.
    _, map_and_batch = tf.__internal__.decorator.unwrap(tf.data.experimental.map_and_batch)

    def keep(*element: Any) -> Any:
        return element if isinstance(spec, tuple) else element[0]

    def take_first(*batch: Any) -> Any:
        return tf.nest.map_structure(lambda t: hide(tf.squeeze(t, 0)), keep(*batch))

    def hide(tensor: tf.Tensor) -> Any:
        is_hidden = hides_int32 and tensor.dtype == tf.int32
        return _Bits(tf.bitcast(tensor, tf.uint32)) if is_hidden else tensor

    batches = dataset.apply(
        map_and_batch(keep, 1, num_parallel_calls=_AT_ONCE, drop_remainder=True)
    )
    return batches.map(take_first)


def copy_to_gpu(dataset: tf.data.Dataset, device: str) -> tf.data.Dataset:
    """Returns the dataset with its elements on a GPU of this process, before they are requested.

    The iterators that strategies make copy a number from the GPU for each element.
    """
    copy = tf.data.experimental.copy_to_device(target_device=device)
    return dataset.apply(copy).prefetch(_BUFFERED)


def read_element(element: Any) -> Any:
    """Returns an element as it was before `prepare_for_gpus`."""

    def show(part: Any) -> Any:
        return tf.bitcast(part.uint32, tf.int32) if isinstance(part, _Bits) else None

    return keras.tree.traverse(show, element)


def _is_dense_number(spec: Any) -> bool:
    is_dense = isinstance(spec, tf.TensorSpec)
    return is_dense and spec.dtype.is_numpy_compatible and spec.dtype != tf.string
