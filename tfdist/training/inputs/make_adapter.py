"""Builds the data adapter, a `DataAdapter`, for what `fit`, `evaluate` and `predict` accept."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf

from tfdist.aliases import KerasData, Nested
from tfdist.data.dataset_graph import describe_dataset, has_random_order
from tfdist.data.digests import BatchDigests
from tfdist.data.fingerprint import make_header
from tfdist.data.pipeline import (
    BatchAugmentation,
    make_eval_dataset,
    make_eval_reader,
    make_train_dataset,
    make_train_reader,
    steps_per_epoch,
)
from tfdist.data.source import ArraySource, Source, SparseSource
from tfdist.errors import TfdistError
from tfdist.internals import (
    NoneTensorSpec,
    array_data_adapter,
    array_slicing,
    make_class_weight_map_fn,
)
from tfdist.training.inputs.data_adapter import (
    SKIPPING,
    DataAdapter,
    find_place,
    place_batches,
    restore_missing,
)
from tfdist.training.inputs.example_order import ORDER_OF_SEED_0, ExampleOrder, draw_keras_order
from tfdist.training.inputs.python_data import make_python_adapter


def make_data_adapter(
    x: KerasData,
    y: KerasData = None,
    sample_weight: KerasData = None,
    *,
    global_batch_size: int,
    num_replicas: int,
    order: ExampleOrder = ORDER_OF_SEED_0,
    shuffle: bool | str = True,
    class_weight: dict[int, float] | None = None,
    augmentation: BatchAugmentation | None = None,
    micro_batches: int = 1,
) -> DataAdapter:
    """Returns the data adapter for anything that Keras's `fit` accepts, or for a tfdist source.

    Args:
      x: a `tfdist.data.Source`; arrays (a structure of them) with `y`; a `tf.data.Dataset`
        of global batches, or anything else that Keras accepts instead: a generator, a
        `keras.utils.PyDataset`, a PyTorch or Grain loader; or a function from a
        `tf.distribute.InputContext` to a dataset of per-replica batches.
      global_batch_size: examples per step, over all replicas; ignored for datasets and functions,
        which make their own batches.
      order: the order of training, and with it the seed of the augmentation.
      shuffle: whether training sees sources and arrays in a new order each epoch; `"batch"`
        changes the order within each batch of arrays only.
      class_weight: as in Keras: class -> the weight of its examples.
      augmentation: a seeded transformation of a source's examples, in training only.
      micro_batches: the parts in which a replica computes its examples in training.

    Raises:
      TfdistError: a source's batch is too small for the replicas or the micro-batches, or the kind
        of data or of class weights is unknown.
    """
    if not isinstance(class_weight, (Mapping, type(None))):
        raise TfdistError(
            f"`class_weight` is a {type(class_weight).__name__}. Give a dictionary from classes, "
            "which are whole numbers, to the weights of their examples."
        )
    if shuffle != "batch":
        shuffle = bool(shuffle)
    given = [
        name for name, part in (("y", y), ("sample_weight", sample_weight)) if part is not None
    ]
    reading = {
        "global_batch_size": global_batch_size,
        "seed": order.own_seed,
        "shuffle": shuffle,
        "augmentation": augmentation,
    }
    parts = {"num_replicas": num_replicas, "micro_batches": micro_batches}
    if isinstance(x, Source):
        _refuse(x, given)
        if shuffle == "batch":
            raise TfdistError(
                "Cannot shuffle the batches of a source one by one: its batches do not end with "
                "the epochs. Give shuffle=True, or arrays."
            )
        check_global_batch(global_batch_size, **parts)
        described = order.describe(of_arrays=False)
        return _make_source_adapter(x, {**reading, "ends_epochs": False}, described)
    if isinstance(x, tf.data.Dataset):
        _refuse(x, given)
        return _make_dataset_adapter(_weigh_classes(x, class_weight))
    if isinstance(x, tf.distribute.DistributedDataset):
        raise TfdistError(
            "Cannot read a dataset that is already distributed: its batches are those of replicas. "
            "Give the dataset itself, whose batches are global batches; it is distributed here."
        )
    if callable(x) and not hasattr(x, "__array__") and not isinstance(x, keras.utils.PyDataset):
        _refuse(x, given)
        return _make_function_adapter(x)
    if not array_data_adapter.can_convert_arrays((x, y, sample_weight)):
        return make_python_adapter(
            x, y, sample_weight, class_weight=class_weight, shuffle=shuffle, order=order
        )
    source, structure = _make_array_source(x, y, sample_weight, class_weight)
    if isinstance(source, SparseSource) and num_replicas > 1:
        raise TfdistError(
            "Cannot split sparse or ragged arrays over replicas. Convert them, for example with "
            "to_tensor() or tf.sparse.to_dense, or train on one device."
        )
    if micro_batches > 1:
        check_global_batch(min(global_batch_size, source.num_examples), **parts)
    described = order.describe(of_arrays=True)
    adapter = _make_source_adapter(source, {**reading, "ends_epochs": True}, described)
    return restore_missing(adapter, structure)


def check_order(x: KerasData) -> None:
    """Checks that data have the same order on every worker, and when they are read again."""
    if isinstance(x, tf.data.Dataset) and has_random_order(x):
        raise TfdistError(
            "Cannot use several workers, or continue a run, with a dataset that is shuffled or "
            "sampled without a seed: examples would be missed or repeated. Use "
            "shuffle(..., seed=...)."
        )


def check_global_batch(global_batch_size: int, *, num_replicas: int, micro_batches: int) -> None:
    """Checks that every micro-batch of every replica has at least one example."""
    if global_batch_size < num_replicas:
        raise TfdistError(
            f"Cannot split a global batch of {global_batch_size} over {num_replicas} replicas. "
            f"Give `global_batch_size={num_replicas}` or more, or fewer `devices`."
        )
    rows = global_batch_size // num_replicas
    if rows < micro_batches:
        raise TfdistError(
            f"Cannot split a replica's {rows} of {global_batch_size} examples into "
            f"{micro_batches} micro-batches. Give `micro_batches={rows}` or fewer, or "
            f"`global_batch_size={num_replicas * micro_batches}` or more."
        )


def _refuse(x: KerasData, given: list[str]) -> None:
    if given:
        raise TfdistError(
            f"Cannot use {' and '.join(given)} with a {type(x).__name__}, whose elements must "
            "hold all data. Make its elements (x, y) or (x, y, sample_weight)."
        )


def _is_dense(*data: Any) -> bool:
    """Returns whether arrays are dense, so that replicas can share them."""
    leaves = [leaf for leaf in keras.tree.flatten(data) if leaf is not None]
    return not any(
        isinstance(leaf, (tf.SparseTensor, tf.RaggedTensor)) or hasattr(leaf, "tocoo")
        for leaf in leaves
    )


def _make_array_source(
    x: KerasData, y: KerasData, sample_weight: KerasData, class_weight: Mapping[int, float] | None
) -> tuple[ArraySource | SparseSource, Any]:
    """Returns a source of the arrays, and their structure if some are missing, or else None."""
    try:
        adapter = array_data_adapter.ArrayDataAdapter(
            x, y, sample_weight=sample_weight, class_weight=class_weight
        )
    except (ValueError, IndexError, KeyError) as error:
        raise TfdistError(" ".join(str(error).split()) or "Cannot train without data.") from error
    if y is None and sample_weight is not None:
        raise TfdistError("Cannot weight examples without labels: give y with sample_weight.")
    arrays = array_slicing.convert_to_sliceable(adapter._inputs, target_backend="tensorflow")
    arrays = keras.tree.lists_to_tuples(arrays)
    structure = None
    leaves = keras.tree.flatten(arrays)
    if any(leaf is None for leaf in leaves):  # those of an optional input
        structure, arrays = arrays, tuple(leaf for leaf in leaves if leaf is not None)
    if _is_dense(x, y, sample_weight):
        return ArraySource.from_arrays(arrays), structure
    return SparseSource(num_examples=adapter._num_samples, arrays=arrays), structure


def _make_source_adapter(
    source: Source | SparseSource, reading: dict[str, Any], order: dict[str, Any]
) -> DataAdapter:
    global_batch_size = reading["global_batch_size"]

    @functools.cache  # only training needs it
    def find_reading() -> dict[str, Any]:
        if not reading["shuffle"] or order.get("by") != "keras":
            return reading
        chosen = draw_keras_order(
            source.num_examples, global_batch_size, reading["shuffle"], order["seed"]
        )
        return {**reading, "shuffle": chosen}

    @functools.cache
    def make_reader() -> Callable[[tf.Tensor], Any]:
        with tf.init_scope():  # not in the graph that asks first
            return make_train_reader(source, **find_reading())

    @functools.cache  # every epoch's validation reads the same dataset
    def make_eval(num_replicas: int, replicas: range) -> tf.data.Dataset:
        return make_eval_dataset(
            source,
            global_batch_size=global_batch_size,
            num_replicas=num_replicas,
            replicas=replicas,
        )

    return DataAdapter(
        batch_spec=source.element_spec
        if isinstance(source, SparseSource)
        else _add_batch_dimension(source.element_spec),
        num_steps=steps_per_epoch(source.num_examples, global_batch_size),
        num_examples=source.num_examples,
        make_train=lambda context, start_step: make_train_dataset(
            source, start_step=start_step, with_places=True, **find_reading(), **find_place(context)
        ),
        make_eval=lambda context: make_eval(**find_place(context)),
        read_train=lambda step: make_reader()(step),
        read_eval=make_eval_reader(source, global_batch_size=global_batch_size),
        make_fingerprint=lambda: {
            **source.make_fingerprint(),
            "order": _describe_order(reading, order),
        },
    )


def _describe_order(reading: dict[str, Any], order: dict[str, Any]) -> dict[str, Any]:
    """Returns what determines the order of a source's examples, and their augmentation."""
    is_seeded = reading["shuffle"] or reading["augmentation"] is not None
    return {"shuffle": reading["shuffle"], **(order if is_seeded else {})}


def _weigh_classes(
    dataset: tf.data.Dataset, class_weight: Mapping[int, float] | None
) -> tf.data.Dataset:
    return dataset.map(make_class_weight_map_fn(class_weight)) if class_weight else dataset


def _make_dataset_adapter(dataset: tf.data.Dataset) -> DataAdapter:
    cardinality = int(dataset.cardinality())
    is_infinite = cardinality == tf.data.INFINITE_CARDINALITY
    digests = BatchDigests()

    def count() -> int:
        return int(dataset.reduce(tf.constant(0, tf.int64), lambda count, *_: count + 1))

    def read_from(step: int) -> tf.data.Dataset:
        # Keras does not read past a known end, and a cache is complete only once something does.
        left = dataset.take(cardinality) if cardinality > 0 else dataset
        return left.skip(step) if step else left

    @functools.lru_cache(maxsize=2)  # to trace the division of batches takes time
    def make_pass(step: int, num_replicas: int, replicas: range) -> tf.data.Dataset:
        return place_batches(read_from(step), digests, num_replicas=num_replicas, replicas=replicas)

    def drop_pass() -> None:
        iter(dataset)

    def read_passes(passes: int, drops_between: bool) -> None:
        for _ in range(passes):
            count()
            if drops_between and cardinality > 0:
                drop_pass()

    return DataAdapter(
        batch_spec=keras.tree.map_structure(
            lambda spec: None if isinstance(spec, NoneTensorSpec) else spec, dataset.element_spec
        ),
        num_steps=cardinality if cardinality >= 0 else None,
        num_examples=None,
        count_steps=None if is_infinite else count,
        begins_anew=not is_infinite,
        read_passes=read_passes,
        drop_pass=drop_pass,
        make_train=lambda context, start_step: make_pass(start_step, **find_place(context)),
        make_eval=lambda context: make_pass(0, **find_place(context)),
        make_fingerprint=lambda: {
            **make_header(
                kind="dataset", num_examples=max(cardinality, 0), element_spec=dataset.element_spec
            ),
            **describe_dataset(dataset),
        },
        # If its length is known, nothing is read past its end.
        is_endless=cardinality > 0 or is_infinite,
        how_to_continue=SKIPPING,
        digests=digests,
    )


def _make_function_adapter(
    function: Callable[[tf.distribute.InputContext], tf.data.Dataset],
) -> DataAdapter:
    spec = function(tf.distribute.InputContext()).element_spec

    def add_place(*arguments: Any) -> Any:
        return (arguments if isinstance(spec, tuple) else arguments[0]), ()

    def make_train(context: tf.distribute.InputContext, start_step: int) -> tf.data.Dataset:
        local_replicas = len(find_place(context)["replicas"])
        return function(context).repeat().skip(start_step * local_replicas).map(add_place)

    return DataAdapter(
        batch_spec=spec,
        num_steps=None,
        num_examples=None,
        make_train=make_train,
        make_eval=lambda context: function(context).map(add_place),
        how_to_continue=SKIPPING,
    )


def _add_batch_dimension(spec: Nested[tf.TypeSpec]) -> Any:
    return keras.tree.map_structure(
        lambda leaf: tf.TensorSpec([None, *leaf.shape], leaf.dtype), spec
    )


def find_batch_size(batch_size: int | None, x: KerasData, steps_per_epoch: int | None) -> int:
    """Returns the number of examples per step, chosen as in Keras."""
    if batch_size:
        return batch_size
    if not steps_per_epoch or steps_per_epoch < 0:
        return 32
    is_array = hasattr(_find_array(x), "shape")
    return -(-count_rows(x) // steps_per_epoch) if is_array else 32


def count_rows(x: KerasData) -> int:
    """Returns the number of examples in arrays."""
    leaf = _find_array(x)
    if not getattr(leaf, "shape", ()):
        raise TfdistError(
            f"Cannot use a {type(leaf).__name__} as a batch. Give arrays or tensors whose first "
            "dimension is the batch."
        )
    return int(leaf.shape[0])


def _find_array(x: KerasData) -> Any:
    """Returns the first array; an optional input may be missing."""
    return next((leaf for leaf in keras.tree.flatten(x) if leaf is not None), None)
