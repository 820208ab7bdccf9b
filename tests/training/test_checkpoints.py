import pathlib

import numpy as np
import pytest
import tensorflow as tf

from tfdist.errors import TfdistError
from tfdist.training.checkpoints import BackgroundWriter, Checkpoint, CheckpointStore


def _make_checkpoint(step, best_step=None):
    return Checkpoint(
        step=step,
        arrays={
            "variable/0": np.full((3, 2), step, "f4"),
            "variable/1": np.array(step, "i8"),
            "half": tf.constant([step, 0.5], tf.bfloat16).numpy(),
        },
        state={"step": step, "loss": float("nan")},
        best_step=best_step,
    )


@pytest.fixture
def store(path_with_spaces):
    return CheckpointStore(str(path_with_spaces / "checkpoints"), keep=2)


def test_gives_back_the_newest(store):
    for step in (1, 2):
        store.write(_make_checkpoint(step))
    found = store.read_newest()
    assert found.step == found.state["step"] == 2
    for name, array in _make_checkpoint(2).arrays.items():
        assert found.arrays[name].dtype == array.dtype
        np.testing.assert_array_equal(found.arrays[name], array)


def test_tensorflow_reads_it(store):
    path = store.write(_make_checkpoint(4))
    assert tf.train.load_checkpoint(f"{path}/variables").get_tensor("variable/0").max() == 4


def test_nothing_to_read(store):
    assert store.read_newest() is None


def test_keeps_the_newest_and_the_best(store):
    for step in range(1, 6):
        store.write(_make_checkpoint(step, best_step=None if step < 2 else 2))
    assert store.list_steps() == [2, 4, 5]
    assert store.read_newest().best_step == 2


def test_a_checkpoint_cut_short_is_not_one(store):
    store.write(_make_checkpoint(1))
    path = store.write(_make_checkpoint(2))
    (pathlib.Path(path) / "state.json").unlink()
    assert store.read_newest().step == 1


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("variables.data-00000-of-00001", lambda content: content[:-1]),
        ("variables.data-00000-of-00001", lambda content: content[:3] + b"\x00\xff" + content[5:]),
        ("variables.index", lambda content: b""),
        ("state.json", lambda content: content.replace(b'"step": 2', b'"step": 3')),
        ("state.json", lambda content: content[: len(content) // 2]),
        ("state.json", lambda content: b"[]"),
    ],
)
def test_a_damaged_one_is_passed_over(store, file, change):
    store.write(_make_checkpoint(1))
    path = pathlib.Path(store.write(_make_checkpoint(2))) / file
    damaged = change(path.read_bytes())
    assert damaged != path.read_bytes()
    path.write_bytes(damaged)
    assert store.read_newest().step == 1
    (path.parent.parent / "step-000000001" / "variables.index").write_bytes(b"")
    with pytest.raises(TfdistError, match="None of the 2 checkpoints"):
        store.read_newest()


def test_works_on_a_file_system_of_tensorflow():
    store = CheckpointStore("ram://a run/checkpoints")
    store.write(_make_checkpoint(7))
    assert store.read_newest().step == 7
    assert store.list_steps() == [7]


def test_says_what_to_do_when_it_cannot_write():
    with pytest.raises(OSError, match=r"Cannot write the checkpoint /proc/.* run the same command"):
        CheckpointStore("/proc/nowhere").write(_make_checkpoint(1))


def test_writes_in_the_background_in_order(store):
    writer = BackgroundWriter(store)
    for step in (1, 2, 3):
        writer.write(_make_checkpoint(step))
    writer.wait()
    assert store.list_steps() == [2, 3]


def test_says_later_that_it_could_not_write():
    writer = BackgroundWriter(CheckpointStore("/proc/nowhere"))
    writer.write(_make_checkpoint(1))
    with pytest.raises(OSError, match="Cannot write the checkpoint"):
        writer.wait()
    writer.wait()
