"""Random layers: the numbers drawn for an example do not depend on the replica that computes it.

Keras's random numbers are pure functions of a layer's seed state and of the requested shape. All
replicas hold the same state, so each of them would draw for its first example what the first
replica draws for the first example of the global batch. TensorFlow's generator counts in blocks:
here, a replica starts its count where its examples begin in the tensor that one device would
draw, and draws exactly the numbers of those examples.
"""

import contextlib
import functools
import itertools
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from tfdist.aliases import Batch, Nested
from tfdist.errors import TfdistError
from tfdist.internals import (
    GLOBAL_SEED_GENERATOR,
    NoneTensorSpec,
    global_state,
    keras_random,
    random_ops,
)
from tfdist.replacing import find_function, replaced
from tfdist.training.replicas import random_numbers

# The operations through which `keras.random` and `tf.random.stateless_*` draw, and how many
# blocks of the generator (128 bits each) one block of results takes: a truncated normal number
# may need several tries, for which the kernel reserves 64 blocks per number.
_BLOCKS = {
    "stateless_random_uniform_v2": lambda block: 1,
    "stateless_random_uniform_int_v2": lambda block: 1,
    "stateless_random_uniform_full_int_v2": lambda block: 1,
    "stateless_random_normal_v2": lambda block: 1,
    "stateless_truncated_normal_v2": lambda block: 64 * block,
}
_BLOCK_BYTES = 16

# What draws the same numbers where XLA compiles.
_COMPILED = {
    "stateless_random_get_key_counter": random_numbers.get_key_counter,
    "stateless_random_get_alg": random_numbers.get_algorithm,
    "stateless_random_uniform_v2": random_numbers.draw_uniform,
    "stateless_random_uniform_int_v2": random_numbers.draw_integers,
    "stateless_random_normal_v2": random_numbers.draw_normal,
    "stateless_truncated_normal_v2": random_numbers.refuse_truncated,
}

Draws = dict[int, tuple[keras.random.SeedGenerator, tuple[bool, ...]]]
"""Id of a generator -> the generator, and for each of its draws whether it was ordered."""


@dataclass(frozen=True)
class Rows:
    """One replica's examples of the global batch.

    Attributes:
      first: int64 scalar, the index of the first one.
      count: int64 scalar, how many there are.
    """

    first: tf.Tensor
    count: tf.Tensor


class RowDraws:
    """Makes replicas draw the random numbers of their own examples while a step is traced.

    A tensor whose first dimension is the batch, or a multiple of it (`[batch * heads, ...]`), is
    drawn by example: `hide_rows` makes this dimension unknown while the step is traced. Any other
    tensor, such as noise on a weight, is the same on all replicas, as in Keras.

    Attributes:
      seen: every generator that has drawn while a step was traced, by its id.
    """

    def __init__(self, *, is_compiled: bool = False) -> None:
        self._compiled = _COMPILED if is_compiled else {}
        # MirroredStrategy traces each replica in its own thread; the threads take turns.
        self._of_thread = threading.local()
        self.seen: dict[int, keras.random.SeedGenerator] = {}

    @contextlib.contextmanager
    def intercept(self) -> Iterator[None]:
        """Replaces TensorFlow's stateless random operations. Must be opened around all replicas.

        Keras 3.15 has no hook that could tell a layer's draw which examples it is for.
        """
        with contextlib.ExitStack() as stack:
            for name in {**_BLOCKS, **self._compiled}:
                draw: Any = self._compiled.get(name) or find_function(random_ops, name)
                if name in _BLOCKS:
                    draw = functools.partial(self._draw, draw, _BLOCKS[name])
                stack.enter_context(replaced(random_ops, name, draw))
            stack.enter_context(replaced(keras.random.SeedGenerator, "next", self._make_next()))
            stack.enter_context(_one_global_generator())
            yield

    @contextlib.contextmanager
    def of(self, rows: Rows | None) -> Iterator[None]:
        """Makes this thread draw for these examples; with None, it draws as in Keras."""
        draws: Draws = {}
        self._of_thread.rows, self._of_thread.draws = rows, draws
        try:
            yield
        finally:
            self._of_thread.rows = self._of_thread.draws = None
        for generator, drawn in draws.values():
            generator.state.assign(_advance(generator, drawn))

    @contextlib.contextmanager
    def narrowed(self, first: tf.Tensor, count: tf.Tensor) -> Iterator[None]:
        """Makes this thread draw for some of the examples that `of` was opened for.

        Args:
          first: int64 scalar, the index of the first one among the examples of `of`.
        """
        whole = self._of_thread.rows
        if whole is not None:
            self._of_thread.rows = Rows(whole.first + first, count)
        yield
        self._of_thread.rows = whole

    def mark(self) -> Draws:
        """Returns what this thread has drawn since `of` was opened."""
        return dict(self._of_thread.draws)

    @contextlib.contextmanager
    def again(self, mark: Draws) -> Iterator[None]:
        """Makes this thread draw again what it drew after a `mark`."""
        drawn = self._of_thread.draws
        self._of_thread.draws = dict(mark)
        try:
            yield
        finally:
            self._of_thread.draws = drawn

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Records which generators draw, without changing anything."""
        original = find_function(keras.random.SeedGenerator, "next")

        def draw_next(generator: keras.random.SeedGenerator, ordered: bool = True) -> tf.Tensor:
            self.seen[id(generator)] = generator
            return original(generator, ordered)

        with replaced(keras.random.SeedGenerator, "next", draw_next):
            yield

    def _draw(
        self,
        operation: Callable[..., tf.Tensor],
        count_blocks: Callable[[int], int],
        shape: tf.Tensor | Sequence[int],
        **arguments: Any,
    ) -> tf.Tensor:
        plain = operation(shape, **arguments)
        rows = getattr(self._of_thread, "rows", None)
        if rows is None or not plain.shape.rank or plain.shape[0] is not None:
            return plain
        shape = tf.cast(shape, tf.int64)
        size = tf.reduce_prod(shape)
        # The unknown dimension may be something other than the batch.
        is_batch = tf.equal(shape[0] % rows.count, 0)
        before = tf.where(is_batch, rows.first * (size // rows.count), tf.zeros_like(size))
        block = max(1, min(4, _BLOCK_BYTES // plain.dtype.size))
        shift = before // block * count_blocks(block)
        arguments.pop("name", None)  # taken by the plain operation
        counter = tf.bitcast(arguments.pop("counter"), tf.int64)
        arguments["counter"] = tf.bitcast(
            counter + tf.concat([shift[None], tf.zeros_like(counter[1:])], 0), tf.uint64
        )
        per_row = plain.shape[1:].num_elements()
        if per_row is not None and per_row % block == 0:
            return operation(shape, **arguments)
        # How many are drawn must not depend on the replica, because XLA needs their number.
        numbers = operation((size + block)[None], **arguments)
        numbers = tf.slice(numbers, (before % block)[None], size[None])
        return tf.ensure_shape(tf.reshape(numbers, shape), plain.shape)

    def _make_next(self) -> Callable[..., tf.Tensor]:
        """Returns a `SeedGenerator.next` that leaves the state to be written after all layers.

        Writing it would let the other replicas run in the middle of a layer. Recurrent layers
        store their dropout masks in attributes, and would mix up those of the replicas.
        """
        original = find_function(keras.random.SeedGenerator, "next")

        def draw_next(generator: keras.random.SeedGenerator, ordered: bool = True) -> tf.Tensor:
            self.seen[id(generator)] = generator
            draws = getattr(self._of_thread, "draws", None)
            if draws is None:
                return original(generator, ordered)
            _, drawn = draws.get(id(generator), (generator, ()))
            draws[id(generator)] = generator, (*drawn, ordered)
            return _advance(generator, drawn)

        return draw_next


@contextlib.contextmanager
def _one_global_generator() -> Iterator[None]:
    """Makes all replicas use the global generator of this thread.

    Keras keeps one per thread, and replicas have their own threads. It is created on first use, as
    in Keras, because its seed is the next number of Python's `random`.
    """
    name = GLOBAL_SEED_GENERATOR
    known = global_state.get_global_attribute(name)

    def get() -> keras.random.SeedGenerator:
        nonlocal known
        if known is None:
            with tf.init_scope():
                known = keras.random.SeedGenerator()
            _aggregate_first(known)
        return known

    with replaced(keras_random, "global_seed_generator", get):
        yield
    if known is not None:
        global_state.set_global_attribute(name, known)


def _aggregate_first(generator: keras.random.SeedGenerator) -> None:
    if hasattr(generator.state.value, "_aggregation"):
        generator.state.value._aggregation = tf.VariableAggregation.ONLY_FIRST_REPLICA


@contextlib.contextmanager
def moved_global_generator(strategy: tf.distribute.Strategy) -> Iterator[None]:
    """Lets a strategy draw from a generator of its own with the state of Keras's global one.

    If Keras's was created elsewhere: each replica would advance the generator of one device, and a
    generator of replicas cannot be used under another strategy. A strategy keeps its generator,
    which its compiled steps use.
    """
    known = global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)
    plain = tf.distribute.get_strategy()
    home: Any = strategy if strategy.num_replicas_in_sync > 1 else plain
    owner = known and (getattr(known.state.value, "distribute_strategy", None) or plain)
    if owner in (None, home, strategy):
        yield
        return
    generator = getattr(home, "_tfdist_global_generator", None)
    if generator is None:
        with strategy.scope():
            generator = keras.random.SeedGenerator(0)
        _aggregate_first(generator)
        home._tfdist_global_generator = generator
    generator.state.assign(known.state.numpy())
    global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, generator)
    try:
        yield
    finally:
        known.state.assign(generator.state.numpy())
        global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, known)


def _advance(generator: keras.random.SeedGenerator, drawn: Sequence[bool]) -> tf.Tensor:
    """Returns a generator's state after some draws, as Keras advances it."""
    state = tf.convert_to_tensor(generator.state.value)
    for is_ordered, draws in itertools.groupby(drawn):
        count = len(list(draws))
        if is_ordered:
            state += tf.constant([0, count], state.dtype)
            continue
        for _ in range(count):
            state = (state + 1) * 5387 % 933199
    return state


def hide_rows(batch: Batch) -> Any:
    """Returns a batch whose number of examples is unknown while a step is traced.

    This distinguishes draws whose first dimension is the batch from all others.

    Args:
      batch: any structure of [examples, ...].
    """
    return keras.tree.map_structure(
        lambda t: (
            tf.raw_ops.PlaceholderWithDefault(input=t, shape=[None, *t.shape[1:]])
            if isinstance(t, tf.Tensor) and t.shape.rank
            else t
        ),
        batch,
    )


def list_seed_generators(model: keras.Model) -> list[keras.random.SeedGenerator]:
    """Returns the generators of a model's layers, each once."""
    generators: dict[int, keras.random.SeedGenerator] = {}
    for layer in model._flatten_layers():
        generators |= {id(generator): generator for generator in layer._seed_generators}
    return list(generators.values())


@contextlib.contextmanager
def lend_global_generator() -> Iterator[None]:
    """Creates Keras's global generator before a step is traced, where workers cannot create it.

    Keras creates it on the first draw, with a seed from Python's `random`. If nothing draws from
    it, it is removed afterwards, and the state of `random` is as before.
    """
    if global_state.get_global_attribute(GLOBAL_SEED_GENERATOR) is not None:
        yield
        return
    before = random.getstate()
    generator = keras_random.global_seed_generator()
    after, unused = random.getstate(), generator.state.numpy()
    random.setstate(before)
    try:
        yield
    finally:
        if (generator.state.numpy() == unused).all():
            global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, None)
        elif random.getstate() == before:
            random.setstate(after)


def count_draws(
    model: keras.Model,
    generators: Sequence[keras.random.SeedGenerator],
    batch_spec: Nested[tf.TypeSpec],
    *,
    kind: str = "train",
) -> list[int]:
    """Returns how far a step advances each generator's state.

    Raises:
      TfdistError: a generator draws in no order, so that its draws cannot be counted.
    """
    if not generators:
        return []
    leaves = tf.nest.flatten(batch_spec)
    known = [
        isinstance(leaf, tf.TypeSpec) and not isinstance(leaf, NoneTensorSpec) for leaf in leaves
    ]

    def draw(*given: Any) -> list[tf.Tensor]:
        values = iter(given)
        batch = tf.nest.pack_sequence_as(
            batch_spec, [next(values) if is_known else None for is_known in known]
        )
        variables = [*model.variables, *model.metrics_variables]
        zeros = [(v, tf.zeros(v.shape, v.dtype)) for v in variables]
        with keras.StatelessScope(zeros, collect_losses=True) as scope:
            if kind == "test":
                model.test_step(batch)
            elif kind == "predict":
                model.predict_step(batch)
            else:
                x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
                model(x, training=True) if model._call_has_training_arg else model(x)
        return [scope.get_current_value(generator.state) for generator in generators]

    # Only the states are computed: neither data, nor operations that would check data.
    traced = tf.compat.v1.wrap_function(
        draw, [leaf for leaf, is_known in zip(leaves, known, strict=True) if is_known]
    )
    states = [state.numpy() for state in traced.prune([], traced.structured_outputs)()]
    if any(state[0] for state in states):
        raise TfdistError(
            "Cannot count what a SeedGenerator draws with next(ordered=False). Leave out "
            "`ordered`, or use another strategy."
        )
    return [int(state[1]) for state in states]
