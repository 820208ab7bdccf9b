"""Counts how often each class occurs, and computes loss weights that compensate for it."""

import numpy as np
import tensorflow as tf

from tfdist.data.source import Source
from tfdist.data.tf_data import set_options
from tfdist.errors import make_unknown_name_error

KINDS = ("none", "sqrt", "median_frequency")

_READ_BATCH = 32


def count_classes(source: Source) -> np.ndarray:
    """Returns the pixels of each class, without ignored ones: int64 [num_classes].

    Args:
      source: (image, mask) examples, with `class_names` in `info`; reads all, so cache it first.
    """
    return _count_by_image(source).sum(axis=0)


def count_pixels_with_class(source: Source) -> np.ndarray:
    """Returns the counted pixels in the images that contain each class: int64 [num_classes].

    Args:
      source: see `count_classes`.
    """
    counts = _count_by_image(source)
    return ((counts > 0) * counts.sum(axis=1, keepdims=True)).sum(axis=0)


def make_class_weights(
    counts: np.ndarray, kind: str, *, pixels_with_class: np.ndarray | None = None
) -> np.ndarray:
    """Returns loss weights that favor rare classes: float32 [num_classes].

    "none" gives 1 for every class; "sqrt" gives 1 / sqrt(frequency); "median_frequency"
    gives median(frequency) / frequency, where the frequency of a class is its fraction of
    the pixels in `pixels_with_class`, or of all pixels if that is not given.

    These are scaled so that their mean over all counted pixels is 1, which preserves the
    scale of the loss and the meaning of the learning rate. A class that never occurs gets
    weight 1.

    Args:
      counts: int64 [num_classes], pixels of each class (`count_classes`).
      pixels_with_class: int64 [num_classes] (`count_pixels_with_class`).

    Raises:
      TfdistError: the kind is unknown.

    Source: median frequency balancing: Eigen and Fergus, "Predicting depth, surface
    normals and semantic labels with a common multi-scale convolutional architecture",
    ICCV 2015, section 4.3.
    """
    if kind not in KINDS:
        raise make_unknown_name_error("class weights", kind, KINDS)
    counts = np.asarray(counts, np.float64)
    weights = np.ones_like(counts)
    occurs = counts > 0
    if kind == "none" or not occurs.any():
        return weights.astype(np.float32)
    share = counts[occurs] / counts.sum()
    if kind == "sqrt":
        found = 1.0 / np.sqrt(share)
    else:
        frequency = share
        if pixels_with_class is not None:
            frequency = counts[occurs] / np.asarray(pixels_with_class, np.float64)[occurs]
        found = np.median(frequency) / frequency
    weights[occurs] = found / np.sum(share * found)
    return weights.astype(np.float32)


def _count_by_image(source: Source) -> np.ndarray:
    """Returns int64 [num_examples, num_classes]."""
    if "class_names" not in source.info:
        raise ValueError("count_classes requires a source whose info has class_names.")
    num_classes = len(source.info["class_names"])
    ignore_label = source.info.get("ignore_label")

    def count(indices: tf.Tensor) -> tf.Tensor:
        masks = source.load_batch(indices)[1]
        labels = tf.reshape(masks, [tf.shape(masks)[0], -1])
        counted = (labels >= 0) & (labels < num_classes)
        if ignore_label is not None:
            counted &= labels != ignore_label
        # The extra bin is for the pixels that are not counted.
        labels = tf.where(counted, labels, num_classes)
        size = num_classes + 1
        return tf.math.bincount(labels, minlength=size, maxlength=size, axis=-1)[:, :num_classes]

    batches = tf.data.Dataset.range(source.num_examples).batch(_READ_BATCH)
    counts = batches.map(count, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
    return np.concatenate(list(set_options(counts).as_numpy_iterator())).astype(np.int64)
