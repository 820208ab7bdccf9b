"""The options of every `tf.data.Dataset` that tfdist makes."""

import tensorflow as tf


def set_options(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns the dataset with a fixed order, unsharded and without autotuning.

    The end of an autotuned dataset can wait for the thread that tunes it, which may check whether
    to stop just before it sleeps (TensorFlow 2.21). It sleeps as long as the dataset was in use, at
    most a minute, plus any time by which the clock was set back. Without autotuning,
    `tf.data.AUTOTUNE` is the number of TensorFlow's threads, at most 16.
    """
    options = tf.data.Options()
    options.deterministic = True
    options.autotune.enabled = False
    # Each process already makes only the batches of its own replicas.
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return dataset.with_options(options)
