"""Global batches as a pure function of (seed, step), dealt out to replicas.

The training stream is the endless concatenation of shuffled epochs of the data.
Position p = step * global_batch_size + row lies in epoch e = p // n, and holds the example
that the epoch's permutation puts at p % n; its augmentation is seeded by (seed, p). Nothing
here depends on the number of replicas, and any step is reached at once. Where batches end with
the epochs, as Keras's do, step s * k + i of epochs of s steps begins at position k * n + i * B.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import tensorflow as tf

from tfdist.data.dataset_options import set_options
from tfdist.data.graph_errors import assert_in_graph, show_user_errors
from tfdist.data.source import Source
from tfdist.errors import TfdistError

MAX_SEED = 2**31 - 1

# What tf.random.experimental.index_shuffle puts before its seed. It takes one seed for
# many indices only; the operation below it takes a seed an index, which the batch that
# spans two passes needs. A test holds the two together.
_SHUFFLE_KEY = 498247692
_SHUFFLE_ROUNDS = 4


class BatchAugmentation(Protocol):
    """What `make_train_dataset` calls."""

    def augment_batch(self, batch: Any, seeds: Any) -> Any:
        """Returns a batch changed; row i must depend on row i of the arguments alone.

        Args:
          batch: of a source.
          seeds: int64 [rows, 2].
        """


def steps_per_epoch(num_examples: int, global_batch_size: int) -> int:
    """Returns the number of global batches that cover every example once.

    The last of them runs on into the next pass, since batches of training are full.

    >>> steps_per_epoch(100, 16)
    7
    """
    return -(-num_examples // global_batch_size)


def split_rows(num_rows: int, num_replicas: int) -> list[tuple[int, int]]:
    """Returns each replica's [start, end) of a batch: even sizes, the larger first.

    >>> split_rows(16, 3)
    [(0, 6), (6, 11), (11, 16)]
    """
    size, more = divmod(num_rows, num_replicas)
    starts = [replica * size + min(replica, more) for replica in range(num_replicas + 1)]
    return list(itertools.pairwise(starts))


@show_user_errors()
def make_train_dataset(
    source: Source,
    *,
    global_batch_size: int,
    seed: int,
    start_step: int = 0,
    num_replicas: int = 1,
    replicas: Sequence[int] | None = None,
    augmentation: BatchAugmentation | None = None,
    shuffle: bool = True,
    ends_epochs: bool = False,
    with_places: bool = False,
) -> tf.data.Dataset:
    """Returns the endless stream of this process's per-replica batches.

    The order is step `start_step`'s batch for each of `replicas`, then the next step's,
    and so on. Together the replicas' batches of a step are the global batch, in order.

    Args:
      source: the examples.
      global_batch_size: rows of a global batch.
      seed: of shuffling and augmentation, in [0, 2**31).
      start_step: the first global batch's number.
      num_replicas: over all processes.
      replicas: the ids of this process's replicas, by default all of them.
      augmentation: applied to the examples.
      shuffle: without it every epoch is in index order.
      ends_epochs: whether the last batch of an epoch has the rows that are left, as in Keras,
        rather than running on into the next epoch.
      with_places: whether each batch comes with its place, as from `split_batches`.

    Returns:
      A dataset of the source's elements with a batch dimension in front: static where
      `num_replicas` divides every global batch, else None.

    Raises:
      TfdistError: the batch has fewer rows than there are replicas, or the seed or
        start_step is out of range.
    """
    ids = _check_replicas(
        global_batch_size, num_replicas, replicas, at_least_one_row=not ends_epochs
    )
    if start_step < 0:
        raise TfdistError(f"Cannot start at step {start_step}: steps count from 0.")
    read = _make_position_reader(source, seed=seed, augmentation=augmentation, shuffle=shuffle)
    divide = _make_divider(source.num_examples, global_batch_size, num_replicas, ids, ends_epochs)

    def make_batch(number: tf.Tensor) -> Any:
        first, rows, place = divide(number)
        batch = read(first + rows)
        return (batch, place) if with_places else batch

    return _map_numbers(tf.data.Dataset.counter(start_step * len(ids), dtype=tf.int64), make_batch)


def make_train_reader(
    source: Source,
    *,
    global_batch_size: int,
    seed: int,
    augmentation: BatchAugmentation | None = None,
    shuffle: bool = True,
    ends_epochs: bool = False,
) -> Callable[[tf.Tensor], Any]:
    """Returns a function from a step's number, an int64 scalar, to its global batch.

    The batches are those of `make_train_dataset`; the function can be called in any graph.

    Args:
      source, global_batch_size, seed, augmentation, shuffle, ends_epochs: as in
        `make_train_dataset`.

    Raises:
      TfdistError: as in `make_train_dataset`.
    """
    _check_replicas(global_batch_size, 1, None)
    read = _make_position_reader(source, seed=seed, augmentation=augmentation, shuffle=shuffle)
    find_rows = _make_row_finder(source.num_examples, global_batch_size, ends_epochs)

    def read_step(step: tf.Tensor) -> Any:
        first, num_rows = find_rows(step)
        return read(first + tf.range(num_rows))

    return read_step


def _make_row_finder(
    num_examples: int, global_batch_size: int, ends_epochs: bool
) -> Callable[[tf.Tensor], tuple[tf.Tensor, tf.Tensor]]:
    """Returns a function from a step to its first position in the stream and its rows, int64."""
    size = tf.constant(global_batch_size, tf.int64)
    if not ends_epochs:
        return lambda step: (step * size, size)
    num_steps = steps_per_epoch(num_examples, global_batch_size)

    def find(step: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        offset = step % num_steps * size
        num_rows = tf.minimum(tf.constant(num_examples, tf.int64) - offset, size)
        return step // num_steps * num_examples + offset, num_rows

    return find


def _make_divider(
    num_examples: int,
    global_batch_size: int,
    num_replicas: int,
    ids: Sequence[int],
    ends_epochs: bool,
) -> Callable[[tf.Tensor], tuple[tf.Tensor, tf.Tensor, tf.Tensor]]:
    """Returns a function from the number of a batch in the order of `make_train_dataset`.

    It gives the global batch's first position in the stream, the replica's rows of it, and their
    place as from `split_batches`.
    """
    find_rows = _make_row_finder(num_examples, global_batch_size, ends_epochs)
    is_full = not ends_epochs or num_examples % global_batch_size == 0
    is_fixed = is_full and global_batch_size >= num_replicas
    read_rows = _make_row_reader(global_batch_size, num_replicas, ids) if is_fixed else None

    def divide(number: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        first, num_rows = find_rows(number // len(ids))
        if read_rows is not None:
            rows = read_rows(number % len(ids))
        else:
            replica = tf.gather(tf.constant(ids, tf.int64), number % len(ids))
            rows = _split_rows_dynamic(num_rows, num_replicas, replica)
        return first, rows, tf.stack([rows[0], num_rows])

    return divide


def _make_position_reader(
    source: Source,
    *,
    seed: int,
    augmentation: BatchAugmentation | None,
    shuffle: bool,
) -> Callable[[tf.Tensor], Any]:
    """Returns a function from positions in the training stream, int64 [batch], to a batch."""
    if not 0 <= seed <= MAX_SEED:
        raise TfdistError(f"Cannot shuffle with seed {seed}: it must be in 0 .. {MAX_SEED}.")

    def read(positions: tf.Tensor) -> Any:
        passes, offsets = positions // source.num_examples, positions % source.num_examples
        if shuffle:
            indices = _shuffle(offsets, seed, passes, source.num_examples)
        else:
            indices = offsets
        batch = source.load_batch(indices)
        seeds = tf.stack([tf.fill(tf.shape(positions), tf.constant(seed, tf.int64)), positions], 1)
        return batch if augmentation is None else augmentation.augment_batch(batch, seeds)

    return read


def make_eval_dataset(
    source: Source,
    *,
    global_batch_size: int,
    num_replicas: int = 1,
    replicas: Sequence[int] | None = None,
) -> tf.data.Dataset:
    """Returns every example exactly once, in index order, as per-replica batches.

    Args:
      source: the examples.
      global_batch_size: rows of a global batch; the last one may have fewer.
      num_replicas: over all processes.
      replicas: the ids of this process's replicas, by default all of them.

    Returns:
      A dataset of (batch, place), as from `split_batches`, in the order of `make_train_dataset`.

    Raises:
      TfdistError: the global batch has no row.
    """
    ids = _check_replicas(global_batch_size, num_replicas, replicas, at_least_one_row=False)
    num_steps = steps_per_epoch(source.num_examples, global_batch_size)
    divide = _make_divider(source.num_examples, global_batch_size, num_replicas, ids, True)

    def make_batch(number: tf.Tensor) -> Any:
        first, rows, place = divide(number)
        return source.load_batch(first + rows), place

    return _map_numbers(tf.data.Dataset.range(num_steps * len(ids)), make_batch)


def make_eval_reader(source: Source, *, global_batch_size: int) -> Callable[[tf.Tensor], Any]:
    """Returns a function from a step's number, an int64 scalar, to its global batch.

    The steps are those of `make_eval_dataset`; the function can be called in any graph.

    Args:
      source, global_batch_size: as in `make_eval_dataset`.

    Raises:
      TfdistError: the global batch has no row.
    """
    _check_replicas(global_batch_size, 1, None)
    find_rows = _make_row_finder(source.num_examples, global_batch_size, ends_epochs=True)

    def read(step: tf.Tensor) -> Any:
        first, num_rows = find_rows(step)
        return source.load_batch(first + tf.range(num_rows))

    return read


def split_batches(
    dataset: tf.data.Dataset, *, num_replicas: int, replicas: Sequence[int] | None = None
) -> tf.data.Dataset:
    """Splits a user's own global batches into per-replica slices, in order.

    Args:
      dataset: of global batches: any structure of tensors that share their first
        dimension. Batches may differ in size, as the last one does.
      num_replicas: over all processes.
      replicas: the ids of this process's replicas, by default all of them.

    Returns:
      A dataset of (slice, place). The slices of a global batch differ by at most one row in size.
      Where it has fewer rows than there are replicas, each slice is the whole of it. The place,
      int64 [2], is that of the slice's first row, and the global batch's number of rows.

    Raises:
      TfdistError: the elements are not batches of dense tensors, or a replica's id is
        out of range.
    """
    ids = _check_replica_ids(num_replicas, replicas)
    spec = dataset.element_spec
    leaves = [leaf for leaf in tf.nest.flatten(spec) if not isinstance(leaf, tf.NoneTensorSpec)]
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
    static_rows = num_rows.pop() if len(num_rows) == 1 else None

    def split(*arguments: Any) -> tf.data.Dataset:
        batch = arguments if isinstance(spec, tuple) else arguments[0]
        return tf.data.Dataset.from_tensor_slices(tf.constant(ids, tf.int64)).map(
            lambda replica: _slice(batch, replica, num_replicas, static_rows)
        )

    return set_options(dataset.flat_map(split)).prefetch(tf.data.AUTOTUNE)


def _slice(batch: Any, replica: tf.Tensor, num_replicas: int, static_rows: int | None) -> Any:
    leaves = [leaf for leaf in tf.nest.flatten(batch) if leaf is not None]
    num_rows = tf.shape(leaves[0], out_type=tf.int64)[0]
    static_size = None
    if static_rows is not None and static_rows < num_replicas:
        static_size = static_rows
    elif static_rows is not None and static_rows % num_replicas == 0:
        static_size = static_rows // num_replicas
    check = _assert_rows(num_rows)
    with tf.control_dependencies([] if check is None else [check]):
        rows = _split_rows_dynamic(num_rows, num_replicas, replica)

    def take(leaf: tf.Tensor) -> tf.Tensor:
        return tf.ensure_shape(tf.gather(leaf, rows), [static_size, *leaf.shape[1:]])

    part = tf.nest.map_structure(lambda leaf: None if leaf is None else take(leaf), batch)
    return part, tf.stack([rows[0], num_rows])


def _split_rows_dynamic(num_rows: tf.Tensor, num_replicas: int, replica: tf.Tensor) -> tf.Tensor:
    """Returns a replica's rows of a global batch, int64: all of it where replicas are more."""
    start, size = _split_dynamic(num_rows, num_replicas, replica)
    is_copied = num_rows < num_replicas
    start = tf.where(is_copied, tf.zeros_like(start), start)
    return start + tf.range(tf.where(is_copied, num_rows, size))


def _assert_rows(num_rows: tf.Tensor) -> tf.Operation:
    message = "Cannot train on a batch without rows. Leave empty batches out of the dataset."
    return assert_in_graph(num_rows >= 1, tf.constant(message))


def _split_dynamic(
    num_rows: tf.Tensor, num_replicas: int, replica: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns (start, size) of a replica's rows; `split_rows` for tensors."""
    size, more = num_rows // num_replicas, num_rows % num_replicas
    start = replica * size + tf.minimum(replica, more)
    return start, size + tf.cast(replica < more, tf.int64)


def _make_row_reader(
    global_batch_size: int, num_replicas: int, ids: Sequence[int]
) -> Callable[[tf.Tensor], tf.Tensor]:
    """Returns a function from a place in `ids` to that replica's row numbers, int64."""
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


def _shuffle(offsets: tf.Tensor, seed: int, passes: tf.Tensor, num_examples: int) -> tf.Tensor:
    constant = tf.fill(tf.shape(passes), tf.constant(_SHUFFLE_KEY, tf.int64))
    seeds = tf.stack([constant, tf.fill(tf.shape(passes), tf.constant(seed, tf.int64)), passes], 1)
    return tf.raw_ops.RandomIndexShuffle(
        index=offsets,
        seed=seeds,
        max_index=tf.fill(tf.shape(passes), tf.constant(num_examples - 1, tf.int64)),
        rounds=_SHUFFLE_ROUNDS,
    )


def _check_replicas(
    global_batch_size: int,
    num_replicas: int,
    replicas: Sequence[int] | None,
    *,
    at_least_one_row: bool = True,
) -> tuple[int, ...]:
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


def _map_numbers(
    numbers: tf.data.Dataset, make_batch: Callable[[tf.Tensor], Any]
) -> tf.data.Dataset:
    dataset = numbers.map(make_batch, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
    return set_options(dataset).prefetch(tf.data.AUTOTUNE)
