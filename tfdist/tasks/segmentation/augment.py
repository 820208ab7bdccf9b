"""Augments images and their masks as a pure function of one seed per example."""

import dataclasses

import tensorflow as tf

from tfdist.data.seeds import hash_uniform
from tfdist.errors import TfdistError
from tfdist.tasks.images.mirror import mirror_chosen

# The gray that fills the frame around an image that is scaled down.
_FILL = 127.5
# Sampling boxes stay this far inside the image, so that rounding never samples outside it.
_MARGIN = 1e-6
_LUMA_RED, _LUMA_BLUE = 0.299, 0.114


@dataclasses.dataclass(frozen=True)
class Augmentation:
    """Flips, scales and crops examples and changes their colors at random.

    The changes to an example depend only on its own seed, so it does not matter how
    examples are batched or where they are processed.

    Attributes:
      flip: whether to mirror half of the examples horizontally.
      scale: the smallest and largest zoom, drawn log-uniformly; a crop of the frame's size
        is taken at a random position. A zoom below 1 does not fill the frame: the rest is
        gray in the image and `ignore_label` in the mask. Without an ignore label, the range
        is limited to zooms of at least 1.
      color: the strength in [0, 1) of the changes to brightness, contrast and saturation:
        each is multiplied by a number in [1 - color, 1 + color].
      ignore_label: the label of pixels outside the image, or None.
      size: (height, width) of the augmented examples; as before by default. Larger examples
        are reduced to it, so that a zoom does not blur.

    Raises:
      TfdistError: the scale is not 0 < min <= max, or color is not in [0, 1).
    """

    flip: bool = True
    scale: tuple[float, float] = (1.0, 1.0)
    color: float = 0.0
    ignore_label: int | None = None
    size: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if not 0 < self.scale[0] <= self.scale[1]:
            raise TfdistError(
                f"Cannot scale images by {self.scale}: give (min, max), 0 < min <= max."
            )
        if not 0 <= self.color < 1:
            raise TfdistError(f"Cannot change colors by {self.color}: give a number in [0, 1).")

    def __call__(
        self, image: tf.Tensor, mask: tf.Tensor, seed: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns one augmented example.

        Args:
          image: float32 [height, width, 3], in [0, 255].
          mask: int32 [height, width].
          seed: int64 [2].

        Returns:
          The image and the mask, of `size`, and of the same dtypes and range.
        """
        images, masks = self.augment_batch((image[None], mask[None]), seed[None])
        return images[0], masks[0]

    # AutoGraph would spend a second to find nothing to convert.
    @tf.autograph.experimental.do_not_convert
    def augment_batch(
        self, batch: tuple[tf.Tensor, tf.Tensor], seeds: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the augmented batch, in which each example is what `__call__` would return.

        Args:
          batch: images, float32 [batch, height, width, 3], in [0, 255], and their masks, int32
            [batch, height, width].
          seeds: int64 [batch, 2].

        Raises:
          TfdistError: the batch does not consist of images and masks.
        """
        if not isinstance(batch, tuple) or len(batch) != 2:
            raise TfdistError(
                "Cannot augment these examples: they must be (image, mask), found "
                f"{type(batch).__name__} of {len(tf.nest.flatten(batch))}. Train without "
                "augmentation."
            )
        images, masks = batch
        draws = hash_uniform(seeds, 7)
        flips = draws[:, 0] < 0.5 if self.flip else tf.zeros_like(draws[:, 0], tf.bool)
        size = self.size or tuple(images.shape[1:3])
        if (self._get_scale() != (1.0, 1.0)) or size != tuple(images.shape[1:3]):
            images, masks = self._scale_and_flip(images, masks, flips, draws[:, 1:4], size)
        elif self.flip:
            images, masks = mirror_chosen(images, flips), mirror_chosen(masks, flips)
        if self.color:
            images = self._change_colors(images, draws[:, 4:7])
        return images, masks

    def _get_scale(self) -> tuple[float, float]:
        low, high = self.scale
        return (low, high) if self.ignore_label is not None else (max(low, 1.0), max(high, 1.0))

    def _scale_and_flip(
        self,
        images: tf.Tensor,
        masks: tf.Tensor,
        flips: tf.Tensor,
        draws: tf.Tensor,
        size: tuple[int, int],
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Samples one box of each image: one kernel scales, crops and flips it."""
        low, high = self._get_scale()
        # In float64, then rounded: the last bit of exp may depend on the position in the batch.
        ratio = tf.math.log(tf.constant(high / low, tf.float64))
        zoom = low * tf.exp(tf.cast(draws[:, 0], tf.float64) * ratio)
        side = tf.cast(1.0 / zoom, tf.float32)
        top, left = draws[:, 1] * (1.0 - side), draws[:, 2] * (1.0 - side)
        inside = side <= 1.0
        y1, y2 = _keep_inside(top, top + side, inside)
        x1, x2 = _keep_inside(left, left + side, inside)
        x1, x2 = tf.where(flips, x2, x1), tf.where(flips, x1, x2)
        rows = tf.range(tf.shape(images)[0])
        outside = 0 if self.ignore_label is None else self.ignore_label
        # Each pixel is the mean of `finer` x `finer` samples, so that none of the image is skipped.
        finer = max(-(-of // to) for of, to in zip(images.shape[1:3], size, strict=True))
        samples = [number * finer for number in size]
        boxes = tf.stack([y1, x1, y2, x2], axis=-1)
        scaled = tf.image.crop_and_resize(
            images, boxes, rows, samples, method="bilinear", extrapolation_value=_FILL
        )
        if finer > 1:
            scaled = tf.nn.avg_pool2d(scaled, finer, finer, "VALID")
            (y1, y2), (x1, x2) = (
                _find_middles(start, stop, number, finer)
                for start, stop, number in ((y1, y2, samples[0]), (x1, x2, samples[1]))
            )
            boxes = tf.stack([y1, x1, y2, x2], axis=-1)
        labels = tf.image.crop_and_resize(
            masks[..., None], boxes, rows, size, method="nearest", extrapolation_value=outside
        )
        scaled = tf.ensure_shape(scaled, [images.shape[0], *size, images.shape[-1]])
        labels = tf.ensure_shape(tf.cast(labels[..., 0], masks.dtype), [masks.shape[0], *size])
        return scaled, labels

    def _change_colors(self, images: tf.Tensor, draws: tf.Tensor) -> tf.Tensor:
        brightness, contrast, saturation = tf.unstack(
            1.0 + self.color * (2.0 * draws - 1.0), axis=-1
        )
        # Contrast changes about mid-gray, not about the image's mean, because a sum over
        # pixels would depend on how the batch is split over threads.
        gain, offset = brightness * contrast, 127.5 * (1.0 - contrast)
        # Plane by plane, because broadcasting a number over channels is slow. No two additions
        # follow each other, because Grappler would re-associate them depending on the shapes of
        # their operands, and the last bit would depend on the batch.
        if images.shape[-1] != 3:  # without colors, there is no saturation
            own, common = _per_image(gain), _per_image(offset)
            planes = [plane * own - common for plane in tf.unstack(images, axis=-1)]
            return tf.clip_by_value(tf.stack(planes, axis=-1), 0.0, 255.0)
        red, green, blue = tf.unstack(images, axis=-1)
        gray = (green + _LUMA_RED * (red - green)) - _LUMA_BLUE * (green - blue)
        common = gray * _per_image(gain * (saturation - 1.0)) - _per_image(offset)
        own = _per_image(gain * saturation)
        images = tf.stack([plane * own - common for plane in (red, green, blue)], axis=-1)
        return tf.clip_by_value(images, 0.0, 255.0)


def _keep_inside(
    start: tf.Tensor, stop: tf.Tensor, inside: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    def clip(edge: tf.Tensor) -> tf.Tensor:
        return tf.where(inside, tf.clip_by_value(edge, _MARGIN, 1.0 - _MARGIN), edge)

    return clip(start), clip(stop)


def _find_middles(
    first: tf.Tensor, last: tf.Tensor, num_samples: int, finer: int
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the middles of the first and of the last `finer` of some samples."""
    offset = (last - first) * ((finer - 1) / 2 / (num_samples - 1))
    return first + offset, last - offset


def _per_image(values: tf.Tensor) -> tf.Tensor:
    return values[:, None, None]
