"""Digests of global batches."""

import itertools

import numpy as np
import tensorflow as tf

from tfdist.data.digests import END, BatchDigests, digest_batch, hash_digests, is_augmented

IMAGES = np.random.default_rng(0).random((12, 200, 100, 3)).astype("float32")


def _read(dataset):
    digests = BatchDigests()
    count = sum(1 for _ in digests.watch(dataset))
    return digests.take(count)


def test_batches_differ_by_order_sizes_and_types():
    whole = tf.data.Dataset.from_tensor_slices({"x": IMAGES, "y": np.array(list("abcdefghijkl"))})
    other_order = IMAGES[[1, 0, *range(2, 12)]]
    found = [
        _read(whole.batch(4)),
        _read(whole.batch(3)),
        _read(whole.shuffle(12, seed=1).batch(4)),
        *(
            _read(tf.data.Dataset.from_tensor_slices({"x": x}).batch(4))
            for x in (other_order, IMAGES, IMAGES.astype("f8"))
        ),
    ]
    assert len({hash_digests(each) for each in found}) == len(found)
    assert found[0] == _read(whole.batch(4))
    assert list(found[0]) == ["0", "1", "2"]
    assert found[0]["1"] == digest_batch(next(itertools.islice(whole.batch(4), 1, None)))


def test_an_iterator_that_was_left_notes_nothing():
    digests = BatchDigests()
    watched = digests.watch(tf.data.Dataset.range(9).batch(2).shuffle(9, seed=1))
    left = iter(watched)
    next(left)
    expected = [digest_batch(batch) for batch in itertools.islice(iter(watched), 2)]
    for _ in left:
        pass
    assert list(digests.take(2).values()) == expected


def test_augmentation_leaves_the_numbers_of_examples():
    def augment(x, y):
        return x * tf.random.uniform([]), y

    data = tf.data.Dataset.from_tensor_slices((IMAGES, np.arange(12)))
    found = _read(data.map(augment).batch(4))
    assert found == _read(data.map(augment).batch(4))
    assert found != _read(data.shuffle(12, seed=1).map(augment).batch(4))
    nested = tf.data.Dataset.range(2).flat_map(lambda _: data.map(augment))
    assert is_augmented(nested)
    assert not is_augmented(data.filter(lambda x, y: tf.random.uniform([]) < 2))


def test_the_end_is_known_with_the_last_batch():
    digests = BatchDigests()

    def read():
        return digests.note_end(iter([np.zeros(2), np.ones(2)]), skipped=0)

    spec = tf.TensorSpec([None], tf.float64)
    iterator = iter(digests.watch(tf.data.Dataset.from_generator(read, output_signature=spec)))
    next(iterator)
    assert list(digests.take(1)) == ["0"]
    next(iterator)
    assert digests.take(2)["2"] == [END]
