"""Checks that all workers hold the same weights, which only the program of one may have changed."""

import functools
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.placement.shards.divided import find_divided
from tfdist.training.workers.communication import UnlikeWorkersError, Workers

_PIECE = 1 << 20  # elements that are summed at a time, so that no copy of a table is made
# The share of a variable's sum of absolute values by which sums may differ. The workers' weights
# have the same bits on processors of the same kind; others round an update differently.
_TOLERANCES = {2: 1e-3, 4: 1e-6, 8: 1e-6}


def compare_weights(workers: Workers, variables: Sequence[keras.Variable]) -> None:
    """Checks that variables have the same values on all workers. All workers must call this.

    Each worker reads its own copy; three numbers per variable are exchanged.

    Args:
      variables: variables of which each worker has a copy; those that have none are skipped.
    """
    if workers.count == 1:
        return
    copies = [(v, copy) for v in variables for copy in _list_copies(v)]
    table = np.zeros([workers.count, len(copies), 3])
    for place, (_, copy) in enumerate(copies):
        table[workers.index, place] = _measure(copy)
    table = workers.sum(table.ravel()).reshape(table.shape)
    for place, (variable, copy) in enumerate(copies):
        tolerance = _TOLERANCES.get(copy.dtype.size, 0) if copy.dtype.is_floating else 0
        chief, *others = table[:, place]
        for worker, other in enumerate(others, start=1):
            if not np.allclose(other, chief, rtol=0, atol=tolerance * chief[1], equal_nan=True):
                raise UnlikeWorkersError(
                    f"The variable {variable.path} of worker {worker} differs from the chief's: "
                    "one of them has changed it alone, or drawn it with another seed. Make every "
                    "worker load or change weights, also in callbacks, and set one seed."
                )


def _list_copies(variable: keras.Variable) -> Iterator[tf.Variable]:
    """Yields this process's first copy of a variable, or of each of its parts."""
    divided = find_divided(variable)
    for value in divided.parts if divided else [variable._value]:
        copies = getattr(value, "values", None)
        copy = copies[0] if isinstance(copies, tuple) else value
        if isinstance(copy, tf.Variable):
            yield copy


def _measure(copy: tf.Variable) -> np.ndarray:
    """Returns the sum of a variable, that of its absolute values, and one with random weights."""
    values = np.asarray(copy.numpy()).reshape(-1)
    if not copy.dtype.is_floating:
        digest = hashlib.blake2b(np.ascontiguousarray(values).tobytes(), digest_size=6).digest()
        return np.array([int.from_bytes(digest), 0, 0], "f8")
    found = np.zeros(3)
    for start in range(0, len(values), _PIECE):
        piece: Any = values[start : start + _PIECE].astype("f8")
        # Each piece counts differently, so that pieces cannot be exchanged unnoticed.
        order = 1 + start / len(values)
        found += piece.sum(), np.abs(piece).sum(), order * (piece @ _make_weights()[: len(piece)])
    return found


@functools.cache
def _make_weights() -> np.ndarray:
    return np.random.default_rng(0).random(_PIECE)
