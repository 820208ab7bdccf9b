import os
import pathlib

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.errors import TfdistError
from tfdist.training.checkpoint.files import (
    BackgroundWriter,
    Checkpoint,
    CheckpointStore,
    find_nonfinite,
)
from tfdist.training.checkpoint.structure import Structure, VariableRecord


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


@pytest.mark.parametrize("name", ["unet[v2]", "[", "[!a]", "a*", "what?", "back\\slash", "{a,b}"])
@pytest.mark.parametrize("is_local", [True, False])
def test_names_that_look_like_patterns(tmp_path, name, is_local):
    parent = tmp_path if is_local else f"ram://{tmp_path.name}"
    store = CheckpointStore(f"{parent}/{name}/checkpoints")
    store.write(_make_checkpoint(3))
    np.testing.assert_array_equal(
        store.read_newest().arrays["variable/0"], _make_checkpoint(3).arrays["variable/0"]
    )


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
    with pytest.raises(TfdistError, match="None of the 2 checkpoints.*is intact and has finite"):
        store.read_newest()


class FullDisk(CheckpointStore):
    """Has room for a part of a checkpoint."""

    def _write_files(self, path, checkpoint):
        (pathlib.Path(path) / "variables.index").write_bytes(b"a part")
        raise tf.errors.ResourceExhaustedError(None, None, "No space left on device")


def test_a_full_disk_leaves_the_checkpoint_that_was_to_be_replaced(store):
    store.write(_make_checkpoint(90))
    with pytest.raises(OSError, match="No space left"):
        FullDisk(store.directory).write(_make_checkpoint(90))
    assert [path.name for path in pathlib.Path(store.directory).iterdir()] == ["step-000000090"]
    assert store.read_newest().step == 90


def test_a_directory_that_cannot_be_listed_loses_nothing(store, monkeypatch):
    store.write(_make_checkpoint(90))
    with monkeypatch.context() as patched:

        def fail(path):
            raise tf.errors.UnavailableError(None, None, "the server does not answer")

        patched.setattr(tf.io.gfile, "listdir", fail)
        with pytest.raises(OSError, match="step-000000090: the server does not answer"):
            store.write(_make_checkpoint(90))
    assert store.read_newest().step == 90


def test_a_step_that_is_written_again_replaces_the_one_before(store):
    for best_step in (1, 2, 3):
        path = store.write(_make_checkpoint(90, best_step=best_step))
        assert list(pathlib.Path(store.directory).iterdir()) == [pathlib.Path(path)]
        assert store.list_steps() == [90]
        assert store.read(90).best_step == store.read_newest().best_step == best_step


def test_a_kill_before_the_replaced_one_is_deleted(store, monkeypatch):
    store.write(_make_checkpoint(90, best_step=1))
    monkeypatch.setattr(CheckpointStore, "_delete_superseded", lambda *_: None)
    path = pathlib.Path(store.write(_make_checkpoint(90, best_step=2)))
    assert store.list_steps() == [90]
    assert store.read(90).best_step == store.read_newest().best_step == 2
    (path / "variables.index").write_bytes(b"")
    assert store.read(90).best_step == store.read_newest().best_step == 1


def test_what_is_newer_than_the_restored_one_goes_when_the_next_is_complete(store):
    store = CheckpointStore(store.directory, keep=2)
    for step in (90, 100):
        path = store.write(_make_checkpoint(step, best_step=90))
    (pathlib.Path(path) / "variables.data-00000-of-00001").write_bytes(b"")
    again = CheckpointStore(store.directory, keep=2)
    assert again.read_newest().step == 90
    assert again.list_steps() == [90]
    with pytest.raises(OSError, match="No space left"):
        FullDisk(store.directory).write(_make_checkpoint(95))
    assert store.list_steps() == [90, 100]
    again.write(_make_checkpoint(95, best_step=90))
    assert store.list_steps() == [90, 95]
    assert store.read_newest().step == 95


def test_a_damaged_one_does_not_count_as_kept(store):
    store = CheckpointStore(store.directory, keep=1)
    for step in (90, 100):
        path = store.write(_make_checkpoint(step, best_step=90))
    (pathlib.Path(path) / "variables.index").write_bytes(b"")
    again = CheckpointStore(store.directory, keep=1)
    assert again.read_newest().step == 90
    again.write(_make_checkpoint(100))
    assert again.list_steps() == [100]
    assert CheckpointStore(store.directory).read_newest().step == 100


def test_directories_that_a_kill_left_are_removed(store):
    directory = pathlib.Path(store.directory)
    for name in ("step-000000003", "step-000000009.1"):
        (directory / name).mkdir(parents=True)
        (directory / name / "variables.index").write_bytes(b"a part")
    (directory / "notes").mkdir()
    store.write(_make_checkpoint(9))
    assert sorted(path.name for path in directory.iterdir()) == ["notes", "step-000000009"]


def test_everything_is_on_the_disk_before_and_after_the_rename(store, monkeypatch):
    events = []
    fsync, replace = os.fsync, os.replace

    def note_sync(descriptor):
        events.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def note_rename(source, target):
        events.append("rename")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(os, "replace", note_rename)
    path = pathlib.Path(store.write(_make_checkpoint(1)))
    before, after = events[: events.index("rename")], events[events.index("rename") + 1 :]
    files = {file.name for file in path.iterdir()} - {"state.json"}
    assert {*files, "state.json.writing", path.name, "checkpoints"} <= set(before)
    assert after == [path.name]


def _make_weights(step, **values):
    """A checkpoint of a weight, its optimizer's slot and a statistic."""
    arrays = {"weight": 1.0, "slot": 1.0, "statistic": 1.0} | values
    roles = {"weight": "model", "slot": "optimizer", "statistic": "model"}
    records = {
        name: VariableRecord(role, f"of/{name}", (), "float32", trainable=name == "weight")
        for name, role in roles.items()
    }
    return Checkpoint(
        step=step,
        arrays={name: np.float32(value) for name, value in arrays.items()},
        state={},
        structure=Structure(records),
    )


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_one_of_weights_that_are_not_finite_is_passed_over(store, value, caplog):
    store.write(_make_weights(1, slot=np.inf, statistic=np.inf))
    store.write(_make_weights(2, weight=value))
    assert store.read_newest().step == 1
    (message,) = [record.getMessage() for record in caplog.records]
    assert message == (
        "The checkpoint of step 2 holds NaN or infinity in of/weight: using the one before it."
    )
    store.write(_make_weights(2))
    assert store.list_steps() == [1, 2]
    assert store.read_newest().step == 2


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_finds_what_is_not_finite(dtype):
    arrays = {name: tf.ones([2, 2], dtype).numpy() for name in "abc"}
    arrays["integers"] = np.array([1, 2])
    assert find_nonfinite(arrays) is None
    arrays["b"][1, 1] = np.nan
    arrays["c"][0, 0] = np.inf
    assert find_nonfinite(arrays) == "b"
    variables = [keras.Variable(arrays[name], dtype=dtype, name=name) for name in "abc"]
    assert find_nonfinite(variables) == variables[1].path
    variables[1].assign(tf.zeros([2, 2], dtype))
    assert find_nonfinite(variables) == variables[2].path
    assert find_nonfinite(variables[:2]) is None


def test_works_on_a_file_system_of_tensorflow():
    store = CheckpointStore("ram://a run/checkpoints")
    store.write(_make_checkpoint(7))
    assert store.read_newest().step == 7
    assert store.list_steps() == [7]
    store.write(_make_checkpoint(7, best_step=7))
    assert store.read_newest().best_step == 7
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
