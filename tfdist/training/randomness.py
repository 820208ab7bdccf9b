"""Random layers: what a row of the global batch draws does not depend on who computes it.

Keras's random numbers are pure functions of a layer's seed state and of the shape that is asked
for. Replicas hold the same state, so that each of them would draw for its first row what the
first one draws for the first row of the global batch. TensorFlow's generator counts in blocks:
here a replica starts its count where its rows begin in the tensor that one device would draw,
and draws exactly those rows.
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

from tfdist.internals import global_state, keras_random, random_ops
from tfdist.training.replacing import replaced

# All that `keras.random` and `tf.random.stateless_*` draw of these goes through here, and how
# many blocks of the generator (128 bits each) one block of results takes: a truncated normal
# number may need several tries, for which the kernel keeps 64 blocks a number.
_BLOCKS = {
    "stateless_random_uniform_v2": lambda block: 1,
    "stateless_random_uniform_int_v2": lambda block: 1,
    "stateless_random_uniform_full_int_v2": lambda block: 1,
    "stateless_random_normal_v2": lambda block: 1,
    "stateless_truncated_normal_v2": lambda block: 64 * block,
}
_BLOCK_BYTES = 16

Draws = dict[int, tuple[keras.random.SeedGenerator, tuple[bool, ...]]]
"""What generators have drawn, by their ids: of each draw, whether it was an ordered one."""


@dataclass(frozen=True)
class Rows:
    """One replica's rows of the global batch.

    Attributes:
      first: int64 scalar, the place of its first row.
      count: int64 scalar, how many there are.
    """

    first: tf.Tensor
    count: tf.Tensor


class RowDraws:
    """Lets replicas draw the random numbers of their own rows, while a step is traced.

    A tensor whose first dimension is the batch, or a multiple of it (`[batch * heads, ...]`), is
    drawn by rows: `hide_rows` sees to it that this is the dimension that is not known while the
    step is traced. Any other tensor, such as noise on a weight, is the same on all replicas, as
    it is without this.

    Attributes:
      seen: every generator that has drawn while a step was traced, by its id.
    """

    def __init__(self) -> None:
        # MirroredStrategy traces each replica in a thread of its own, by turns.
        self._of_thread = threading.local()
        self.seen: dict[int, keras.random.SeedGenerator] = {}

    @contextlib.contextmanager
    def intercept(self) -> Iterator[None]:
        """Stands in for TensorFlow's stateless random operations. Opened around all replicas.

        Keras 3.15 offers no place where a layer's draw could be told of its rows.
        """
        with contextlib.ExitStack() as stack:
            for name, count_blocks in _BLOCKS.items():
                operation = getattr(random_ops, name)
                draw = functools.partial(self._draw, operation, count_blocks)
                stack.enter_context(replaced(random_ops, name, draw))
            stack.enter_context(replaced(keras.random.SeedGenerator, "next", self._make_next()))
            stack.enter_context(_one_global_generator())
            yield

    @contextlib.contextmanager
    def of(self, rows: Rows | None) -> Iterator[None]:
        """Draws for these rows in this thread; with None, as Keras does."""
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
        """Draws for some of the rows that `of` was opened for.

        Args:
          first: int64 scalar, the place of the first among these rows.
          count: int64 scalar, how many there are.
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
        """Draws once more what this thread drew after a `mark`."""
        drawn = self._of_thread.draws
        self._of_thread.draws = dict(mark)
        try:
            yield
        finally:
            self._of_thread.draws = drawn

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Notes which generators draw, and changes nothing."""
        original = keras.random.SeedGenerator.next

        def draw_next(generator: keras.random.SeedGenerator, ordered: bool = True) -> tf.Tensor:
            self.seen[id(generator)] = generator
            return original(generator, ordered)

        with replaced(keras.random.SeedGenerator, "next", draw_next):
            yield

    def _draw(
        self,
        operation: Callable[..., tf.Tensor],
        count_blocks: Callable[[int], int],
        shape: Any,
        **arguments: Any,
    ) -> tf.Tensor:
        plain = operation(shape, **arguments)
        rows = getattr(self._of_thread, "rows", None)
        if rows is None or not plain.shape.rank or plain.shape[0] is not None:
            return plain
        shape = tf.cast(shape, tf.int64)
        size = tf.reduce_prod(shape)
        # What is not known may be something else than the batch.
        is_batch = tf.equal(shape[0] % rows.count, 0)
        before = tf.where(is_batch, rows.first * (size // rows.count), tf.zeros_like(size))
        block = max(1, min(4, _BLOCK_BYTES // plain.dtype.size))
        shift = before // block * count_blocks(block)
        arguments.pop("name", None)  # it names the plain one
        counter = tf.bitcast(arguments.pop("counter"), tf.int64)
        arguments["counter"] = tf.bitcast(
            counter + tf.concat([shift[None], tf.zeros_like(counter[1:])], 0), tf.uint64
        )
        per_row = plain.shape[1:].num_elements()
        if per_row is not None and per_row % block == 0:
            return operation(shape, **arguments)
        skipped = before % block
        numbers = operation((skipped + size)[None], **arguments)[skipped:]
        return tf.ensure_shape(tf.reshape(numbers, shape), plain.shape)

    def _make_next(self) -> Callable[..., tf.Tensor]:
        """Returns a `SeedGenerator.next` that writes the state when all layers are done.

        To write it lets the other replicas go first, in the middle of a layer: recurrent ones
        keep their dropout masks in themselves meanwhile, and mix up those of the replicas.
        """
        original = keras.random.SeedGenerator.next

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
    """Gives replicas the generator of this thread where no layer's is named.

    Keras keeps one a thread, and replicas have threads of their own. It is made when it is first
    asked for, as in Keras: its seed is one more of Python's random numbers.
    """
    name = keras_random.GLOBAL_SEED_GENERATOR
    known = global_state.get_global_attribute(name)

    def get() -> keras.random.SeedGenerator:
        nonlocal known
        if known is None:
            with tf.init_scope():
                known = keras.random.SeedGenerator()
            if hasattr(known.state.value, "_aggregation"):
                first = tf.VariableAggregation.ONLY_FIRST_REPLICA
                known.state.value._aggregation = first
        return known

    with replaced(keras_random, "global_seed_generator", get):
        yield
    if known is not None:
        global_state.set_global_attribute(name, known)


def _advance(generator: keras.random.SeedGenerator, drawn: Sequence[bool]) -> tf.Tensor:
    """Returns a generator's state after some draws, as Keras moves it on."""
    state = tf.convert_to_tensor(generator.state.value)
    for is_ordered, draws in itertools.groupby(drawn):
        count = len(list(draws))
        if is_ordered:
            state += tf.constant([0, count], state.dtype)
            continue
        for _ in range(count):
            state = (state + 1) * 5387 % 933199
    return state


def hide_rows(batch: Any) -> Any:
    """Returns a batch whose number of rows is not known while a step is traced.

    So a layer's draw that begins with the batch's dimension is told from any other.

    Args:
      batch: any structure of [rows, ...].
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
    """Creates Keras's global generator before a step is traced, in which workers cannot.

    Keras creates it when something first draws by it, seeded by Python's `random`. One that nothing
    has drawn by is gone afterwards, and `random` as before.
    """
    if global_state.get_global_attribute(keras_random.GLOBAL_SEED_GENERATOR) is not None:
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
            global_state.set_global_attribute(keras_random.GLOBAL_SEED_GENERATOR, None)
        elif random.getstate() == before:
            random.setstate(after)


def count_draws(
    model: keras.Model, generators: Sequence[keras.random.SeedGenerator], x_spec: Any
) -> list[int]:
    """Returns how far a training step moves each generator's state.

    Args:
      model: a built model.
      generators: of its layers.
      x_spec: structure of `tf.TensorSpec` of its inputs.
    """

    def draw(x: Any) -> list[tf.Tensor]:
        zeros = [(v, tf.zeros(v.shape, v.dtype)) for v in model.variables]
        with keras.StatelessScope(zeros, collect_losses=True) as scope:
            model(x, training=True) if model._call_has_training_arg else model(x)
        return [scope.get_current_value(generator.state) for generator in generators]

    if not generators:
        return []
    # Nothing but the states is computed: no data, and no operation that would check them.
    traced = tf.compat.v1.wrap_function(draw, [x_spec])
    return [int(state[1]) for state in traced.prune([], traced.structured_outputs)()]
