"""Global batches as a pure function of (seed, step), divided over replicas.

The training stream is the endless concatenation of shuffled epochs of n examples. Position
p = step * B + i, for example i of a global batch of B, lies in epoch p // n and holds the example
that the epoch's permutation puts at p % n; its augmentation is seeded by (seed, p). Nothing here
depends on the number of replicas, and any step can be reached directly. If batches end with the
epochs, as in Keras, epochs have s steps and step s * k + i begins at position k * n + i * B.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import tensorflow as tf

from tfdist.aliases import Batch, Nested
from tfdist.data.graph_errors import show_user_errors
from tfdist.data.rows import check_replicas, make_row_reader, split_rows_dynamic
from tfdist.data.source import Source
from tfdist.data.tf_data import set_options
from tfdist.errors import TfdistError

MAX_SEED = 2**31 - 1

# What tf.random.experimental.index_shuffle puts before its seed. It takes only one seed for
# many indices; the operation that it calls takes one seed per index, which a batch that
# spans two epochs requires. A test checks that the two agree.
_SHUFFLE_KEY = 498247692
_SHUFFLE_ROUNDS = 4

_ENDLESS = tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY)


Shuffle: TypeAlias = Any  # bool, str or a tensor


class BatchAugmentation(Protocol):
    """The augmentation that `make_train_dataset` calls."""

    def augment_batch(self, batch: Batch, seeds: Nested[tf.Tensor]) -> Any:
        """Returns the augmented batch: example i depends on example i and `seeds[i]`, int64 [2]."""


def steps_per_epoch(num_examples: int, global_batch_size: int) -> int:
    """Returns the number of global batches that cover every example once.

    The last of them may extend into the next epoch; see `ends_epochs` of `make_train_dataset`.

    >>> steps_per_epoch(100, 16)
    7
    """
    return -(-num_examples // global_batch_size)


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
    shuffle: Shuffle = True,
    ends_epochs: bool = False,
    with_places: bool = False,
) -> tf.data.Dataset:
    """Returns the endless stream of this process's per-replica batches.

    The stream holds the batch of step `start_step` for each of `replicas`, then those of the
    next step, and so on. The batches of all replicas at a step are the global batch, in order.

    Args:
      global_batch_size: the number of examples in a global batch.
      seed: the seed of shuffling and augmentation, in [0, 2**31).
      shuffle: whether to shuffle every epoch, rather than to keep the order of the indices;
        `"batch"` shuffles within each batch, and requires `ends_epochs`; an int64 tensor
        [num_examples] is the order of every epoch.
      ends_epochs: whether the last batch of an epoch holds only the remaining examples, as in
        Keras, rather than extending into the next epoch.
      with_places: whether each batch comes with its place, as from `split_batches`.

    Returns:
      A dataset of the source's elements with a leading batch dimension, which is static if
      `num_replicas` divides every global batch, else None.

    Raises:
      TfdistError: the batch has fewer examples than there are replicas, or the seed or
        start_step is out of range.
    """
    ids = check_replicas(
        global_batch_size, num_replicas, replicas, at_least_one_row=not ends_epochs
    )
    if start_step < 0:
        raise TfdistError(f"Cannot start at step {start_step}: steps count from 0.")
    read = _make_position_reader(source, global_batch_size, seed, augmentation, shuffle)
    divide = _make_divider(source.num_examples, global_batch_size, num_replicas, ids, ends_epochs)

    def make_batch(number: tf.Tensor) -> Any:
        first, rows, place = divide(number)
        batch = read(first + rows)
        return (batch, place) if with_places else batch

    # `Dataset.counter` would run a function of its own for each number.
    numbers = tf.data.Dataset.range(start_step * len(ids), tf.int64.max)
    return _map_numbers(numbers.apply(_ENDLESS), make_batch, source, augmentation)


def make_train_reader(
    source: Source,
    *,
    global_batch_size: int,
    seed: int,
    augmentation: BatchAugmentation | None = None,
    shuffle: Shuffle = True,
    ends_epochs: bool = False,
) -> Callable[[tf.Tensor], Any]:
    """Returns a function from a step's number, an int64 scalar, to its global batch.

    The batches are those of `make_train_dataset`; the function can be called in any graph.
    """
    check_replicas(global_batch_size, 1, None)
    read = _make_position_reader(source, global_batch_size, seed, augmentation, shuffle)
    find_rows = _make_row_finder(source.num_examples, global_batch_size, ends_epochs)

    def read_step(step: tf.Tensor) -> Any:
        first, num_rows = find_rows(step)
        return read(first + tf.range(num_rows))

    return read_step


def _make_row_finder(
    num_examples: int, global_batch_size: int, ends_epochs: bool
) -> Callable[[tf.Tensor], tuple[tf.Tensor, tf.Tensor]]:
    """Returns a function from a step to its first position and its number of examples, int64."""
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
    """Returns a function of a batch's number in the order of `make_train_dataset`.

    It returns the global batch's first position in the stream, the rows of it that the replica
    reads, and their place, as from `split_batches`.
    """
    find_rows = _make_row_finder(num_examples, global_batch_size, ends_epochs)
    is_full = not ends_epochs or num_examples % global_batch_size == 0
    is_fixed = is_full and global_batch_size >= num_replicas
    read_rows = make_row_reader(global_batch_size, num_replicas, ids) if is_fixed else None

    def divide(number: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        first, num_rows = find_rows(number // len(ids))
        if read_rows is not None:
            rows = read_rows(number % len(ids))
        else:
            replica = tf.gather(tf.constant(ids, tf.int64), number % len(ids))
            rows = split_rows_dynamic(num_rows, num_replicas, replica)
        return first, rows, tf.stack([rows[0], num_rows])

    return divide


def _make_position_reader(
    source: Source,
    global_batch_size: int,
    seed: int,
    augmentation: BatchAugmentation | None,
    shuffle: Shuffle,
) -> Callable[[tf.Tensor], Any]:
    """Returns a function from positions in the training stream, int64 [batch], to a batch."""
    if not 0 <= seed <= MAX_SEED:
        raise TfdistError(f"Cannot shuffle with seed {seed}: it must be in 0 .. {MAX_SEED}.")
    num_examples = tf.constant(source.num_examples, tf.int64)

    def read(positions: tf.Tensor) -> Any:
        epochs, offsets = positions // num_examples, positions % num_examples
        if tf.is_tensor(shuffle):
            indices = tf.gather(shuffle, offsets)
        elif shuffle == "batch":
            numbers = offsets // global_batch_size
            firsts = numbers * global_batch_size
            sizes = tf.minimum(num_examples - firsts, global_batch_size)
            numbers += epochs * steps_per_epoch(source.num_examples, global_batch_size)
            indices = firsts + _shuffle(offsets - firsts, seed, numbers, sizes)
        elif shuffle:
            indices = _shuffle(offsets, seed, epochs, tf.fill(tf.shape(epochs), num_examples))
        else:
            indices = offsets
        if augmentation is None:
            return source.load_batch(indices)
        seeds = tf.stack([tf.fill(tf.shape(positions), tf.constant(seed, tf.int64)), positions], 1)
        return augmentation.augment_batch(source.load_for_augmentation(indices), seeds)

    return read


def make_eval_dataset(
    source: Source,
    *,
    global_batch_size: int,
    num_replicas: int = 1,
    replicas: Sequence[int] | None = None,
) -> tf.data.Dataset:
    """Returns a dataset with every example exactly once, in index order, in per-replica batches.

    Args:
      global_batch_size: the number of examples in a global batch; the last one may have fewer.

    Returns:
      A dataset of (batch, place), as from `split_batches`, in the order of `make_train_dataset`.

    Raises:
      TfdistError: the global batch has no examples.
    """
    ids = check_replicas(global_batch_size, num_replicas, replicas, at_least_one_row=False)
    num_steps = steps_per_epoch(source.num_examples, global_batch_size)
    divide = _make_divider(source.num_examples, global_batch_size, num_replicas, ids, True)

    def make_batch(number: tf.Tensor) -> Any:
        first, rows, place = divide(number)
        return source.load_batch(first + rows), place

    return _map_numbers(tf.data.Dataset.range(num_steps * len(ids)), make_batch, source)


def make_eval_reader(source: Source, *, global_batch_size: int) -> Callable[[tf.Tensor], Any]:
    """Returns a function from a step's number, an int64 scalar, to its global batch.

    The steps are those of `make_eval_dataset`; the function can be called in any graph.

    Raises:
      TfdistError: the global batch has no examples.
    """
    check_replicas(global_batch_size, 1, None)
    find_rows = _make_row_finder(source.num_examples, global_batch_size, ends_epochs=True)

    def read(step: tf.Tensor) -> Any:
        first, num_rows = find_rows(step)
        return source.load_batch(first + tf.range(num_rows))

    return read


def _shuffle(offsets: tf.Tensor, seed: int, orders: tf.Tensor, sizes: tf.Tensor) -> tf.Tensor:
    """Returns where each offset is in the permutation `orders` of as many numbers as `sizes`."""
    constant = tf.fill(tf.shape(orders), tf.constant(_SHUFFLE_KEY, tf.int64))
    seeds = tf.stack([constant, tf.fill(tf.shape(orders), tf.constant(seed, tf.int64)), orders], 1)
    return tf.raw_ops.RandomIndexShuffle(
        index=offsets, seed=seeds, max_index=sizes - 1, rounds=_SHUFFLE_ROUNDS
    )


def _map_numbers(
    numbers: tf.data.Dataset, make_batch: Callable[[tf.Tensor], Any], *parts: Any
) -> tf.data.Dataset:
    """Returns the dataset of the batches that `make_batch` makes with a source and the like."""
    if all(part is None or type(part).__module__.startswith("tfdist.") for part in parts):
        # To convert functions takes half a second; only a user's may have Python's `if` on tensors.
        make_batch = tf.autograph.experimental.do_not_convert(make_batch)
    dataset = numbers.map(make_batch, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
    return set_options(dataset).prefetch(tf.data.AUTOTUNE)
