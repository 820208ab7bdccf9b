import pathlib

import keras
import numpy as np
import pytest

from tfdist.errors import TfdistError
from tfdist.training.checkpoints import CheckpointStore


def _make_variables(value):
    return [keras.Variable(np.full((3, 2), value, "f4")), keras.Variable(np.array(value, "i8"))]


@pytest.fixture
def store(path_with_spaces):
    return CheckpointStore(str(path_with_spaces / "checkpoints"), keep=2)


def test_gives_back_the_newest(store):
    for step in (1, 2):
        store.save(step=step, variables=_make_variables(step), state={"step": step})
    variables = _make_variables(0)
    assert store.restore(variables) == {"step": 2}
    assert variables[0].numpy().max() == 2
    assert int(variables[1].numpy()) == 2


def test_nothing_to_restore(store):
    assert store.restore(_make_variables(0)) is None


def test_keeps_the_newest_and_the_best(store):
    for step in range(1, 6):
        if step == 2:
            store.mark_best(2)
        store.save(step=step, variables=_make_variables(step), state={})
    assert store.list_steps() == [2, 4, 5]
    assert store.best_step() == 2


def test_a_checkpoint_cut_short_is_not_one(store):
    store.save(step=1, variables=_make_variables(1), state={"step": 1})
    path = store.save(step=2, variables=_make_variables(2), state={"step": 2})
    (pathlib.Path(path) / "state.json").unlink()
    assert store.restore(_make_variables(0)) == {"step": 1}


@pytest.mark.parametrize("damage", ["truncate", "flip"])
def test_a_damaged_one_is_passed_over(store, damage):
    store.save(step=1, variables=_make_variables(1), state={"step": 1})
    path = pathlib.Path(store.save(step=2, variables=_make_variables(2), state={"step": 2}))
    data = next(path.glob("variables.data*"))
    content = bytearray(data.read_bytes())
    if damage == "truncate":
        content = content[:-1]
    else:
        content[3] ^= 0xFF
    data.write_bytes(content)
    variables = _make_variables(0)
    assert store.restore(variables) == {"step": 1}
    assert variables[0].numpy().max() == 1
    (path.parent / "step-000000001" / "variables.index").write_bytes(b"")
    with pytest.raises(TfdistError, match="None of the 2 checkpoints"):
        store.restore(variables)


def test_refuses_another_model_s(store):
    store.save(step=1, variables=_make_variables(1), state={})
    with pytest.raises(TfdistError, match=r"another model .*float32\[3, 2\].*float32\[4\]"):
        store.restore([keras.Variable(np.zeros(4, "f4")), keras.Variable(np.array(0, "i8"))])


def test_works_on_a_file_system_of_tensorflow():
    store = CheckpointStore("ram://a run/checkpoints")
    store.save(step=7, variables=_make_variables(7), state={"step": 7})
    variables = _make_variables(0)
    assert store.restore(variables) == {"step": 7}
    assert store.list_steps() == [7]


def test_says_what_to_do_when_it_cannot_write():
    with pytest.raises(OSError, match=r"Cannot write the checkpoint /proc/.* run the same command"):
        CheckpointStore("/proc/nowhere").save(step=1, variables=_make_variables(1), state={})
