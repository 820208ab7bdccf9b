"""Draws what a run's model predicts."""

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfdist.data.source import Source
from tfdist.tasks.segmentation.pictures import make_comparison
from tfdist.training.fit.trainer import Trainer

_SAMPLES = 6


def draw_samples(trainer: Trainer, source: Source, *, class_names: Sequence[str]) -> np.ndarray:
    """Returns image, truth and prediction of some examples, uint8 [height, width, 3].

    They are spread over the source, because neighbors may be frames of one video. All workers
    call this.
    """
    count = min(_SAMPLES, source.num_examples)
    chosen = np.linspace(0, source.num_examples - 1, count).round().astype(np.int64)
    examples = [source.load(tf.constant(index)) for index in chosen]
    images = np.stack([image.numpy() for image, _ in examples])
    truths = np.stack([mask.numpy() for _, mask in examples]).reshape(images.shape[:3])
    logits = trainer.predict(
        images,
        verbose=0,
        global_batch_size=max(count, trainer.engine.workers.num_replicas),
    )
    return make_comparison(
        images, truths.astype(np.int64), np.argmax(logits, -1), class_names=class_names
    )
