import json

import numpy as np
import pytest
import tensorflow as tf

from tfdist.data.dataset_graph import describe_dataset, has_random_order
from tfdist.data.fingerprint import describe_difference

X = np.arange(40, dtype=np.float32).reshape(20, 2)
Y = np.arange(20)


def make(x=X, *, seed=3, buffer=20, skip=2, batch=4):
    dataset = tf.data.Dataset.from_tensor_slices({"x": x, "y": Y[: len(x)]}).skip(skip)
    dataset = dataset.shuffle(buffer, seed=seed).map(lambda part: (part["x"], part["y"]))
    return dataset.batch(batch).prefetch(2)


def describe(dataset):
    found = describe_dataset(dataset)
    assert json.loads(json.dumps(found)) == found
    return found


def changed(row):
    x = X.copy()
    x[row] = -1
    return x


@pytest.mark.parametrize(
    ("options", "difference"),
    [
        ({}, None),
        ({"x": changed(7)}, "example 7 of tensor 0 changed"),
        ({"x": X[:19]}, "tensor 0 has 19 rows instead of 20"),
        ({"seed": 4}, "the seed of shuffle is 4 instead of 3"),
        ({"buffer": 5}, "the buffer of shuffle is 5 instead of 20"),
        ({"skip": 1}, "the dataset has skip(1) instead of skip(2)"),
        ({"batch": 5}, "the dataset has batch(5) instead of batch(4)"),
    ],
)
def test_what_changes_a_dataset_is_named(options, difference):
    assert describe_difference(describe(make()), describe(make(**options))) == difference


def test_the_seed_of_the_process_counts():
    tf.random.set_seed(1)
    try:
        old = describe(make())
        tf.random.set_seed(2)
        found = describe_difference(old, describe(make()))
    finally:
        tf.random.set_seed(None)
    assert found == "the global seed is 2 instead of 1"


def test_how_a_dataset_is_computed_does_not_count():
    dataset = make().map(lambda x, y: (x, y), num_parallel_calls=2).prefetch(4)
    assert describe(dataset) == describe(make())


def test_large_tensors_are_read_in_samples(monkeypatch):
    monkeypatch.setattr("tfdist.data.fingerprint._WHOLE_ARRAY_BYTES", 8)
    monkeypatch.setattr("tfdist.data.fingerprint._MAX_GROUPS", 4)
    old = describe(make())
    assert len(old["tensors"][0]["digests"]) == 4
    assert describe_difference(old, describe(make(changed(7)))) is None
    assert describe_difference(old, describe(make(changed(5)))) == (
        "examples between 5 and 9 of tensor 0 changed"
    )


def test_files_may_move(path_with_spaces):
    old = describe(tf.data.Dataset.from_tensor_slices(["a/1.png", "a/2.png"]))
    assert describe(tf.data.Dataset.from_tensor_slices(["b/1.png", "b/2.png"])) == old
    new = describe(tf.data.Dataset.from_tensor_slices(["a/1.png", "a/3.png"]))
    assert describe_difference(old, new) == "example 1 of tensor 0 changed"
    text = describe(tf.data.TextLineDataset([str(path_with_spaces / "1.txt")]))
    assert text["tensors"] == describe(tf.data.TextLineDataset(["1.txt"]))["tensors"]


def test_datasets_of_datasets_are_covered():
    def zipped(x):
        ranges = tf.data.Dataset.range(5, 20)
        return tf.data.Dataset.zip((ranges, tf.data.Dataset.from_tensors((x, 1.0)).repeat()))

    found = describe(zipped(X).concatenate(zipped(X)))
    assert found["operations"] == ["range(5, 20, 1)"] * 2
    assert describe_difference(found, describe(zipped(X).concatenate(zipped(changed(0))))) == (
        "example 0 of tensor 2 changed"
    )


def test_datasets_without_tensors_have_a_description_too():
    ragged = tf.data.Dataset.from_tensor_slices(tf.ragged.constant([[1], [2, 3]]))
    spec = tf.TensorSpec((), tf.int32)
    generated = tf.data.Dataset.from_generator(lambda: iter([1]), output_signature=spec)
    for dataset in (ragged, generated, tf.data.Dataset.random(seed=4).take(3)):
        assert describe(dataset) == describe(dataset)


def sample(seed):
    numbers = tf.data.Dataset.range(3)
    return tf.data.Dataset.sample_from_datasets([numbers, numbers], seed=seed)


ORDERS = {
    "shuffle": lambda seed: tf.data.Dataset.range(9).shuffle(9, seed=seed).batch(2),
    "sample": sample,
    "numbers": lambda seed: tf.data.Dataset.random(seed=seed).take(3),
    "inside": lambda seed: tf.data.Dataset.range(3).flat_map(lambda _: sample(seed).shuffle(3)),
    "interleaved": lambda seed: tf.data.Dataset.range(3).interleave(
        lambda _: tf.data.Dataset.range(3).shuffle(3, seed=seed), num_parallel_calls=2
    ),
}


@pytest.mark.parametrize("name", ORDERS)
def test_an_order_without_a_seed_is_found(name):
    assert has_random_order(ORDERS[name](None))
    if name != "inside":
        assert not has_random_order(ORDERS[name](0))


@pytest.mark.thorough
def test_other_processes_find_the_same(last_lines_of):
    code = (
        "import json, numpy as np, tensorflow as tf\n"
        "from tfdist.data.dataset_graph import describe_dataset\n"
        "data = tf.data.Dataset.from_tensor_slices((np.arange(6.0), np.array(['a', 'b'] * 3)))\n"
        "data = data.shuffle(6, seed=1).map(lambda x, y: (x, tf.strings.length(y))).batch(2)\n"
        "print(json.dumps(describe_dataset(data)))"
    )
    assert len(set(last_lines_of(code))) == 1
