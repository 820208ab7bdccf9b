import dataclasses
import os
import pathlib
from typing import ClassVar

import numpy as np
import pytest
import tensorflow as tf

from tfdist.data import cache, checked_files
from tfdist.data.cache import cache_source, read_examples
from tfdist.data.pipeline import make_train_dataset
from tfdist.data.source import ArraySource, BatchSource, SequentialSource
from tfdist.errors import TfdistError
from tfdist.tasks.segmentation.examples import ImagesAndMasks
from tfdist.tasks.segmentation.shapes import make_shapes


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Ramp(ImagesAndMasks, SequentialSource):
    """Counts how often it is read."""

    fingerprint = "ramp"
    reads: ClassVar[list[int]] = []

    def read_examples(self):
        self.reads.append(1)
        for index in range(self.num_examples):
            yield (
                np.full((*self.image_size, 3), index, np.uint8),
                np.full(self.image_size, index % 2, np.uint8),
            )

    def get_fingerprint(self):
        return self.fingerprint


def make_ramp(num_examples=10):
    class Fresh(Ramp):
        reads: ClassVar[list[int]] = []

    return Fresh(num_examples=num_examples, image_size=(2, 3), num_classes=2, ignore_label=7)


def assert_is_ramp(source, num_examples=10):
    assert source.num_examples == num_examples
    assert source.info["ignore_label"] == 7
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
    assert len(ramp.reads) == 1


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
    assert len(ramp.reads) == 1
    type(ramp).fingerprint = "changed"
    cache_source(ramp, "disk", directory=directory, quiet=True)
    assert len(ramp.reads) == 2
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
    texts = ArraySource.from_arrays((np.zeros((4, 3)), np.array(["a"] * 4)))
    with pytest.raises(TfdistError, match=r"is string of shape \(\), and only numbers"):
        cache_source(texts, "memory")
    images = ArraySource.from_arrays((np.zeros((4, 2, 2, 3)), np.zeros((4, 2, 2))))
    with pytest.raises(TfdistError, match="ArraySource on disk"):
        cache_source(images, "disk", directory=str(path_with_spaces), quiet=True)
    file = path_with_spaces / "file"
    file.write_text("")
    with pytest.raises(TfdistError, match=r"Cannot keep the cache in '.*file'"):
        cache_source(make_ramp(), "disk", directory=str(file), quiet=True)


def find_file(directory, name="0.uint8"):
    return next(pathlib.Path(directory).glob(f"*/{name}"))


def cut(path):
    os.truncate(path, 20)


def overwrite(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def overwrite_unnoticed(path):
    stat = path.stat()
    overwrite(path)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


@pytest.mark.parametrize(
    ("name", "damage", "problem"),
    [
        ("0.uint8", cut, "0.uint8 has 20 bytes instead of 180"),
        ("1.uint8", cut, "1.uint8 has 20 bytes instead of 60"),
        ("0.uint8", overwrite, "0.uint8 does not hold what was written"),
        ("1.uint8", overwrite_unnoticed, "1.uint8 does not hold what was written"),
        ("1.uint8", pathlib.Path.unlink, "1.uint8 is missing"),
        ("checksums.json", cut, "checksums.json cannot be read"),
        ("checksums.json", pathlib.Path.unlink, "checksums.json is missing"),
    ],
)
def test_a_damaged_cache_is_made_again(path_with_spaces, caplog, name, damage, problem):
    directory = str(path_with_spaces)
    ramp = make_ramp()
    cache_source(ramp, "disk", directory=directory, quiet=True)
    damage(find_file(directory, name))
    assert_is_ramp(cache_source(ramp, "disk", directory=directory, quiet=True))
    [record] = caplog.records
    assert record.message.endswith(f"is damaged: {problem}. Rebuilding it.")
    assert_is_ramp(cache_source(ramp, "disk", directory=directory, quiet=True))
    assert len(ramp.reads) == 2
    assert len(os.listdir(directory)) == 1


def test_blocks_of_large_files_are_checked(path_with_spaces, monkeypatch):
    monkeypatch.setattr(checked_files, "_BLOCK_BYTES", 7)
    monkeypatch.setattr(checked_files, "_MAX_SAMPLED_BLOCKS", 3)
    directory = str(path_with_spaces)
    ramp = make_ramp()
    for _ in range(2):
        assert_is_ramp(cache_source(ramp, "disk", directory=directory, quiet=True))
    assert len(ramp.reads) == 1
    os.utime(find_file(directory))
    cache_source(ramp, "disk", directory=directory, quiet=True)
    assert len(ramp.reads) == 1
    path = find_file(directory)
    data = bytearray(path.read_bytes())
    data[25] ^= 1
    path.write_bytes(data)
    cache_source(ramp, "disk", directory=directory, quiet=True)
    assert len(ramp.reads) == 2


def test_a_process_that_is_faster_is_believed_if_its_files_are_whole(path_with_spaces, caplog):
    directory = str(path_with_spaces)
    other = make_ramp()
    ramp = make_ramp()
    read = Ramp.read_examples

    def read_slowly(**options):
        cache_source(other, "disk", directory=directory, quiet=True)
        yield from read(ramp)

    object.__setattr__(ramp, "read_examples", read_slowly)
    cache_source(ramp, "disk", directory=directory, quiet=True)
    assert len(os.listdir(directory)) == 1
    cut(find_file(directory))
    assert_is_ramp(cache_source(ramp, "disk", directory=directory, quiet=True))
    assert len(os.listdir(directory)) == 1
    assert len(caplog.records) == 2, "each said that it found the damage"


def make_filled(value, path=""):
    @dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
    class Filled(BatchSource):
        path: str = ""

        @property
        def element_spec(self):
            return tf.TensorSpec((2, 2, 3), tf.float32), tf.TensorSpec((2, 2), tf.int32)

        def load_batch(self, indices):
            number = float(pathlib.Path(self.path).read_text()) if self.path else value
            rows = len(indices)
            # Far from the examples that a fingerprint loads.
            numbers = tf.where(indices == 55, number, 0.0)[:, None, None, None]
            return tf.tile(numbers, [1, 2, 2, 3]), tf.zeros([rows, 2, 2], tf.int32)

    return Filled(num_examples=100, path=path)


def test_another_class_of_the_same_name_has_its_own_cache(path_with_spaces):
    for value in (10.0, 200.0, 10.0):
        directory = str(path_with_spaces)
        source = cache_source(make_filled(value), "disk", directory=directory, quiet=True)
        assert source.load(tf.constant(55, tf.int64))[0][0, 0, 0] == value
    assert len(os.listdir(path_with_spaces)) == 2


@pytest.mark.parametrize("is_directory", [False, True])
def test_a_source_of_changed_files_has_another_cache(path_with_spaces, is_directory):
    file = path_with_spaces / "data" / "number.txt"
    file.parent.mkdir()
    directory = str(path_with_spaces / "cache")
    for value in (10, 200):
        file.write_text(str(value))
        source = make_filled(0.0, path=str(file))
        if is_directory:
            named = dataclasses.make_dataclass(
                "Named",
                [("root", str, dataclasses.field(default=str(file.parent)))],
                bases=(type(source),),
                frozen=True,
                eq=False,
                kw_only=True,
            )
            source = named(num_examples=100, path=str(file))
        source = cache_source(source, "disk", directory=directory, quiet=True)
        assert source.load(tf.constant(55, tf.int64))[0][0, 0, 0] == value


def test_a_source_that_is_not_what_it_says_is_refused(path_with_spaces):
    class Short(Ramp):
        def read_examples(self):
            yield np.zeros((2, 3, 3), np.uint8), np.zeros((2, 3), np.uint8)

    class Long(Ramp):
        def read_examples(self):
            for _ in range(3):
                yield np.zeros((2, 3, 3), np.uint8), np.zeros((2, 3), np.uint8)

    class Wide(Ramp):
        def read_examples(self):
            yield np.zeros((2, 4, 3), np.uint8), np.zeros((2, 4), np.uint8)

    for kind, message in (
        (Short, "Short: it yields 1 examples, but num_examples is 2"),
        (Long, "Long: it yields more examples, but num_examples is 2"),
        (
            Wide,
            r"example 0 of Wide: its shapes are \(2, 4, 3\) and \(2, 4\) instead of \(2, 3, 3\)",
        ),
    ):
        source = kind(num_examples=2, image_size=(2, 3), num_classes=2)
        for where in ("memory", "disk"):
            with pytest.raises(TfdistError, match=message):
                cache_source(source, where, directory=str(path_with_spaces), quiet=True)
    assert os.listdir(path_with_spaces) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="Only root can become another user.")
def test_a_user_without_home_and_entry_gets_one_line(monkeypatch):
    source = ArraySource.from_arrays((np.ones((4, 2), np.float32),))
    monkeypatch.delenv("HOME", raising=False)
    os.setresuid(54321, -1, -1)
    try:
        with pytest.raises(TfdistError) as caught:
            cache_source(source, "disk", quiet=True)
    finally:
        os.setresuid(0, -1, -1)
    (line,) = str(caught.value).splitlines()
    assert line.startswith("Cannot keep the cache on disk: ")
    assert "Set HOME, or keep the cache in memory." in line


def test_few_examples_are_read_at_once_and_are_those_of_a_pipeline(monkeypatch):
    source = make_shapes("train", (16, 16), 40, seed=3)
    at_once = list(read_examples(source))
    monkeypatch.setattr(cache, "_AT_ONCE", 0)
    assert len(at_once) == 40
    for found, expected in zip(at_once, read_examples(source), strict=True):
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.dtype == theirs.dtype
            np.testing.assert_array_equal(ours, theirs)
