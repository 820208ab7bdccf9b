import collections

import numpy as np
import pytest
import tensorflow as tf

from tfdist.data.pipeline import make_train_dataset
from tfdist.data.source import ArraySource
from tfdist.errors import TfdistError

Pair = collections.namedtuple("Pair", ["x", "y"])


@pytest.mark.parametrize(
    "arrays",
    [
        np.arange(12.0).reshape(6, 2),
        (np.arange(6), np.arange(6.0), np.ones(6)),
        {"a": np.arange(6), "b": (np.arange(6), [1, 2, 3, 4, 5, 6])},
        Pair(np.arange(6), np.array([b"a", b"b", b"c", b"d", b"e", b"f"])),
        [[1, 2], [3, 4], [5, 6]],
    ],
)
def test_any_structure_is_read_by_rows(arrays):
    source = ArraySource.from_arrays(arrays)
    rows = source.load_batch(tf.constant([2, 0], tf.int64))
    single = source.load(tf.constant(2, tf.int64))
    tf.nest.assert_same_structure(single, source.element_spec)
    for leaf, row, spec in zip(
        tf.nest.flatten(rows),
        tf.nest.flatten(single),
        tf.nest.flatten(source.element_spec),
        strict=True,
    ):
        assert spec.is_compatible_with(row)
        np.testing.assert_array_equal(leaf[0], row)
    if isinstance(arrays, Pair):
        assert isinstance(rows, Pair)
        assert rows.y.numpy().tolist() == [b"c", b"a"]


def test_memory_map_is_read_where_it_is(path_with_spaces):
    path = path_with_spaces / "x.npy"
    np.save(path, np.arange(20, dtype=np.float32).reshape(10, 2))
    source = ArraySource.from_arrays((np.load(path, mmap_mode="r"), np.arange(10)))
    dataset = make_train_dataset(source, global_batch_size=4, seed=0, num_replicas=2)
    assert dataset.element_spec[0].shape == (2, 2)
    x, y = next(iter(dataset))
    np.testing.assert_array_equal(x[:, 0], 2 * y)


def test_arrays_are_not_copied_into_graphs():
    source = ArraySource.from_arrays(np.zeros((1000, 1000)))
    graph = tf.function(source.load_batch).get_concrete_function(tf.TensorSpec([None], tf.int64))
    assert graph.graph.as_graph_def().ByteSize() < 10_000


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ((np.zeros(3), np.zeros(4)), "found 3, 4"),
        (np.zeros((0, 2)), "found 0"),
        ((np.zeros(3), 5), "found 3, 0"),
        ({}, "found no array"),
    ],
)
def test_refuses_arrays_without_common_rows(arrays, message):
    with pytest.raises(TfdistError, match=message):
        ArraySource.from_arrays(arrays)
