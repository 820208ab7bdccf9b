"""The order in which training sees the examples of arrays, and the batches of a `PyDataset`.

A trainer's own `seed` gives an order that is a function of the seed and the epoch. Without one,
the order is Keras's, which follows `keras.utils.set_random_seed`: arrays have the same order in
each epoch, since Keras draws it from the same two seeds whenever it opens the data. If no seed was
set, Keras's order could not be repeated: it is then the order of seed 0.
"""

import functools
import warnings
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfdist.data.pipeline import MAX_SEED
from tfdist.internals import array_data_adapter, global_seed


@dataclass(frozen=True)
class ExampleOrder:
    """What decides the order.

    Attributes:
      seed: the seed; one that Keras uses may be any number.
      of_keras: whether it is the order that Keras has after `set_random_seed(seed)`.
      by_python: whether Python's own generator shuffles a `PyDataset`, as in Keras. That is the
        same order again only if one process reads it, from the beginning.
    """

    seed: int = 0
    of_keras: bool = False
    by_python: bool = False

    @property
    def own_seed(self) -> int:
        """The seed in the range that orders other than Keras's accept."""
        return self.seed % (MAX_SEED + 1) if self.of_keras else self.seed

    def describe(self, *, of_arrays: bool) -> dict[str, Any]:
        """Returns what a checkpoint records, ready for JSON."""
        is_keras_s = self.of_keras and of_arrays
        return {"seed": self.seed, "by": "keras"} if is_keras_s else {"seed": self.own_seed}


ORDER_OF_SEED_0 = ExampleOrder()


def find_order(seed: int | None, *, num_fits: int, by_python: bool) -> ExampleOrder:
    """Returns the order of a call of `fit`, after so many others."""
    keras_seed = global_seed()
    if seed is None and keras_seed is not None:
        return ExampleOrder(keras_seed, of_keras=True, by_python=by_python)
    seed = seed or 0
    return ExampleOrder((seed + num_fits) % MAX_SEED if num_fits else seed)


def read_order(recorded: dict[str, Any]) -> ExampleOrder:
    """Returns the order that `describe` has described."""
    return ExampleOrder(recorded["seed"], of_keras=recorded.get("by") == "keras")


@functools.lru_cache(maxsize=4)
def draw_keras_order(
    num_examples: int, batch_size: int, shuffle: bool | str, seed: int
) -> tf.Tensor:
    """Returns the order in which Keras reads arrays, int64 [num_examples], in every epoch.

    Keras's own dataset of the numbers of the examples is read, as if the seed were set.
    """

    # Without "batch", the order does not depend on the batches, so one holds all examples.
    size = batch_size if shuffle == "batch" else num_examples

    @tf.function(autograph=False)
    def read() -> tf.Tensor:
        tf.random.set_seed(seed)  # of this function only
        numbers = tf.range(num_examples, dtype=tf.int64)
        adapter = array_data_adapter.ArrayDataAdapter(numbers, batch_size=size, shuffle=shuffle)
        batches = adapter.get_tf_dataset().map(lambda batch: batch)
        if shuffle == "batch":
            batches = batches.unbatch().batch(num_examples)
        return batches.get_single_element()

    with tf.init_scope(), tf.device("CPU:0"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Seed .* from outer graph")  # as meant here
        return read.get_concrete_function()()  # without a warning for each new length
