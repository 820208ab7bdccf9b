"""What all configurations train: one of tfdist's models on noise, or a task of the user."""

import functools
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist import models
from tfdist.benchmark.options import MeasuredModelOptions
from tfdist.models.layers import FusedBatchNormalization
from tfdist.models.portable import to_keras_layers
from tfdist.tasks.base import Task
from tfdist.tasks.data import Data, to_sources
from tfdist.tasks.registry import select_task

BATCHES = 4  # kept in memory and used again and again


def build_model(
    options: MeasuredModelOptions, *, keras_layers: bool = False, jit_compile: bool = False
) -> keras.Model:
    """Returns the compiled model that all configurations train.

    Args:
      keras_layers: whether to use Keras's own batch normalization instead of tfdist's.
      jit_compile: whether Keras compiles its step with XLA; a task decides by itself.
    """
    optimizer = keras.optimizers.Adam(1e-3)
    if options.task:
        task, data = _read_task(options)
        model = task.build_model(data.info, seed=0)
        model = _use_keras_layers(model) if keras_layers else model
        task.compile_model(model, optimizer, data.info)
        return model
    model = models.make_model(
        options.model,
        image_size=options.image_size,
        num_classes=options.num_classes,
        base_filters=options.base_filters,
        depth=options.depth,
        norm=options.norm,
    )
    if keras_layers:
        model = _use_keras_layers(model)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, jit_compile=jit_compile)
    return model


def make_batches(options: MeasuredModelOptions, count: int = BATCHES) -> tuple[Any, ...]:
    """Returns the examples of `count` batches for `fit`: `(x, y)` or `(x, y, sample_weight)`.

    They are the task's first training examples, or noise: images, float32 in [0, 255], and the
    class of each pixel, int32.
    """
    num_examples = count * options.global_batch_size
    if options.task:
        source = to_sources(_read_task(options)[1]).train
        places = tf.range(num_examples, dtype=tf.int64) % source.num_examples
        examples = source.load_batch(places)
        return tuple(tf.nest.map_structure(np.asarray, examples))
    random = np.random.default_rng(0)
    shape = (num_examples, *options.image_size)
    images = random.uniform(0, 255, (*shape, 3)).astype(np.float32)
    return images, random.integers(0, options.num_classes, shape, np.int32)


@functools.cache
def _read_task(options: MeasuredModelOptions) -> tuple[Task, Data]:
    task = select_task(options)
    return task, task.make_data(seed=0, quiet=True)


def _use_keras_layers(model: keras.Model) -> keras.Model:
    is_fused = any(isinstance(each, FusedBatchNormalization) for each in model._flatten_layers())
    return to_keras_layers(model) if is_fused else model
