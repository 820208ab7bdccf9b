"""Divides the examples of a global batch over replicas."""

import functools
import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import tensorflow as tf

from tfdist.aliases import Batch, Nested
from tfdist.data.graph_errors import assert_in_graph
from tfdist.data.tf_data import set_options
from tfdist.errors import TfdistError
from tfdist.internals import NoneTensorSpec

_UNEVEN = "Cannot divide a batch over replicas: its parts have different numbers of examples"
_EVEN = "Give each part the same number, or train on one device."
_IF_SINGLE = " If the elements are single examples, call .batch(global_batch_size) on the dataset."


def split_rows(num_rows: int, num_replicas: int) -> list[tuple[int, int]]:
    """Returns the [start, end) of each replica in a batch, with even sizes, the larger first.

    >>> split_rows(16, 3)
    [(0, 6), (6, 11), (11, 16)]
    """
    size, more = divmod(num_rows, num_replicas)
    starts = [replica * size + min(replica, more) for replica in range(num_replicas + 1)]
    return list(itertools.pairwise(starts))


def split_batches(
    dataset: tf.data.Dataset, *, num_replicas: int, replicas: Sequence[int] | None = None
) -> tf.data.Dataset:
    """Splits a user's own global batches into per-replica slices, in order.

    Args:
      dataset: a dataset of global batches: any structure of tensors that share their first
        dimension. Batches may differ in size, as the last one often does.

    Returns:
      A dataset of (slice, place). The sizes of a global batch's slices differ by at most one. If
      it has fewer examples than there are replicas, each slice is the whole batch. The place, int64
      [2], is the index of the slice's first example, and the size of the global batch.

    Raises:
      TfdistError: the elements are not batches of dense tensors, or a replica's id is
        out of range.
    """
    ids = _check_replica_ids(num_replicas, replicas)
    spec = dataset.element_spec
    static_rows = check_batches(spec)

    def split(*arguments: Any) -> tf.data.Dataset:
        batch = arguments if isinstance(spec, tuple) else arguments[0]
        return tf.data.Dataset.from_tensor_slices(tf.constant(ids, tf.int64)).map(
            lambda replica: _slice(batch, replica, num_replicas, static_rows)
        )

    return set_options(dataset.flat_map(split)).prefetch(tf.data.AUTOTUNE)


def check_batches(spec: Nested[tf.TypeSpec]) -> int | None:
    """Checks that elements are batches that can be divided; returns their rows, None if unknown.

    Args:
      spec: the structure of `tf.TypeSpec` of an element.

    Raises:
      TfdistError: they are not batches of dense tensors, or their parts have different sizes.
    """
    leaves = [leaf for leaf in tf.nest.flatten(spec) if not isinstance(leaf, NoneTensorSpec)]
    if not leaves or not all(isinstance(leaf, tf.TensorSpec) for leaf in leaves):
        found = ", ".join(sorted({type(leaf).__name__ for leaf in leaves})) or "nothing"
        raise TfdistError(
            f"Cannot split a dataset of {found} over replicas: its elements must be batches of "
            "dense tensors. Convert them, for example with to_tensor() or tf.sparse.to_dense."
        )
    if any(leaf.shape.rank == 0 for leaf in leaves):
        raise TfdistError(
            "Cannot split a dataset of scalars over replicas: its elements must be global "
            "batches. Call .batch(global_batch_size) on it."
        )
    num_rows = {leaf.shape[0] for leaf in leaves if leaf.shape.rank} - {None}
    check_sizes(num_rows, advice=_IF_SINGLE)
    return num_rows.pop() if num_rows else None


def check_sizes(sizes: Collection[int], *, advice: str = "") -> None:
    """Checks that the parts of a batch have one size.

    Args:
      advice: the end of the message.

    Raises:
      TfdistError: they have several.
    """
    if len(sizes) > 1:
        found = " and ".join(map(str, sorted(sizes)))
        raise TfdistError(f"{_UNEVEN} ({found}). {_EVEN}{advice}")


def split_batch(
    batch: Batch, *, num_replicas: int, replicas: Sequence[int]
) -> list[tuple[Any, tf.Tensor]]:
    """Returns the (slice, place) of some replicas in one eager batch, as from `split_batches`."""
    num_rows = next(leaf for leaf in tf.nest.flatten(batch) if leaf is not None).shape[0]
    is_copied = num_rows < num_replicas
    bounds = [(0, num_rows)] * num_replicas if is_copied else split_rows(num_rows, num_replicas)

    def split(leaf: tf.Tensor | None) -> list[Any]:
        if leaf is None or is_copied:
            return [leaf] * num_replicas
        return tf.split(leaf, [end - start for start, end in bounds])

    leaves = [split(leaf) for leaf in tf.nest.flatten(batch)]
    return [
        (
            tf.nest.pack_sequence_as(batch, [parts[replica] for parts in leaves]),
            _make_place(bounds[replica][0], num_rows),
        )
        for replica in replicas
    ]


@functools.lru_cache(maxsize=256)
def _make_place(start: int, num_rows: int) -> tf.Tensor:
    return tf.constant([start, num_rows], tf.int64)


def _slice(batch: Batch, replica: tf.Tensor, num_replicas: int, static_rows: int | None) -> Any:
    leaves = [leaf for leaf in tf.nest.flatten(batch) if leaf is not None]
    num_rows = tf.shape(leaves[0], out_type=tf.int64)[0]
    static_size = None
    if static_rows is not None and static_rows < num_replicas:
        static_size = static_rows
    elif static_rows is not None and static_rows % num_replicas == 0:
        static_size = static_rows // num_replicas
    checks = [_assert_rows(num_rows), *_assert_alike(leaves)]
    with tf.control_dependencies([check for check in checks if check is not None]):
        rows = split_rows_dynamic(num_rows, num_replicas, replica)

    def take(leaf: tf.Tensor) -> tf.Tensor:
        return tf.ensure_shape(tf.gather(leaf, rows), [static_size, *leaf.shape[1:]])

    part = tf.nest.map_structure(lambda leaf: None if leaf is None else take(leaf), batch)
    return part, tf.stack([rows[0], num_rows])


def split_rows_dynamic(num_rows: tf.Tensor, num_replicas: int, replica: tf.Tensor) -> tf.Tensor:
    """Returns the rows of a global batch that a replica reads, int64; all if there are too few."""
    start, size = _split_dynamic(num_rows, num_replicas, replica)
    is_copied = num_rows < num_replicas
    start = tf.where(is_copied, tf.zeros_like(start), start)
    return start + tf.range(tf.where(is_copied, num_rows, size))


def _assert_rows(num_rows: tf.Tensor) -> tf.Operation:
    message = "Cannot train on a batch without examples. Leave empty batches out of the dataset."
    return assert_in_graph(num_rows >= 1, tf.constant(message))


def _assert_alike(leaves: Sequence[tf.Tensor]) -> list[tf.Operation]:
    """Asserts that the parts of a batch have the same size, since excess examples would be lost."""
    if all(leaf.shape.rank and leaf.shape[0] is not None for leaf in leaves):
        return []  # compared before, from the static shapes
    first, *others = [tf.shape(leaf)[0] for leaf in leaves]
    message = f"{_UNEVEN} ({{}} and {{}}). {_EVEN}"
    return [
        assert_in_graph(tf.equal(other, first), tf.strings.format(message, (first, other)))
        for other in others
    ]


def _split_dynamic(
    num_rows: tf.Tensor, num_replicas: int, replica: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns (start, size) of a replica's rows, as `split_rows` does, for tensors."""
    size, more = num_rows // num_replicas, num_rows % num_replicas
    start = replica * size + tf.minimum(replica, more)
    return start, size + tf.cast(replica < more, tf.int64)


def make_row_reader(
    global_batch_size: int, num_replicas: int, ids: Sequence[int]
) -> Callable[[tf.Tensor], tf.Tensor]:
    """Returns a function from a position in `ids` to the row numbers of that replica, int64."""
    parts = split_rows(global_batch_size, num_replicas)
    starts = tf.constant([parts[replica][0] for replica in ids], tf.int64)
    sizes = [parts[replica][1] - parts[replica][0] for replica in ids]

    def read_rows(place: tf.Tensor) -> tf.Tensor:
        if global_batch_size % num_replicas == 0:
            rows = tf.range(sizes[0], dtype=tf.int64)
        else:
            rows = tf.range(tf.gather(tf.constant(sizes, tf.int64), place))
        return tf.gather(starts, place) + rows

    return read_rows


def check_replicas(
    global_batch_size: int,
    num_replicas: int,
    replicas: Sequence[int] | None,
    *,
    at_least_one_row: bool = True,
) -> tuple[int, ...]:
    """Returns the replicas to read for, all by default; each must exist and get an example."""
    ids = _check_replica_ids(num_replicas, replicas)
    at_least = num_replicas if at_least_one_row else 1
    if global_batch_size < at_least:
        raise TfdistError(
            f"Cannot split a global batch of {global_batch_size} over {num_replicas} replicas: "
            f"each needs an example. Set `global_batch_size` to at least {at_least}, or use "
            "fewer devices."
        )
    return ids


def _check_replica_ids(num_replicas: int, replicas: Sequence[int] | None) -> tuple[int, ...]:
    ids = tuple(range(num_replicas)) if replicas is None else tuple(replicas)
    if not ids or min(ids) < 0 or max(ids) >= num_replicas:
        raise TfdistError(
            f"Cannot make batches for replicas {', '.join(map(str, ids)) or 'none'} of "
            f"{num_replicas}: ids are 0 .. num_replicas - 1, and a process has at least one."
        )
    return ids
