import os

import numpy as np
import pytest
import tensorflow as tf

from tfdist.data.cache import SequentialSource, cache_source
from tfdist.data.pipeline import make_train_dataset
from tfdist.data.shapes import make_shapes
from tfdist.data.source import ArraySource
from tfdist.errors import TfdistError


class Ramp(SequentialSource):
    """Counts how often it is read."""

    reads = 0
    fingerprint = "ramp"

    def read_examples(self, *, own_size=False):
        type(self).reads += 1
        for index in range(self.num_examples):
            yield (
                np.full((*self.image_size, 3), index, np.uint8),
                np.full(self.image_size, index % 2, np.uint8),
            )

    def get_fingerprint(self):
        return self.fingerprint


def make_ramp(num_examples=10):
    class Fresh(Ramp):
        pass

    return Fresh(num_examples=num_examples, image_size=(2, 3), num_classes=2, ignore_label=7)


def assert_is_ramp(source, num_examples=10):
    assert source.num_examples == num_examples
    assert source.ignore_label == 7
    images, masks = source.load_batch(tf.range(num_examples, dtype=tf.int64))
    assert images.shape == (num_examples, 2, 3, 3)
    np.testing.assert_array_equal(images[:, 0, 0, 0], np.arange(num_examples))
    np.testing.assert_array_equal(masks[:, 1, 2], np.arange(num_examples) % 2)
    image, mask = source.load(tf.constant(3, tf.int64))
    assert source.element_spec == (
        tf.TensorSpec(image.shape, tf.float32),
        tf.TensorSpec(mask.shape, tf.int32),
    )
    dataset = make_train_dataset(source, global_batch_size=4, seed=0, shuffle=False)
    assert next(iter(dataset))[0][:, 0, 0, 0].numpy().tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("where", ["memory", "disk", "auto"])
def test_examples_are_read_once(path_with_spaces, where):
    ramp = make_ramp()
    source = cache_source(ramp, where, directory=str(path_with_spaces), quiet=True)
    assert_is_ramp(source)
    assert type(ramp).reads == 1


def test_auto_takes_the_disk_beyond_the_limit(path_with_spaces):
    size_bytes = 10 * 2 * 3 * 4
    for limit, files in ((size_bytes, 0), (size_bytes - 1, 1)):
        directory = str(path_with_spaces)
        source = cache_source(
            make_ramp(), directory=directory, memory_limit_bytes=limit, quiet=True
        )
        assert_is_ramp(source)
        assert len(os.listdir(directory)) == files


def test_disk_is_found_again_while_the_fingerprint_holds(path_with_spaces):
    directory = str(path_with_spaces / "new" / "cache")
    ramp = make_ramp()
    for _ in range(2):
        assert_is_ramp(cache_source(ramp, "disk", directory=directory, quiet=True))
    assert type(ramp).reads == 1
    type(ramp).fingerprint = "changed"
    cache_source(ramp, "disk", directory=directory, quiet=True)
    assert type(ramp).reads == 2
    cache_source(make_ramp(9), "disk", directory=directory, quiet=True)
    assert len(os.listdir(directory)) == 3


def test_an_interrupted_pass_leaves_nothing(path_with_spaces):
    ramp = make_ramp()

    def fail_halfway(**options):
        yield np.zeros((2, 3, 3), np.uint8), np.zeros((2, 3), np.uint8)
        raise KeyboardInterrupt

    object.__setattr__(ramp, "read_examples", fail_halfway)
    with pytest.raises(KeyboardInterrupt):
        cache_source(ramp, "disk", directory=str(path_with_spaces), quiet=True)
    assert os.listdir(path_with_spaces) == []


def test_random_access_source_goes_to_disk(path_with_spaces):
    source = make_shapes("train", (16, 16), 5)
    cached = cache_source(source, "disk", directory=str(path_with_spaces), quiet=True)
    indices = tf.range(5, dtype=tf.int64)
    for left, right in zip(source.load_batch(indices), cached.load_batch(indices), strict=True):
        np.testing.assert_array_equal(left, right)


def test_progress_is_shown_unless_quiet(capsys):
    cache_source(make_ramp(), "memory", quiet=True)
    assert capsys.readouterr().out == ""
    cache_source(make_ramp(), "memory")
    assert "10/10" in capsys.readouterr().out


def test_none_is_the_source_itself():
    source = make_shapes("train", (16, 16), 5)
    assert cache_source(source, "none") is source
    with pytest.raises(TfdistError, match="without a cache"):
        cache_source(make_ramp(), "none")


def test_refuses_what_it_cannot_cache(path_with_spaces):
    with pytest.raises(TfdistError, match=r"Unknown cache 'ram'. Valid: "):
        cache_source(make_ramp(), "ram")
    with pytest.raises(TfdistError, match=r"'gs://a/b'.* local disk"):
        cache_source(make_ramp(), "disk", directory="gs://a/b")
    vectors = ArraySource.from_arrays((np.zeros((4, 3)), np.zeros(4)))
    with pytest.raises(TfdistError, match=r"found shapes \(3,\), \(\)"):
        cache_source(vectors, "memory")
    images = ArraySource.from_arrays((np.zeros((4, 2, 2, 3)), np.zeros((4, 2, 2))))
    with pytest.raises(TfdistError, match="ArraySource on disk"):
        cache_source(images, "disk", directory=str(path_with_spaces), quiet=True)
    file = path_with_spaces / "file"
    file.write_text("")
    with pytest.raises(TfdistError, match=r"Cannot write the cache in '.*file'"):
        cache_source(make_ramp(), "disk", directory=str(file), quiet=True)
