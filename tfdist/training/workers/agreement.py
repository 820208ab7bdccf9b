"""Agreement among workers that train together: on their data, and on flags after each step."""

import functools
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.data.digests import END, hash_digests
from tfdist.data.fingerprint import describe_difference
from tfdist.errors import TfdistError
from tfdist.placement.shards.divided import find_divided
from tfdist.training.inputs.data_adapter import DataAdapter
from tfdist.training.replicas.loss_scaling import get_inner_optimizer
from tfdist.training.workers.communication import UnlikeWorkersError, Workers

_NOTHING: Mapping[str, Any] = {}
_PIECE = 1 << 20  # elements that are summed at a time, so that no copy of a table is made
# The share of a variable's sum of absolute values by which sums may differ. The workers' weights
# have the same bits on processors of the same kind; others round an update differently.
_TOLERANCES = {2: 1e-3, 4: 1e-6, 8: 1e-6}


def agree(
    workers: Workers, model: keras.Model, *flags: bool, read: Mapping[str, Any] = _NOTHING
) -> list[bool]:
    """Returns, for each flag, whether it is set on any worker.

    Args:
      model: the model whose learning rate is compared.
      read: the digests of the batches that this worker has read since the last call.

    Raises:
      UnlikeWorkersError: the learning rates differ, because a callback changed the rate on some
        of them only; or they have read different batches.
    """
    if workers.count == 1:
        return [bool(flag) for flag in flags]
    own = np.zeros([2, workers.count])
    own[:, workers.index] = _read_learning_rate(model), hash_digests(read)
    found = workers.sum(np.concatenate([np.array(flags, "f8"), own.ravel()]))
    rates, hashes = np.split(found[len(flags) :], 2)
    _refuse_different_batches(workers, hashes, read)
    for worker, rate in enumerate(rates):
        if rate != rates[0]:
            raise UnlikeWorkersError(
                f"The learning rate is {rate:g} on worker {worker} and {rates[0]:g} on the chief. "
                "Pass the callback that changes it on every worker."
            )
    return [bool(number) for number in found[: len(flags)]]


def agree_on_data(workers: Workers, adapter: DataAdapter) -> dict[str, Any]:
    """Returns the fingerprint of the data, after checking that it is the same on all workers."""
    own = adapter.make_fingerprint()
    if workers.count == 1:
        return own
    others = workers.share_json(own)
    for worker, other in enumerate(others):
        difference = describe_difference(others[0], other)
        if difference is not None:
            raise UnlikeWorkersError(
                f"The data of worker {worker} differ from the chief's: {difference}. Give all "
                "workers the same data."
            )
    return own


def compare_batches(workers: Workers, read: Mapping[str, Any]) -> None:
    """Checks that all workers have read the same batches. All workers must call this."""
    if workers.count == 1:
        return
    hashes = np.zeros(workers.count)
    hashes[workers.index] = hash_digests(read)
    _refuse_different_batches(workers, workers.sum(hashes), read)


def _refuse_different_batches(
    workers: Workers, hashes: np.ndarray, read: Mapping[str, Any]
) -> None:
    if np.all(hashes == hashes[0]):
        return
    chief, *others = workers.share_json(read)
    for worker, other in enumerate(others, start=1):
        for number in sorted({*chief, *other}, key=int):
            ours, theirs = chief.get(number), other.get(number)
            if ours != theirs:
                raise UnlikeWorkersError(
                    f"Batch {number} of worker {worker} {_describe_batch(ours, theirs)}. Give all "
                    "workers the same data in the same order, with a seed for all that shuffles or "
                    "samples them. If examples are augmented at random, give "
                    "`random_augmentation=True`."
                )


def _describe_batch(ours: Sequence[str] | None, theirs: Sequence[str] | None) -> str:
    """Returns how a worker's batch differs from the chief's, as the end of a sentence."""
    if [END] in (ours, theirs):
        return "exists, but not on the chief" if ours == [END] else "does not exist on this worker"
    if ours is None or theirs is None:
        return "was read, but not by the chief" if ours is None else "was not read"
    sizes = [[digest.partition(" ")[0] for digest in digests] for digests in (ours, theirs)]
    if sizes[0] != sizes[1]:
        listed = [", ".join(each) for each in sizes]
        return f"has tensors of {listed[1]}, but the chief's of {listed[0]}"
    return "has other examples than the chief's"


def check_data(before: Mapping[str, Any], now: Mapping[str, Any], *, step: int) -> None:
    """Checks that the data are those of a checkpoint.

    Args:
      before: what the checkpoint records about the data, possibly written by an older tfdist.
      now: the same about the data at hand: the fingerprint, and the batch size.

    Raises:
      TfdistError: the data or the batch size are different.
    """
    difference = describe_difference(before.get("train", {}), now["train"])
    sizes = before.get("batch_size"), now["batch_size"]
    if difference is None and None not in sizes and sizes[0] != sizes[1]:
        difference = f"the batch size is {sizes[1]} instead of {sizes[0]}"
    if difference is not None:
        raise TfdistError(
            f"Cannot continue after step {step}: {difference}. Give the data of the checkpoint, or "
            "another directory to start over. If the data are what another model predicts, which "
            "was stopped before and has trained further now, remove the checkpoints of this one."
        )


def _read_learning_rate(model: keras.Model) -> float:
    """Returns the learning rate; 0 if callbacks cannot change it."""
    rate = getattr(get_inner_optimizer(model.optimizer), "_learning_rate", None)
    if not isinstance(rate, keras.Variable):
        return 0.0
    return float(rate.numpy())


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
