"""The data adapter: batches for the replicas of a strategy, from any kind of data."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdist.aliases import Batch, BatchIterator, Nested
from tfdist.data.digests import BatchDigests
from tfdist.data.gpu_batches import has_dense_numbers, iterate_on_gpu, pin_memory, read_element
from tfdist.data.rows import check_batches, split_batch, split_batches
from tfdist.data.tf_data import set_options
from tfdist.internals import PerReplica, multi_device_iterator_ops
from tfdist.replacing import find_function, replaced

SKIPPING = ", skipping the batches seen before: they are read again"
_CREATE = "_create_device_dataset"
# Strategies that can run a step on values that are not from their own iterators.
_DIRECT = (
    tf.distribute.OneDeviceStrategy,
    tf.distribute.MirroredStrategy,
    tf.distribute.MultiWorkerMirroredStrategy,
    tf.distribute.experimental.CentralStorageStrategy,
)

Place = Callable[[tf.distribute.InputContext], tf.distribute.InputContext]


@dataclass(frozen=True)
class DataAdapter:
    """A data adapter: batches for a strategy, from any data that the user may pass.

    The elements of its datasets are pairs of a batch and its position in the global batch, as
    `split_batches` returns them; the position is `()` where only all replicas together know it.

    Attributes:
      batch_spec: structure of `tf.TensorSpec` for a batch, `x`, `(x, y)` or
        `(x, y, sample_weight)`.
      make_train: (context, start step) -> a dataset of per-replica batches.
      make_eval: context -> a finite dataset of per-replica batches.
      is_endless: whether `make_train` never ends.
      begins_anew: whether each pass over the data starts a new dataset, as Keras does with a
        `tf.data.Dataset`; else one dataset continues from epoch to epoch.
      read_passes: (count, drops_between) -> None; reads that many whole passes, and calls
        `drop_pass` after each if `drops_between`. For data that begin anew.
      drop_pass: starts a pass and drops it, as Keras 3.15 does after each pass of known length.
        This changes the order of a shuffled dataset.
      read_before: the passes that an earlier process read, and the batches that it read of the next
        one, where a checkpoint says so.
      drops_between: whether `fit` also drops a pass between two passes, which Keras does unless
        the user gave `steps_per_epoch`.
      is_python: whether Python reads the data. A pass is then only opened when its first epoch
        begins.
      on_epoch_begin, on_epoch_end: the hooks of the user's data, called around each epoch; the
        second one also before `fit` and `evaluate`, as in Keras.
      replay: (epochs, steps per epoch) -> None; repeats the hooks and reads of these epochs, before
        a run continues.
      reorder: `ExampleOrder` -> the same data in this order, and their fingerprint; None if a
        continued run must have the order of these data.
      with_places: whether iterators yield the pairs, rather than the batches alone.
      how_to_continue: the part of a continued run's message that says how it reaches its step.
      read_train: step -> its global batch, in any graph; None if only a dataset can provide it.
      read_eval: step -> its global batch of an evaluation, likewise.
      count_steps: reads the data to count the batches of an epoch; None if that would never end.
      first_step: the step at which the data begin; not 0 with an `initial_epoch`.
      is_single: whether there is only one batch, of one of Keras's methods for single batches.
      digests: those of the batches that this process has read, where every worker reads the global
        batches; None where each reads its own part only.
    """

    batch_spec: Any
    num_steps: int | None
    num_examples: int | None
    make_train: Callable[[tf.distribute.InputContext, int], tf.data.Dataset]
    make_eval: Callable[[tf.distribute.InputContext], tf.data.Dataset]
    is_endless: bool = True
    first_step: int = 0
    is_single: bool = False
    how_to_continue: str = ""
    read_train: Callable[[tf.Tensor], Any] | None = None
    read_eval: Callable[[tf.Tensor], Any] | None = None
    count_steps: Callable[[], int] | None = None
    make_fingerprint: Callable[[], dict[str, Any]] = dict
    begins_anew: bool = False
    read_passes: Callable[[int, bool], None] = lambda count, drops_between: None
    drop_pass: Callable[[], None] = lambda: None
    drops_between: bool = True
    read_before: tuple[int, int] | None = None
    is_python: bool = False
    on_epoch_begin: Callable[[], None] = lambda: None
    on_epoch_end: Callable[[], None] = lambda: None
    replay: Callable[[int, int], None] = lambda epochs, steps_per_epoch: None
    with_places: bool = True
    digests: BatchDigests | None = None
    reorder: Callable[[Any], tuple["DataAdapter", dict[str, Any]]] | None = None
    _opened: list[int] = field(default_factory=list)
    _evaluated: list[int] = field(default_factory=lambda: [0])

    def begin_at(self, first_step: int) -> "DataAdapter":
        """Returns the adapter with another `first_step`."""
        read, shift = self.read_train, first_step - self.first_step
        moved = None if read is None else lambda step: read(step - shift)
        return replace(self, first_step=first_step, read_train=moved)

    def read_single(self, *, of_training: bool) -> Any:
        """Returns the batch of one of Keras's methods for single batches, without a dataset.

        To make a dataset takes far longer than a small step. Returns None if only a dataset can
        provide the batch, or if there are several.
        """
        read = self.read_train if of_training else self.read_eval
        return read(tf.zeros([], tf.int64)) if self.is_single and read else None

    def iterate_train(
        self, strategy: tf.distribute.Strategy, *, start_step: int, place: Place = lambda c: c
    ) -> Any:
        """Returns an iterator, for `take_next`, that starts with global batch `start_step`.

        Args:
          place: input context of the strategy -> input context among the pipelines of all workers.
        """
        dataset_step = self.open_train(start_step)
        return self._distribute(strategy, lambda c: self._make_train(place(c), dataset_step))

    def open_train(self, start_step: int) -> int:
        """Returns the step for `make_train` at which this process starts to read.

        The first call reads the passes that an earlier process has already read.
        """
        start_step -= self.first_step
        if not self.begins_anew:
            return start_step
        if self._opened:
            self._opened.append(self._opened[-1] + 1)
            return 0
        # While the length of a pass is unknown, the first one is not over.
        at_start = divmod(start_step, self.num_steps) if self.num_steps else (0, start_step)
        passes, step = self.read_before or at_start
        self._opened.append(passes)
        self.read_passes(passes, self.drops_between)
        return step

    @property
    def pass_number(self) -> int:
        """The number of the pass that was opened last, or will be opened first, counted from 0."""
        return self._opened[-1] if self._opened else (self.read_before or (0, 0))[0]

    @property
    def num_opened(self) -> int:
        """The number of passes that were opened, in this process and before."""
        return self.pass_number + bool(self._opened)

    @property
    def num_evaluated(self) -> int:
        """The number of passes of evaluations that were begun, in this process and before."""
        return self._evaluated[0]

    def count_evaluated(self) -> None:
        """Counts a pass that an evaluation begins."""
        self._evaluated[0] += 1

    def drop_evaluated(self) -> None:
        """Begins and drops a pass, as Keras does at the end of an evaluation."""
        self.count_evaluated()
        self.drop_pass()

    def replay_evaluated(self, count: int) -> None:
        """Begins and drops passes until there are so many.

        Each changes the order of a shuffled dataset, which may also be that of the training data.
        """
        while self.num_evaluated < count:
            self.drop_evaluated()

    def read_to_end(self) -> "DataAdapter":
        """Returns the adapter whose passes end when a request finds no batch, of unknown length."""
        if self.begins_anew or not self.num_steps:
            return replace(self, num_steps=None, is_endless=self.is_endless and not self.num_steps)
        length = self.num_steps

        def make_pass(context: tf.distribute.InputContext, step: int) -> tf.data.Dataset:
            replicas = find_place(context)["replicas"]
            dataset = self.make_train(context, adapter.pass_number * length + step)
            return dataset.take((length - step) * len(replicas))

        adapter = replace(
            self,
            num_steps=None,
            is_endless=False,
            begins_anew=True,
            make_train=make_pass,
            read_train=None,
            _opened=[],
        )
        return adapter

    def is_read(self, step: int) -> bool:
        """Returns whether a pass over the data ends right before a step, and a new one begins."""
        step -= self.first_step
        return self.begins_anew and bool(self.num_steps) and step % (self.num_steps or 1) == 0

    def iterate_elements(
        self,
        strategy: tf.distribute.Strategy,
        elements: Sequence[Any] = (),
        *,
        of_training: bool = True,
        place: Place = lambda c: c,
    ) -> Any:
        """Returns an iterator, for `take_next`, over given elements.

        They may be those of another iterator. It reads none of the user's data.

        Args:
          strategy, place: see `iterate_train`.
          of_training: whether it replaces an iterator of `iterate_train`, else of `iterate_eval`.
        """

        def make(context: tf.distribute.InputContext) -> tf.data.Dataset:
            context = place(context)
            like = self._make_train(context, 0) if of_training else self._make_eval(context)
            dataset = like.take(0)
            for element in elements:
                dataset = dataset.concatenate(_make_one(element, like.element_spec))
            return self._assert_endless(dataset) if of_training else dataset

        return self._distribute(strategy, make)

    def iterate_eval(self, strategy: tf.distribute.Strategy, place: Place = lambda c: c) -> Any:
        """Returns an iterator over an epoch; for the arguments see `iterate_train`."""
        self.count_evaluated()
        return self._distribute(strategy, lambda context: self._make_eval(place(context)))

    def _distribute(
        self, strategy: tf.distribute.Strategy, make_dataset: Callable[..., Any]
    ) -> Any:
        """Returns an iterator over a dataset, for `take_next` if it is one of pairs."""
        made = []

        def make(context: tf.distribute.InputContext) -> tf.data.Dataset:
            dataset = make_dataset(context)
            made.append(pin_memory(dataset) if is_on(strategy, "GPU") else dataset)
            return made[-1]

        distributed = strategy.distribute_datasets_from_function(make)
        # Where only all replicas together know the position, some may have no element.
        is_single = strategy.num_replicas_in_sync == 1
        is_sure = is_single or tf.nest.flatten(made[0].element_spec[1])
        if is_sure and is_on(strategy, "CPU"):
            return iter(made[0])  # nothing has to be copied to devices
        is_one_gpu = is_single and is_on(strategy, "GPU")
        if is_one_gpu and self.with_places and has_dense_numbers(made[0]):
            return iterate_on_gpu(made[0], strategy.extended.worker_devices[0])
        # The datasets with which TensorFlow copies batches to the devices accept no options.
        if not hasattr(multi_device_iterator_ops, _CREATE):
            return iter(distributed)
        create = find_function(multi_device_iterator_ops, _CREATE)

        def create_untuned(*arguments: Any) -> tf.data.Dataset:
            return set_options(create(*arguments))

        with replaced(multi_device_iterator_ops, _CREATE, create_untuned):
            return iter(distributed)

    def _make_train(self, context: tf.distribute.InputContext, start_step: int) -> tf.data.Dataset:
        return self._assert_endless(self._drop_places(self.make_train(context, start_step)))

    def _make_eval(self, context: tf.distribute.InputContext) -> tf.data.Dataset:
        return self._drop_places(self.make_eval(context))

    def _drop_places(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        return dataset if self.with_places else dataset.map(lambda batch, place: batch)

    def _assert_endless(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        if not self.is_endless:
            return dataset
        # So TensorFlow need not check before each step whether a batch is left.
        return dataset.apply(tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY))


def place_batches(
    dataset: tf.data.Dataset, digests: BatchDigests, *, num_replicas: int, replicas: range
) -> tf.data.Dataset:
    """Returns a dataset of (batch, place) for some of the replicas; notes shared batches."""
    if num_replicas == 1:
        # A single replica gets whole batches, of any structure.
        def add_place(*arguments: Any) -> Any:
            batch = arguments if isinstance(dataset.element_spec, tuple) else arguments[0]
            return batch, ()

        return set_options(dataset.map(add_place)).prefetch(tf.data.AUTOTUNE)
    check_batches(dataset.element_spec)
    if len(replicas) < num_replicas:
        dataset = digests.watch(dataset)
    return split_batches(dataset, num_replicas=num_replicas, replicas=replicas)


def restore_missing(adapter: DataAdapter, structure: Nested[tf.Tensor] | None) -> DataAdapter:
    """Returns the adapter whose batches have a structure, with None where it has None.

    Args:
      adapter: an adapter of flat batches: what the structure has besides.
      structure: the structure; None for that of the adapter.
    """
    if structure is None:
        return adapter

    def restore(batch: Batch) -> Any:
        present = iter(batch)
        return keras.tree.map_structure(
            lambda leaf: None if leaf is None else next(present), structure
        )

    def wrap(make: Callable[..., tf.data.Dataset]) -> Callable[..., tf.data.Dataset]:
        return lambda *arguments: make(*arguments).map(lambda b, place: (restore(b), place))

    def wrap_read(read: Callable[..., Any] | None) -> Callable[..., Any] | None:
        return None if read is None else lambda step: restore(read(step))

    return replace(
        adapter,
        batch_spec=restore(adapter.batch_spec),
        make_train=wrap(adapter.make_train),
        make_eval=wrap(adapter.make_eval),
        read_train=wrap_read(adapter.read_train),
        read_eval=wrap_read(adapter.read_eval),
    )


def find_place(context: tf.distribute.InputContext) -> dict[str, Any]:
    """Returns the number of replicas, and which of them an input pipeline feeds."""
    local = context.num_replicas_in_sync // context.num_input_pipelines
    first = context.input_pipeline_id * local
    return {
        "num_replicas": context.num_replicas_in_sync,
        # Processes may have different numbers of logical replicas.
        "replicas": getattr(context, "replicas", range(first, first + local)),
    }


def _make_one(element: Nested[tf.Tensor], spec: Nested[tf.TypeSpec]) -> tf.data.Dataset:
    """Returns a dataset of one element, whose static shapes are exactly those of a spec."""

    def hide(*leaves: Any) -> Any:
        return tf.nest.pack_sequence_as(
            spec,
            [
                tf.raw_ops.PlaceholderWithDefault(input=leaf, shape=leaf_spec.shape)
                if isinstance(leaf_spec, tf.TensorSpec)
                else leaf
                for leaf, leaf_spec in zip(leaves, tf.nest.flatten(spec), strict=True)
            ],
        )

    return tf.data.Dataset.from_tensors(tuple(tf.nest.flatten(element))).map(hide)


class Given(NamedTuple):
    """The only element of an iterator, for functions: no dataset has to be made for it."""

    element: Any


def take_next(strategy: tf.distribute.Strategy, iterator: BatchIterator) -> Any:
    """Returns the next element of an iterator of a `DataAdapter`, for each local replica."""
    if isinstance(iterator, Given):
        return iterator.element
    if strategy.num_replicas_in_sync == 1:
        return read_element(next(iterator))
    if not isinstance(iterator, tf.data.Iterator):
        return next(iterator)
    return _join([next(iterator) for _ in strategy.extended.worker_devices])


def can_give(strategy: tf.distribute.Strategy) -> bool:
    """Returns whether a step can run on a `Given`."""
    return isinstance(strategy, _DIRECT) or strategy.num_replicas_in_sync == 1


def give_parts(batch: Batch, *, num_replicas: int, replicas: range) -> Given:
    """Returns a batch of eager tensors, divided over a process's replicas, for `take_next`."""
    if num_replicas == 1:
        return Given((batch, ()))
    return Given(_join(split_batch(batch, num_replicas=num_replicas, replicas=replicas)))


def _join(elements: Sequence[Any]) -> Any:
    if len(elements) == 1:
        return elements[0]
    return tf.nest.map_structure(
        lambda *leaves: None if leaves[0] is None else PerReplica(leaves), *elements
    )


def is_on(strategy: tf.distribute.Strategy, kind: str) -> bool:
    """Returns whether all of this process's replicas are on devices of a kind, such as `GPU`."""
    return isinstance(strategy, _DIRECT) and all(
        f":{kind}:" in device for device in strategy.extended.worker_devices
    )
