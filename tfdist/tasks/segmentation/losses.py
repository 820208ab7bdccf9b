"""Losses of segmentation: from Keras where Keras has them, blind to the ignore label."""

from collections.abc import Sequence

import keras
from keras import ops

from tfdist.errors import make_unknown_name_error
from tfdist.internals import backend


class _SegmentationLoss(keras.losses.Loss):
    """What the losses below share: labels cleaned of the ignore label, and class weights."""

    def __init__(
        self,
        *,
        ignore_label: int | None = None,
        class_weights: Sequence[float] | None = None,
        name: str | None = None,
        reduction: str = "sum_over_batch_size",
        dtype: str | None = None,
    ):
        super().__init__(name=name, reduction=reduction, dtype=dtype)
        self.ignore_label = ignore_label
        self.class_weights = None if class_weights is None else tuple(map(float, class_weights))

    def get_config(self):
        return {
            **super().get_config(),
            "ignore_label": self.ignore_label,
            "class_weights": self.class_weights,
        }

    def _split_labels(self, y_true):
        """Returns int labels with the ignored ones set to 0, and which ones count (bool)."""
        labels = ops.cast(y_true, "int32")
        if len(labels.shape) == 4:
            labels = ops.squeeze(labels, -1)
        if self.ignore_label is None:
            return labels, ops.ones_like(labels, dtype="bool")
        valid = ops.not_equal(labels, self.ignore_label)
        return ops.where(valid, labels, 0), valid

    def _weigh(self, values, labels):
        if self.class_weights is None:
            return values
        return values * ops.take(ops.convert_to_tensor(self.class_weights, values.dtype), labels)

    def _mask(self, values, valid):
        if self.ignore_label is None:
            return values
        values = ops.where(valid, values, ops.zeros_like(values))
        backend.set_keras_mask(values, valid)
        return values


@keras.saving.register_keras_serializable(package="tfdist")
class PixelCrossEntropy(_SegmentationLoss):
    """Cross-entropy of each pixel, from logits; the mean over the pixels that count.

    Takes labels int [batch, height, width] and logits [batch, height, width, classes]; gives
    [batch, height, width].

    Args:
      ignore_label: the label of pixels that count nowhere.
      class_weights: a factor a class.
      name, reduction, dtype: as in `keras.losses.Loss`.
    """

    def call(self, y_true, y_pred):
        labels, valid = self._split_labels(y_true)
        values = keras.losses.sparse_categorical_crossentropy(labels, y_pred, from_logits=True)
        return self._mask(self._weigh(values, labels), valid)


@keras.saving.register_keras_serializable(package="tfdist")
class PixelFocal(_SegmentationLoss):
    """Focal loss of each pixel, from logits: cross-entropy with easy pixels turned down.

    Shapes as in `PixelCrossEntropy`.

    Args:
      gamma: how far easy pixels are turned down; 0 is cross-entropy.
      ignore_label, class_weights, name, reduction, dtype: as in `PixelCrossEntropy`.

    Source: Lin, Goyal, Girshick, He, Dollar 2017, arXiv:1708.02002, equation 4.
    """

    def __init__(self, *, gamma: float = 2.0, **arguments):
        super().__init__(**arguments)
        self.gamma = gamma

    def call(self, y_true, y_pred):
        labels, valid = self._split_labels(y_true)
        values = keras.losses.categorical_focal_crossentropy(
            ops.one_hot(labels, y_pred.shape[-1], dtype=y_pred.dtype),
            y_pred,
            alpha=1.0,
            gamma=self.gamma,
            from_logits=True,
        )
        return self._mask(self._weigh(values, labels), valid)

    def get_config(self):
        return {**super().get_config(), "gamma": self.gamma}


@keras.saving.register_keras_serializable(package="tfdist")
class ImageDice(_SegmentationLoss):
    """One minus the soft Dice coefficient of each image, over the classes that it contains.

    Takes what `PixelCrossEntropy` takes; gives [batch]. An image without a pixel that counts
    gives 0.

    Source: Milletari, Navab, Ahmadi 2016, arXiv:1606.04797, section 3, one term a class.
    """

    def call(self, y_true, y_pred):
        labels, valid = self._split_labels(y_true)
        counted = ops.cast(ops.expand_dims(valid, -1), y_pred.dtype)
        truth = ops.one_hot(labels, y_pred.shape[-1], dtype=y_pred.dtype) * counted
        losses = keras.losses.dice(truth, ops.softmax(y_pred, -1) * counted, axis=(1, 2))
        weights = ops.cast(ops.any(truth > 0, axis=(1, 2)), y_pred.dtype)
        if self.class_weights is not None:
            weights *= ops.convert_to_tensor(self.class_weights, y_pred.dtype)
        return ops.divide_no_nan(ops.sum(losses * weights, -1), ops.sum(weights, -1))


@keras.saving.register_keras_serializable(package="tfdist")
class CrossEntropyDice(_SegmentationLoss):
    """Pixel cross-entropy plus image Dice, equally weighted.

    The Dice term of an image is added to each of its pixels that count, so that images weigh
    by their counting pixels. Shapes as in `PixelCrossEntropy`.

    Source: Isensee et al. 2021, doi:10.1038/s41592-020-01008-z (cross-entropy plus Dice).
    """

    def call(self, y_true, y_pred):
        labels, valid = self._split_labels(y_true)
        entropy = keras.losses.sparse_categorical_crossentropy(labels, y_pred, from_logits=True)
        dice = ImageDice(ignore_label=self.ignore_label, class_weights=self.class_weights)
        values = self._weigh(entropy, labels) + dice.call(y_true, y_pred)[:, None, None]
        return self._mask(values, valid)


LOSSES = {
    "cross_entropy": PixelCrossEntropy,
    "dice": ImageDice,
    "cross_entropy_dice": CrossEntropyDice,
    "focal": PixelFocal,
}


def make_loss(
    name: str,
    *,
    ignore_label: int | None = None,
    class_weights: Sequence[float] | None = None,
) -> keras.losses.Loss:
    """Builds a segmentation loss on logits by name.

    Args:
      name: a key of `LOSSES`.
      ignore_label: the label of pixels that count nowhere.
      class_weights: a factor a class.

    Raises:
      TfdistError: an unknown name.
    """
    if name not in LOSSES:
        raise make_unknown_name_error("`loss`", name, LOSSES)
    return LOSSES[name](ignore_label=ignore_label, class_weights=class_weights, name=name)
