import dataclasses
import json
import os

import numpy as np
import pytest
import tensorflow as tf

from tfdist.data.cache import cache_source
from tfdist.data.fingerprint import describe_difference
from tfdist.data.source import ArraySource, BatchSource, SequentialSource
from tfdist.tasks.segmentation.examples import ImagesAndMasks
from tfdist.tasks.segmentation.folder import make_folder
from tfdist.tasks.segmentation.shapes import make_shapes


def png(index, channels):
    pixels = np.random.default_rng(index).integers(0, 2, (8, 8, channels))
    return tf.io.encode_png(pixels.astype(np.uint8)).numpy()


def write_folder(root, num_examples):
    for directory, channels in (("images", 3), ("masks", 1)):
        path = root / "train" / directory
        path.mkdir(parents=True, exist_ok=True)
        for index in range(num_examples):
            (path / f"{index:03}.png").write_bytes(png(index, channels))


def fingerprint_folder(root, **options):
    found = make_folder(str(root), "train", (8, 8), 2, **options).make_fingerprint()
    assert json.loads(json.dumps(found)) == found
    return found


def test_a_folder_changes_with_its_files(path_with_spaces, tmp_path):
    write_folder(path_with_spaces, 8)
    old = fingerprint_folder(path_with_spaces)
    write_folder(tmp_path / "elsewhere", 8)
    assert fingerprint_folder(tmp_path / "elsewhere") == old
    assert describe_difference(old, fingerprint_folder(path_with_spaces)) is None

    def describe():
        return describe_difference(old, fingerprint_folder(path_with_spaces), split="training")

    image = path_with_spaces / "train" / "images" / "003.png"
    data = image.read_bytes()
    stat = image.stat()
    image.write_bytes(data[:-1] + b"?")
    os.utime(image, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert describe() == "training examples: image 003.png changed"
    image.write_bytes(data)
    assert describe() is None
    mask = path_with_spaces / "train" / "masks" / "007.png"
    mask.write_bytes(mask.read_bytes() + b"?")
    assert describe() == "training examples: mask 007.png changed"
    for directory in ("images", "masks"):
        path = path_with_spaces / "train" / directory / "007.png"
        path.rename(path.with_name("009.png"))
    assert describe() == "training examples: there is 009.png instead of 007.png"
    write_folder(path_with_spaces, 16)
    assert describe() == "16 training examples instead of 8"
    new = fingerprint_folder(path_with_spaces, max_examples=7)
    assert describe_difference(old, new) == "7 examples instead of 8"


def test_options_of_a_folder_count(path_with_spaces):
    write_folder(path_with_spaces, 2)
    old = fingerprint_folder(path_with_spaces)
    new = fingerprint_folder(path_with_spaces, label_map={1: 0})
    assert describe_difference(old, new) == "the label map is {'1': 0} instead of {}"
    new = make_folder(str(path_with_spaces), "train", (8, 4), 2).make_fingerprint()
    assert describe_difference(old, new) == (
        "the element spec is ['float32 [8, 4, 3]', 'int32 [8, 4]'] instead of "
        "['float32 [8, 8, 3]', 'int32 [8, 8]']"
    )


def test_many_files_stay_a_small_fingerprint(path_with_spaces):
    write_folder(path_with_spaces, 600)
    old = fingerprint_folder(path_with_spaces)
    assert len(json.dumps(old)) < 40_000
    image = path_with_spaces / "train" / "images" / "301.png"
    image.write_bytes(image.read_bytes() + b"?")
    new = fingerprint_folder(path_with_spaces)
    assert describe_difference(old, new) == "image files changed between 300.png and 302.png"


def test_large_files_are_read_in_pieces(path_with_spaces):
    write_folder(path_with_spaces, 1)
    image = path_with_spaces / "train" / "images" / "000.png"
    image.write_bytes(bytes(3 * 2**20))
    old = fingerprint_folder(path_with_spaces)
    image.write_bytes(bytes(3 * 2**20 - 1) + b"?")
    new = fingerprint_folder(path_with_spaces)
    assert describe_difference(old, new) == "image 000.png changed"


def fingerprint_arrays(**arrays):
    found = ArraySource.from_arrays(arrays).make_fingerprint()
    assert json.loads(json.dumps(found)) == found
    return found


def test_arrays_change_with_their_rows():
    x, y = np.arange(20.0).reshape(10, 2), np.array([b"a", b"bc"] * 5, object)
    old = fingerprint_arrays(x=x, y=y)
    assert fingerprint_arrays(x=x.copy(), y=y) == old
    changed = x.copy()
    changed[3, 1] = -1
    new = fingerprint_arrays(x=changed, y=y)
    assert describe_difference(old, new) == "example 3 of array 0 changed"
    changed[7, 1] = -1
    new = fingerprint_arrays(x=changed, y=y)
    assert describe_difference(old, new) == "examples between 3 and 7 of array 0 changed"
    new = fingerprint_arrays(x=x, y=np.array([b"ab", b"c"] * 5, object))
    assert describe_difference(old, new) == "examples between 0 and 9 of array 1 changed"
    new = fingerprint_arrays(x=x[:5], y=y[:5])
    assert describe_difference(old, new, split="training") == "5 training examples instead of 10"
    new = fingerprint_arrays(x=x.astype(np.float32), y=y)
    assert "'float32 [2]'" in describe_difference(old, new)


def test_mapped_arrays_are_as_those_in_memory(path_with_spaces):
    x = np.arange(12.0).reshape(6, 2)
    np.save(path_with_spaces / "x.npy", x)
    mapped = np.load(path_with_spaces / "x.npy", mmap_mode="r")
    assert fingerprint_arrays(x=mapped) == fingerprint_arrays(x=x)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Filled(BatchSource):
    value: float = 0.0

    @property
    def element_spec(self):
        return tf.TensorSpec((2, 2, 3), tf.float32), tf.TensorSpec((2, 2), tf.int32)

    def load_batch(self, indices):
        rows = tf.cast(indices, tf.float32)[:, None, None, None] + self.value
        return tf.tile(rows, [1, 2, 2, 3]), tf.zeros([len(indices), 2, 2], tf.int32)


def test_an_own_source_changes_with_what_it_loads():
    old = Filled(num_examples=100).make_fingerprint()
    assert [found["index"] for found in old["loaded"]] == [0, 24, 49, 74, 99]
    assert Filled(num_examples=100).make_fingerprint() == old
    new = Filled(num_examples=100, value=1.0).make_fingerprint()
    assert describe_difference(old, new, split="validation") == (
        "validation examples: example 0 changed"
    )
    assert describe_difference(old, Filled(num_examples=3).make_fingerprint()) == (
        "3 examples instead of 100"
    )


def test_where_examples_are_cached_makes_no_difference(path_with_spaces):
    for source in (Filled(num_examples=4), make_shapes("train", (16, 16), 4)):
        cached = [
            cache_source(source, where, directory=str(path_with_spaces), quiet=True)
            for where in ("none", "memory", "disk")
        ]
        assert len({json.dumps(one.make_fingerprint()) for one in cached}) == 1


def test_shapes_change_with_their_seed():
    old, new = (make_shapes("train", (16, 16), 4, seed).make_fingerprint() for seed in (0, 1))
    assert describe_difference(old, new) == "the seed is 1 instead of 0"


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Sequence(ImagesAndMasks, SequentialSource):
    text = "old"

    def read_examples(self):
        yield from ()

    def get_fingerprint(self):
        return self.text


def test_a_sequence_changes_with_its_own_fingerprint():
    source = Sequence(num_examples=3, image_size=(2, 2), num_classes=2)
    old = source.make_fingerprint()
    assert source.make_fingerprint() == old
    Sequence.text = "new"
    assert describe_difference(old, source.make_fingerprint()) == "the contents changed"


@pytest.mark.parametrize("change", [{"format": 0}, {"kind": "tfds"}])
def test_other_kinds_and_formats(change):
    new = Filled(num_examples=4).make_fingerprint()
    found = describe_difference({**new, **change}, new)
    assert found == (None if "format" in change else "the kind is source instead of tfds")


def test_parts_that_an_older_version_did_not_write_are_ignored():
    new = {**Filled(num_examples=4).make_fingerprint(), "order": {"shuffle": True, "seed": 1}}
    old = {name: part for name, part in new.items() if name != "order"}
    assert describe_difference(old, new) is None
    assert describe_difference(new, old) is None
    assert describe_difference({}, new) is None
    assert describe_difference({**old, "num_examples": 3}, new) == "4 examples instead of 3"


@pytest.mark.parametrize(
    ("order", "difference"),
    [
        ({"shuffle": True, "seed": 2}, "the seed of the order is 2 instead of 1"),
        ({"shuffle": False}, "shuffle is False instead of True"),
    ],
)
def test_the_order_counts(order, difference):
    old = {"kind": "arrays", "num_examples": 4, "order": {"shuffle": True, "seed": 1}}
    assert describe_difference(old, {**old, "order": order}) == difference


@pytest.mark.thorough
def test_other_processes_find_the_same(last_lines_of):
    code = (
        "import json, numpy as np\n"
        "from tfdist.data.source import ArraySource\n"
        "arrays = {'x': np.arange(6.0), 'y': np.array(['a', 'b'] * 3)}\n"
        "print(json.dumps(ArraySource.from_arrays(arrays).make_fingerprint()))"
    )
    assert len(set(last_lines_of(code))) == 1
