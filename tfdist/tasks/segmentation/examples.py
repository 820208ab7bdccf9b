"""What all sources of images and masks share."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tfdist.data.source import BatchSource, Source
from tfdist.tasks.images.pixels import PLAIN, PixelFormat


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class ImagesAndMasks:
    """A mixin for sources that defines the types of the examples and the classes of the masks.

    Attributes:
      ignore_label: the label of pixels that losses and metrics ignore, or None.
      measured: what was measured of the original images, for `info`.
    """

    image_size: tuple[int, int]
    num_classes: int
    class_names: tuple[str, ...] | None = None
    ignore_label: int | None = None
    pixels: PixelFormat = PLAIN
    measured: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def element_spec(self) -> Any:
        """(image float32 [height, width, channels] in [0, 255], mask int32 [height, width])."""
        return (
            tf.TensorSpec((*self.image_size, self.pixels.channels), tf.float32),
            tf.TensorSpec(self.image_size, tf.int32),
        )

    @property
    def stored_spec(self) -> Any:
        """`element_spec` with the mask in uint8, and the image too if its files are."""
        image, mask = self.element_spec
        dtype = tf.uint8 if self.pixels.is_kept else tf.float32
        return tf.TensorSpec(image.shape, dtype), tf.TensorSpec(mask.shape, tf.uint8)

    @property
    def info(self) -> Mapping[str, Any]:
        """The names of the classes, the ignore label, and what was measured; ready for JSON."""
        names = self.class_names or map(str, range(self.num_classes))
        pixels = {} if self.pixels.is_plain else {"pixels": self.pixels.to_json()}
        known = {"class_names": list(names), "ignore_label": self.ignore_label}
        return {**known, **pixels, **self.measured}


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class ReducedSource(BatchSource):
    """Images and masks that are stored at a larger size, of which an augmentation takes crops.

    Attributes:
      is_rounded: whether the resized values are whole numbers, as those of the files.
    """

    stored: Source
    image_size: tuple[int, int]
    is_rounded: bool = True

    @property
    def element_spec(self) -> Any:
        return tuple(
            tf.TensorSpec([*self.image_size, *leaf.shape[2:]], leaf.dtype)
            for leaf in self.stored.element_spec
        )

    @property
    def info(self) -> Mapping[str, Any]:
        return self.stored.info

    def load_batch(self, indices: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the examples at `indices` (int64 [batch]), resized as the files were."""
        images, masks = self.stored.load_batch(indices)
        images = tf.image.resize(images, self.image_size, method="bilinear", antialias=True)
        masks = tf.image.resize(masks[..., None], self.image_size, method="nearest")[..., 0]
        images = tf.clip_by_value(images, 0.0, 255.0)
        return tf.round(images) if self.is_rounded else images, masks

    def load_for_augmentation(self, indices: tf.Tensor) -> Any:
        return self.stored.load_batch(indices)

    def make_fingerprint(self) -> dict[str, Any]:
        return self.stored.make_fingerprint()


def reduce_source(
    stored: Source, image_size: tuple[int, int], *, is_rounded: bool = True
) -> ReducedSource:
    """Returns a source of smaller examples."""
    return ReducedSource(
        num_examples=stored.num_examples,
        num_skipped=stored.num_skipped,
        stored=stored,
        image_size=image_size,
        is_rounded=is_rounded,
    )
