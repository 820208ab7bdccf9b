"""Batches on their way to GPUs are the same batches."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests import zoo
from tfdist.data.gpu_batches import has_dense_numbers, iterate_on_gpu, pin_memory, read_element
from tfdist.training.inputs import data_adapter
from tfdist.training.kinds import synchronous
from tfdist.training.step import steps
from tfdist.training.step.model_variables import hash_weights

X, Y = np.arange(24, dtype="f4").reshape(6, 4), np.arange(6)
PAIRS = tf.data.Dataset.from_tensor_slices((X, Y)).batch(4)  # of 4 and 2 rows


def _make_sizes():
    for size in (1, 3, 2):
        yield np.full([size, size], size, "f4")


DATASETS = {
    "pairs": PAIRS,
    "places": PAIRS.map(lambda x, y: ((x, y), ())),
    "nested": PAIRS.map(lambda x, y: ({"x": x, "y": [y, y]}, (tf.shape(x)[0], tf.constant(1)))),
    "int32": PAIRS.map(lambda x, y: ({"x": x, "y": (tf.cast(y, tf.int32), y)}, ())),
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
    _check_elements(pinned, dataset)


@pytest.mark.parametrize("name", ["pairs", "places", "nested", "int32", "endless", "types"])
def test_elements_are_the_same_after_a_copy(name):
    dataset = DATASETS[name]
    copied = iterate_on_gpu(dataset, "/job:localhost/replica:0/task:0/device:CPU:1")
    assert tf.int32 not in [spec.dtype for spec in tf.nest.flatten(copied.element_spec)]
    _check_elements(map(read_element, copied), dataset)


def _check_elements(dataset, expected):
    found, expected = list(itertools.islice(dataset, 5)), list(expected.take(5))
    assert len(found) == len(expected)
    assert _list_types(found) == _list_types(expected)
    tf.nest.map_structure(np.testing.assert_array_equal, found, expected)


def _list_types(elements):
    return [tf.nest.map_structure(lambda t: t.dtype, element) for element in elements]


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_dense_number_stays(name):
    assert pin_memory(OTHERS[name]) is OTHERS[name]
    assert not has_dense_numbers(OTHERS[name])


@pytest.mark.thorough(keep=3)
@pytest.mark.parametrize(
    ("strategy_name", "options", "is_known"),
    [
        # Each way to train, and both kinds of data.
        ("one_device", {}, True),
        ("one_device", {"micro_batches": 2}, False),
        ("mirrored-2", {}, False),
        ("one_device", {}, False),
        ("one_device", {"micro_batches": 2}, True),
        ("mirrored-2", {}, True),
    ],
)
def test_a_run_is_the_same(strategy_name, options, is_known, monkeypatch):
    example = zoo.EXAMPLES["dense"]
    x, y = example.data
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
    if not is_known:
        dataset = dataset.filter(lambda *batch: True)
    found = []
    for is_gpu in (False, True):
        if is_gpu:
            for module in (data_adapter, steps, synchronous):
                monkeypatch.setattr(module, "is_on", lambda strategy, kind: kind == "GPU")
        trainer = zoo.make_trainer(
            lambda: example.build(keras.optimizers.Adam(1e-2)),
            strategy=zoo.STRATEGIES[strategy_name](),
            **options,
        )
        logs = trainer.fit(dataset, epochs=2, verbose=0).history
        evaluated = trainer.evaluate(x, y, verbose=0)
        predicted = trainer.predict(x, verbose=0)
        found.append((logs, evaluated, predicted.tolist(), hash_weights(trainer.model)))
    assert found[0] == found[1]
