"""Finds out whether an optimizer updates each element of a weight from this element alone."""

import contextlib
import functools

import keras
import numpy as np
import tensorflow as tf

from tfdist.errors import TfdistError
from tfdist.placement.shards.divided import building_parts, divide, updating_parts
from tfdist.placement.variables import call_outside_scopes

_KNOWN = {keras.optimizers.Adam, keras.optimizers.AdamW, keras.optimizers.SGD}


def check_optimizer(optimizer: keras.optimizers.Optimizer) -> None:
    """Checks that an optimizer can update a weight part by part.

    An optimizer other than the most common is tried on a small weight, whole and divided.

    Raises:
      TfdistError: the results differ, as for those that use the norm of a weight (LAMB) or its
        rows and columns (Adafactor, Muon).
    """
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return check_optimizer(optimizer.inner_optimizer)
    for part in (parts := getattr(optimizer, "optimizers", [])):
        check_optimizer(part)
    if parts or type(optimizer) in _KNOWN:
        return None
    name = type(optimizer).__name__
    try:
        whole = call_outside_scopes(lambda: _try(optimizer, None))
    except Exception as error:
        raise TfdistError(
            f"`placement=shards` cannot try {name} on a small weight ({type(error).__name__}). "
            "Use one of Keras's optimizers, or leave out the placement."
        ) from error
    with contextlib.suppress(Exception):  # it may need the shape of the whole weight
        divided = [call_outside_scopes(functools.partial(_try, optimizer, a)) for a in (0, 1)]
        if all(np.allclose(whole, found, rtol=1e-4, atol=1e-6) for found in divided):
            return None
    raise TfdistError(
        f"`placement=shards` does not support {name}: it does not update each element of a weight "
        "from this element alone, so a part of a weight is not enough. Use Adam, SGD or the like, "
        "or leave out the placement."
    )


def updates_elements(optimizer: keras.optimizers.Optimizer) -> bool:
    """Returns whether an optimizer updates each element of a weight from this element alone."""
    try:
        check_optimizer(optimizer)
    except TfdistError:
        return False
    return True


def _try(optimizer: keras.optimizers.Optimizer, axis: int | None) -> np.ndarray:
    """Returns a weight after three updates, divided along an axis or whole."""
    config = optimizer.get_config()
    config |= {"learning_rate": 0.01} if "learning_rate" in config else {}
    copy = type(optimizer).from_config(config)
    rng = np.random.default_rng(0)
    weight = keras.Variable(rng.normal(size=(6, 4)), dtype="float32", name="kernel")
    strategy = tf.distribute.get_strategy()
    groups = {"CPU:0": ("CPU:0", "CPU:0")}
    if axis is not None:
        divide(weight, axis, strategy, groups)
    with building_parts(strategy, groups):
        copy.build([weight])
    with updating_parts(strategy, [weight], [copy]):
        for _ in range(3):
            gradient = tf.constant(rng.normal(size=(6, 4)) * [1, 3, 9, 27], tf.float32)
            copy.apply([gradient], [weight])
    return weight.numpy()
