"""What all sources of images and masks have in common."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import tensorflow as tf


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class ImagesAndMasks:
    """The examples' types, and the classes of their masks: a base beside a source's.

    Attributes:
      image_size: (height, width) in pixels of every example.
      num_classes: number of classes.
      class_names: their names, or None.
      ignore_label: label that neither loss nor metrics see, or None.
    """

    image_size: tuple[int, int]
    num_classes: int
    class_names: tuple[str, ...] | None = None
    ignore_label: int | None = None

    @property
    def element_spec(self) -> Any:
        """(image float32 [height, width, 3] in [0, 255], mask int32 [height, width])."""
        return (
            tf.TensorSpec((*self.image_size, 3), tf.float32),
            tf.TensorSpec(self.image_size, tf.int32),
        )

    @property
    def stored_spec(self) -> Any:
        """Both in uint8."""
        image, mask = self.element_spec
        return tf.TensorSpec(image.shape, tf.uint8), tf.TensorSpec(mask.shape, tf.uint8)

    @property
    def info(self) -> Mapping[str, Any]:
        """The classes, ready for JSON."""
        names = self.class_names or map(str, range(self.num_classes))
        return {"class_names": list(names), "ignore_label": self.ignore_label}
