"""The data adapter for data that only Python can read: generators, `PyDataset`s, loaders."""

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.aliases import Batch, KerasData
from tfdist.data.digests import BatchDigests
from tfdist.data.fingerprint import make_header
from tfdist.errors import TfdistError
from tfdist.internals import data_adapter_utils, data_adapters
from tfdist.training.inputs.data_adapter import (
    SKIPPING,
    DataAdapter,
    find_place,
    place_batches,
    restore_missing,
)
from tfdist.training.inputs.example_order import ExampleOrder


def make_python_adapter(
    x: KerasData,
    y: KerasData,
    sample_weight: KerasData,
    *,
    class_weight: dict[int, float] | None,
    shuffle: bool | str,
    order: ExampleOrder,
) -> DataAdapter:
    """Returns the data adapter for a generator, a `keras.utils.PyDataset` or a loader.

    Args:
      shuffle: whether training reads the batches of a `PyDataset` in a new order each pass. As in
        Keras, other data, and those without a length, keep their order.
    """
    keras_adapter = _make_keras_adapter(x, y, sample_weight, class_weight)
    spec = _drop_missing(keras_adapter.get_tf_dataset().element_spec)
    structure = None
    if any(map(_is_missing, keras.tree.flatten(spec))):  # those of an optional input
        structure = keras.tree.map_structure(lambda s: None if _is_missing(s) else s, spec)
        spec = tuple(part for part in keras.tree.flatten(structure) if part is not None)

    num_batches = keras_adapter.num_batches
    hooks = x if isinstance(x, keras.utils.PyDataset) else keras_adapter
    is_shuffled = bool(shuffle) and hooks is x and bool(num_batches)
    # A `PyDataset` may change its length; Keras asks for it when `fit` begins, and in each pass.

    def read(number: int | None = None) -> Iterator[Any]:
        """Yields the batches of a pass, in the order of training's pass `number` if given."""
        source = keras_adapter
        if hooks is x:  # threads and processes that read ahead belong to one pass
            data, by_keras = x, False
            if is_shuffled and number is not None:
                by_keras = order.by_python
                if not by_keras:
                    rng = np.random.default_rng([order.own_seed, number])
                    data = _Reordered(x, rng.permutation(x.num_batches))
            source = _make_keras_adapter(data, y, sample_weight, class_weight, shuffle=by_keras)
        try:
            # Not the dataset: TensorFlow hangs if a dataset reads another one in Python.
            for batch in source.get_numpy_iterator():
                yield _list_parts(batch) if structure else _to_tensors(batch)
        finally:
            if getattr(source, "enqueuer", None) is not None:
                source.enqueuer.stop()

    def replay(epochs: int, steps_per_epoch: int) -> None:
        batches: Iterator[Any] = iter(())
        numbers = itertools.count()
        for _ in range(epochs):
            hooks.on_epoch_begin()
            for _ in range(steps_per_epoch if num_batches else 0):
                if next(batches, None) is None:
                    batches = read(next(numbers))
                    next(batches)
            hooks.on_epoch_end()

    def make_pass(
        context: tf.distribute.InputContext, number: int | None = None, step: int = 0
    ) -> tf.data.Dataset:
        def read_pass() -> Iterator[Any]:
            is_shared = context.num_input_pipelines > 1 and not num_batches
            return digests.note_end(read(number), skipped=step) if is_shared else read(number)

        batches = tf.data.Dataset.from_generator(read_pass, output_signature=spec).skip(step)
        return place_batches(batches, digests, **find_place(context))

    described = {"shuffle": True, **order.describe(of_arrays=False)}
    digests = BatchDigests()
    adapter = DataAdapter(
        batch_spec=spec,
        num_steps=num_batches,
        num_examples=None,
        make_train=lambda context, step: make_pass(context, adapter.pass_number, step),
        make_eval=make_pass,
        digests=digests,
        is_endless=False,
        begins_anew=True,
        how_to_continue=SKIPPING,
        is_python=True,
        on_epoch_begin=hooks.on_epoch_begin,
        on_epoch_end=hooks.on_epoch_end,
        replay=replay,
        make_fingerprint=lambda: {
            **make_header(kind="batches", num_examples=num_batches or 0, element_spec=spec),
            **({"order": described} if is_shuffled else {}),
        },
    )
    return restore_missing(adapter, structure)


class _Reordered(keras.utils.PyDataset):
    """The batches of a `PyDataset` in another order, read by as many threads or processes."""

    def __init__(self, data: keras.utils.PyDataset, order: np.ndarray):
        super().__init__(
            workers=data.workers,
            use_multiprocessing=data.use_multiprocessing,
            max_queue_size=data.max_queue_size,
        )
        self._data = data
        self._order = order

    @property
    def num_batches(self) -> int:
        return len(self._order)

    def __getitem__(self, index: int) -> Any:
        return self._data[int(self._order[index])]


def _make_keras_adapter(
    x: KerasData,
    y: KerasData,
    sample_weight: KerasData,
    class_weight: Mapping[int, float] | None,
    *,
    shuffle: bool = False,
) -> Any:
    try:
        return data_adapters.get_data_adapter(
            x, y, sample_weight, class_weight=class_weight, shuffle=shuffle
        )
    except ValueError as error:
        raise TfdistError(" ".join(str(error).split())) from error


def _drop_missing(batch: Batch) -> Any:
    """Returns a batch, or its spec, without the labels and weights that are None."""
    while isinstance(batch, tuple) and _is_missing(batch[-1]):
        batch = batch[:-1]
    return batch


def _list_parts(batch: Batch) -> tuple[Any, ...]:
    """Returns the parts of a batch that are not missing."""
    return tuple(part for part in keras.tree.flatten(_to_tensors(batch)) if part is not None)


def _to_tensors(batch: Batch) -> Any:
    return keras.tree.map_structure(_to_tensor, _drop_missing(batch))


def _to_tensor(part: object) -> Any:
    """Converts a sparse matrix of SciPy, as Keras does; returns anything else as it is."""
    if data_adapter_utils.is_scipy_sparse(part):
        return data_adapter_utils.scipy_sparse_to_tf_sparse(part)
    return part


def _is_missing(part: object) -> bool:
    return part is None or isinstance(part, tf.OptionalSpec)
