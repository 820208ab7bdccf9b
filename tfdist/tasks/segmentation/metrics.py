"""Segmentation metrics, all computed from one confusion matrix."""

import contextlib
from collections.abc import Sequence

import keras
import tensorflow as tf

from tfdist.internals import is_op_determinism_enabled


@keras.saving.register_keras_serializable(package="tfdist")
class SegmentationMetrics(keras.metrics.Metric):
    """Computes pixel accuracy, mean IoU, mean Dice and the IoU of every class over all pixels.

    Counts pixels in int64 and sums the counts over the replicas when the result is read, so any
    split of the data is exact. The means exclude classes neither predicted nor in the truth.

    Args:
      num_classes: the number of classes, without the ignored one.
      ignore_label: the label of pixels that are not counted.
      class_names: names for the per-class entries; the class numbers by default.
    """

    is_sum_over_rows = True  # see `tfdist.training.replicas.metrics`

    def __init__(
        self,
        num_classes: int,
        *,
        ignore_label: int | None = None,
        class_names: Sequence[str] | None = None,
        name: str = "segmentation",
        dtype: str | None = None,
    ):
        super().__init__(name=name, dtype=dtype)
        self.num_classes = num_classes
        self.ignore_label = ignore_label
        self.class_names = tuple(class_names or map(str, range(num_classes)))
        self.confusion = self.add_variable(
            (num_classes, num_classes), initializer="zeros", dtype="int64", name="confusion"
        )

    def update_state(self, y_true, y_pred, sample_weight=None):
        """Adds a batch.

        Args:
          y_true: int labels [batch, height, width] or [batch, height, width, 1].
          y_pred: logits or probabilities [batch, height, width, num_classes].
          sample_weight: must be None: pixels are counted, not weighted.

        Raises:
          ValueError: a sample weight was given.
        """
        if sample_weight is not None:
            raise ValueError("SegmentationMetrics counts pixels and takes no sample_weight.")
        self.confusion.assign_add(self.count(y_true, y_pred))

    def count(self, y_true, y_pred) -> tf.Tensor:
        """Returns the confusion matrix of a batch, int64 [num_classes (truth), num_classes]."""
        truth = tf.cast(tf.reshape(y_true, [-1]), tf.int32)
        predicted = tf.reshape(tf.argmax(y_pred, -1, output_type=tf.int32), [-1])
        cells = self.num_classes * self.num_classes
        cell = truth * self.num_classes + predicted
        counts = tf.logical_and(truth >= 0, truth < self.num_classes)
        if self.ignore_label is not None:
            counts = tf.logical_and(counts, truth != self.ignore_label)
        # Pixels that do not count go to an extra cell, which is cut off.
        cell = tf.where(counts, cell, cells)
        # XLA requires a constant size, which tf.math.bincount would compute.
        # TensorFlow 2.21 has no deterministic way to count on a GPU, though any order is exact.
        on_cpu = tf.device("CPU:0") if is_op_determinism_enabled() else contextlib.nullcontext()
        with on_cpu:
            matrix = tf.raw_ops.DenseBincount(
                input=cell, size=cells + 1, weights=tf.zeros([0], tf.int32)
            )[:cells]
        return tf.cast(tf.reshape(matrix, [self.num_classes, self.num_classes]), tf.int64)

    def result(self) -> dict[str, tf.Tensor]:
        """Returns `pixel_accuracy`, `mean_iou`, `mean_dice` and, per class, `iou/NAME`."""
        return measure_confusion(tf.convert_to_tensor(self.confusion), self.class_names)

    def get_config(self):
        return {
            **super().get_config(),
            "num_classes": self.num_classes,
            "ignore_label": self.ignore_label,
            "class_names": self.class_names,
        }


def measure_confusion(confusion: tf.Tensor, class_names: Sequence[str]) -> dict[str, tf.Tensor]:
    """Returns `pixel_accuracy`, `mean_iou`, `mean_dice` and, per class, `iou/NAME`.

    Args:
      confusion: int64 [classes (truth), classes (prediction)].
    """
    matrix = tf.cast(confusion, tf.float64)
    hits = tf.linalg.diag_part(matrix)
    truth, predicted = tf.reduce_sum(matrix, 1), tf.reduce_sum(matrix, 0)
    union = truth + predicted - hits
    seen = tf.cast(union > 0, tf.float64)
    iou = tf.math.divide_no_nan(hits, union)
    dice = tf.math.divide_no_nan(2 * hits, truth + predicted)
    classes = tf.reduce_sum(seen)
    logs = {
        "pixel_accuracy": tf.math.divide_no_nan(tf.reduce_sum(hits), tf.reduce_sum(truth)),
        "mean_iou": tf.math.divide_no_nan(tf.reduce_sum(iou), classes),
        "mean_dice": tf.math.divide_no_nan(tf.reduce_sum(dice), classes),
    }
    return logs | {f"iou/{name}": iou[i] for i, name in enumerate(class_names)}
