"""Augments classified images as a pure function of one seed per example."""

from dataclasses import dataclass

import tensorflow as tf

from tfdist.data.seeds import hash_uniform


@dataclass(frozen=True)
class Mirror:
    """Mirrors half of the examples horizontally."""

    @tf.autograph.experimental.do_not_convert
    def augment_batch(
        self, batch: tuple[tf.Tensor, tf.Tensor], seeds: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the augmented batch.

        Args:
          batch: images, float [batch, height, width, channels], and labels.
          seeds: int64 [batch, 2].
        """
        images, labels = batch
        flips = hash_uniform(seeds, 1)[:, 0] < 0.5
        return tf.where(flips[:, None, None, None], images[:, :, ::-1], images), labels
