"""Augmentation of images with a class, a pure function of a seed per example."""

from dataclasses import dataclass

import tensorflow as tf

from tfdist.data.seeds import hash_uniform


@dataclass(frozen=True)
class Mirror:
    """Mirrors left and right for half of the examples."""

    @tf.autograph.experimental.do_not_convert
    def augment_batch(
        self, batch: tuple[tf.Tensor, tf.Tensor], seeds: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns a batch changed.

        Args:
          batch: images, float [batch, height, width, channels], and labels.
          seeds: int64 [batch, 2].
        """
        images, labels = batch
        flips = hash_uniform(seeds, 1)[:, 0] < 0.5
        return tf.where(flips[:, None, None, None], images[:, :, ::-1], images), labels
