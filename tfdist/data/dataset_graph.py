"""What the graph of a `tf.data.Dataset` says about its contents and its order."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import graph_pb2

from tfdist.data.fingerprint import hash_tensor

# Operation that draws -> which of its inputs hold its two seeds.
_SEEDS = {
    "RandomDataset": (0, 1),
    "RandomDatasetV2": (0, 1),
    "ShuffleDataset": (2, 3),
    "ShuffleDatasetV3": (2, 3),
    "ShuffleAndRepeatDataset": (2, 3),
    "ShuffleAndRepeatDatasetV2": (2, 3),
}
# Operation that selects or groups examples -> its name in Python, and where its numbers are.
_OPERATIONS = {
    "_BatchDataset": ("batch", ("_batch_size",)),
    "_ParallelBatchDataset": ("batch", ("_batch_size",)),
    "_RangeDataset": ("range", ("_start", "_stop", "_step")),
    "_ShardDataset": ("shard", ("_num_shards", "_index")),
    "_SkipDataset": ("skip", ("_count",)),
    "_TakeDataset": ("take", ("_count",)),
}


def describe_dataset(dataset: tf.data.Dataset) -> dict[str, Any]:
    """Returns what the graph of a dataset says about its contents and order, as JSON.

    It covers the tensors of which the dataset is made, or samples of large ones, the seeds and
    buffers of shuffling, and the numbers of `batch`, `range`, `shard`, `skip` and `take`. Of
    strings, only the part after the last `/` counts, so that files may move. It does not cover
    functions, the datasets in them, and files. Reads no element.

    >>> describe_dataset(tf.data.Dataset.range(9).shuffle(9, seed=1).batch(2))["operations"]
    ['batch(2)', 'range(0, 9, 1)']

    Returns:
      tensors: for each tensor, its number of rows and the digests of groups of rows.
      shuffle: for each shuffling, its two seeds and the size of its buffer.
      operations: the other operations with their numbers.
    """
    tensors, shuffles, operations = [], [], []
    for part in _list_parts(dataset):
        for tensor in getattr(part, "_tensors", ()):
            if hasattr(tensor, "numpy") and tensor.dtype not in (tf.variant, tf.resource):
                rows = _strip_directories(tensor.numpy())
                tensors.append(
                    {"rows": len(rows) if rows.ndim else 0, "digests": hash_tensor(rows)}
                )
        if hasattr(part, "_seed") and hasattr(part, "_seed2"):
            names = ("_seed", "_seed2", "_buffer_size")
            shuffles.append([_read(part, name) for name in names])
        name, numbers = _OPERATIONS.get(type(part).__name__, ("", ()))
        if name:
            operations.append(f"{name}({', '.join(str(_read(part, n)) for n in numbers)})")
    return {"tensors": tensors, "shuffle": shuffles, "operations": operations}


def list_shuffles(dataset: tf.data.Dataset) -> list[tf.data.Dataset]:
    """Returns the datasets within a dataset that draw an order: each pass has the next one."""
    return [part for part in _list_parts(dataset) if hasattr(part, "_seed2")]


def _list_parts(dataset: tf.data.Dataset) -> Iterator[Any]:
    """Yields a dataset, then the datasets from which it reads."""
    yield dataset
    inputs = list(dataset._inputs()) if hasattr(dataset, "_inputs") else []
    files = getattr(dataset, "_filenames", None)
    if isinstance(files, tf.data.Dataset) and not inputs:
        inputs = [files]
    for part in inputs:
        yield from _list_parts(part)


def _read(part: object, name: str) -> int | None:
    value = getattr(part, name, None)
    return int(value.numpy()) if isinstance(value, tf.Tensor) and hasattr(value, "numpy") else None


def _strip_directories(array: np.ndarray) -> np.ndarray:
    array = np.asarray(array)
    if array.dtype != object:
        return array
    names = [item.rpartition(b"/")[2] for item in array.ravel()]
    return np.array(names, object).reshape(array.shape)


def has_random_order(dataset: tf.data.Dataset) -> bool:
    """Returns whether a dataset is shuffled with neither its own seed nor a global one.

    Such a dataset has a different order in every process, and every time that one process creates
    it. So has one that samples from several datasets without a seed. Functions are searched, too.

    >>> has_random_order(tf.data.Dataset.range(9).shuffle(9, seed=1))
    False
    """
    graph = read_graph(dataset)
    if graph is None:
        return False
    bodies = [graph.node, *(function.node_def for function in graph.library.function)]
    return any(map(_draws_without_seed, bodies))


def read_graph(dataset: tf.data.Dataset) -> graph_pb2.GraphDef | None:
    """Returns the graph of a dataset; None if it has none that can be read."""
    try:
        serialized = dataset._as_serialized_graph(allow_stateful=True)
    except (tf.errors.OpError, NotImplementedError, AttributeError):
        return None
    return graph_pb2.GraphDef.FromString(serialized.numpy())


def _draws_without_seed(nodes: Sequence[Any]) -> bool:
    """Returns whether the nodes of a graph or function draw with seeds that are both 0."""
    values = {
        node.name: tf.make_ndarray(node.attr["value"].tensor)
        for node in nodes
        if node.op == "Const" and node.attr["value"].tensor.dtype == tf.int64.as_datatype_enum
    }
    seeds = (
        [values.get(node.input[place].partition(":")[0]) for place in _SEEDS[node.op]]
        for node in nodes
        if node.op in _SEEDS
    )
    return any(all(seed is not None and seed == 0 for seed in pair) for pair in seeds)
