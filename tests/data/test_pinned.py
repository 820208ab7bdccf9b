"""Batches in page-locked memory are the same batches."""

import numpy as np
import pytest
import tensorflow as tf

from tfdist.data.pinned import pin_memory

X, Y = np.arange(24, dtype="f4").reshape(6, 4), np.arange(6)
PAIRS = tf.data.Dataset.from_tensor_slices((X, Y)).batch(4)  # of 4 and 2 rows


def _make_sizes():
    for size in (1, 3, 2):
        yield np.full([size, size], size, "f4")


DATASETS = {
    "pairs": PAIRS,
    "places": PAIRS.map(lambda x, y: ((x, y), ())),
    "nested": PAIRS.map(lambda x, y: ({"x": x, "y": [y, y]}, (tf.shape(x)[0], tf.constant(1)))),
    "dict": PAIRS.map(lambda x, y: {"x": x}),
    "endless": PAIRS.repeat(),
    "types": PAIRS.map(lambda x, y: (tf.cast(x, tf.bool), tf.cast(x, tf.bfloat16))),
    "unknown shape": tf.data.Dataset.from_generator(
        _make_sizes, output_signature=tf.TensorSpec(None, tf.float32)
    ),
}
OTHERS = {
    "none": tf.data.Dataset.from_tensors((X, None)),
    "text": PAIRS.map(lambda x, y: tf.as_string(y)),
    "ragged": PAIRS.map(lambda x, y: tf.RaggedTensor.from_tensor(x)),
    "sparse": PAIRS.map(lambda x, y: tf.sparse.from_dense(x)),
}


@pytest.mark.parametrize("name", DATASETS)
def test_elements_are_the_same(name):
    dataset = DATASETS[name]
    pinned = pin_memory(dataset)
    assert pinned is not dataset
    assert pinned.element_spec == dataset.element_spec
    assert int(pinned.cardinality()) == int(dataset.cardinality())
    found, expected = list(pinned.take(5)), list(dataset.take(5))
    assert len(found) == len(expected)
    tf.nest.map_structure(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_dense_number_stays(name):
    assert pin_memory(OTHERS[name]) is OTHERS[name]
