"""Keeps the collectives of several strategies in one process apart."""

import itertools
from typing import Any

import tensorflow as tf

_MOST_GROUPS = 1000  # of one strategy: one for each list of devices that it sums over
_bases = itertools.count(_MOST_GROUPS, _MOST_GROUPS)


def separate_collectives(strategy: tf.distribute.Strategy) -> None:
    """Gives a MirroredStrategy keys of its own for its collectives, once.

    TensorFlow 2.21 numbers the collectives of every MirroredStrategy from one, so that those of
    two strategies in a process meet, and both abort. This does not affect functions that were
    traced before.
    """
    extended: Any = strategy.extended
    old = getattr(extended, "_collective_ops", None)  # logical replicas have none
    if old is None or extended._collective_key_base:
        return
    extended._collective_key_base = next(_bases)
    extended._collective_ops = extended._make_collective_ops_with_fallbacks()
    if extended._cross_device_ops is old:
        extended._cross_device_ops = extended._collective_ops
