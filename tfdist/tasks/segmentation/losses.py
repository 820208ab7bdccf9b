"""Segmentation losses that skip the ignore label, based on Keras's own where there are any."""

from collections.abc import Sequence

import keras
from keras import ops

from tfdist.errors import make_unknown_name_error
from tfdist.internals import set_keras_mask


class _SegmentationLoss(keras.losses.Loss):
    """The base class of the losses below, which handles the ignore label and class weights.

    The logit adjustment is that of Menon et al. 2021, arXiv:2007.07314, section 4.2, with class
    weights instead of class frequencies.
    """

    def __init__(
        self,
        *,
        ignore_label: int | None = None,
        class_weights: Sequence[float] | None = None,
        logit_adjustment: float = 0.0,
        name: str | None = None,
        reduction: str = "sum_over_batch_size",
        dtype: str | None = None,
    ):
        super().__init__(name=name, reduction=reduction, dtype=dtype)
        self.ignore_label = ignore_label
        self.class_weights = None if class_weights is None else tuple(map(float, class_weights))
        self.logit_adjustment = logit_adjustment

    def get_config(self):
        return {
            **super().get_config(),
            "ignore_label": self.ignore_label,
            "class_weights": self.class_weights,
            "logit_adjustment": self.logit_adjustment,
        }

    def call(self, y_true, y_pred):
        if self.logit_adjustment:
            weights = ops.convert_to_tensor(self.class_weights, y_pred.dtype)
            y_pred += self.logit_adjustment * ops.log(weights)
        labels, valid = self._split_labels(y_true)
        return self._compute(labels, valid, y_pred)

    def _compute(self, labels, valid, logits):
        """Returns the values of int labels, of which only some are valid (bool)."""
        raise NotImplementedError

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
        set_keras_mask(values, valid)
        return values


@keras.saving.register_keras_serializable(package="tfdist")
class PixelCrossEntropy(_SegmentationLoss):
    """Computes the cross-entropy of each pixel from logits; averaged over the pixels that count.

    Expects labels, int [batch, height, width], and logits [batch, height, width, classes]; returns
    [batch, height, width].

    Args:
      logit_adjustment: how many times the logarithm of its class weight is added to each logit. A
        class is then predicted as often as if its weight in the loss were lower, by this exponent.
    """

    def _compute(self, labels, valid, logits):
        values = keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)
        return self._mask(self._weigh(values, labels), valid)


@keras.saving.register_keras_serializable(package="tfdist")
class PixelFocal(_SegmentationLoss):
    """Computes the focal loss of each pixel from logits, which down-weights easy pixels.

    The shapes are those of `PixelCrossEntropy`.

    Args:
      gamma: how strongly easy pixels are down-weighted; 0 gives cross-entropy.

    Source: Lin, Goyal, Girshick, He, Dollar 2017, arXiv:1708.02002, equation 4.
    """

    def __init__(self, *, gamma: float = 2.0, **arguments):
        super().__init__(**arguments)
        self.gamma = gamma

    def _compute(self, labels, valid, logits):
        values = keras.losses.categorical_focal_crossentropy(
            ops.one_hot(labels, logits.shape[-1], dtype=logits.dtype),
            logits,
            alpha=1.0,
            gamma=self.gamma,
            from_logits=True,
        )
        return self._mask(self._weigh(values, labels), valid)

    def get_config(self):
        return {**super().get_config(), "gamma": self.gamma}


@keras.saving.register_keras_serializable(package="tfdist")
class ImageDice(_SegmentationLoss):
    """Computes 1 minus the soft Dice coefficient of each image over the classes it contains.

    Expects the inputs of `PixelCrossEntropy`; returns [batch]. The value is 0 for an image in
    which no pixel counts.

    Source: Milletari, Navab, Ahmadi 2016, arXiv:1606.04797, section 3, with one term per class.
    """

    def _compute(self, labels, valid, logits):
        dtype = logits.dtype
        counted = ops.cast(ops.expand_dims(valid, -1), dtype)
        truth = ops.one_hot(labels, logits.shape[-1], dtype=dtype) * counted
        losses = keras.losses.dice(truth, ops.softmax(logits, -1) * counted, axis=(1, 2))
        weights = ops.cast(ops.any(truth > 0, axis=(1, 2)), dtype)
        if self.class_weights is not None:
            weights *= ops.convert_to_tensor(self.class_weights, dtype)
        return ops.divide_no_nan(ops.sum(losses * weights, -1), ops.sum(weights, -1))


@keras.saving.register_keras_serializable(package="tfdist")
class CrossEntropyDice(_SegmentationLoss):
    """Computes pixel cross-entropy plus image Dice, equally weighted.

    The Dice term of an image is added to each of its pixels that count, so images are weighted by
    the number of these pixels. The shapes are those of `PixelCrossEntropy`.

    Source: Isensee et al. 2021, doi:10.1038/s41592-020-01008-z (cross-entropy plus Dice).
    """

    def _compute(self, labels, valid, logits):
        entropy = keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)
        dice = ImageDice(class_weights=self.class_weights)._compute(labels, valid, logits)
        values = self._weigh(entropy, labels) + dice[:, None, None]
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
    logit_adjustment: float = 0.0,
) -> keras.losses.Loss:
    """Builds a segmentation loss on logits by name.

    Raises:
      TfdistError: the name is unknown.
    """
    if name not in LOSSES:
        raise make_unknown_name_error("`loss`", name, LOSSES)
    return LOSSES[name](
        ignore_label=ignore_label,
        class_weights=class_weights,
        logit_adjustment=logit_adjustment,
        name=name,
    )
