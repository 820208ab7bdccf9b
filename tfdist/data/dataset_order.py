"""Tells whether a dataset yields its examples in the same order every time."""

import tensorflow as tf
from tensorflow.core.framework import graph_pb2

# Shuffle operation -> which of its inputs hold its two seeds.
_SEEDS = {
    "ShuffleDataset": (2, 3),
    "ShuffleDatasetV3": (2, 3),
    "ShuffleAndRepeatDataset": (2, 3),
    "ShuffleAndRepeatDatasetV2": (2, 3),
}


def is_shuffled_anew(dataset: tf.data.Dataset) -> bool:
    """Returns whether a dataset is shuffled with neither its own seed nor a global one.

    Such a dataset has a different order in every process, and every time that one process creates
    it. Shuffling inside Python functions or nested datasets is not detected.

    >>> is_shuffled_anew(tf.data.Dataset.range(9).shuffle(9, seed=1))
    False
    """
    try:
        serialized = dataset._as_serialized_graph(allow_stateful=True)
    except (tf.errors.OpError, NotImplementedError, AttributeError):
        return False
    graph = graph_pb2.GraphDef.FromString(serialized.numpy())
    values = {
        node.name: tf.make_ndarray(node.attr["value"].tensor)
        for node in graph.node
        if node.op == "Const" and node.attr["value"].tensor.dtype == tf.int64.as_datatype_enum
    }
    for node in graph.node:
        places = _SEEDS.get(node.op)
        if places is None:
            continue
        seeds = [values.get(node.input[place].partition(":")[0]) for place in places]
        if all(seed is not None and int(seed) == 0 for seed in seeds):
            return True
    return False
