"""A program with several calls of `fit` that is stopped in one of them, and run again."""

import functools
import os
import shutil
import subprocess
import sys
import tempfile

import keras
import numpy as np
import pytest

import tfdist
from tests import zoo
from tfdist.errors import TfdistError
from tfdist.training.fit.schedule import Progress
from tfdist.training.step.model_variables import hash_weights

X = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
Y = X.sum(1, keepdims=True)


class StopAt(keras.callbacks.Callback):
    """Asks for a stop after some of the steps of all calls of `fit`, as a signal would."""

    def __init__(self, step):
        super().__init__()
        self._left = step
        self.request_stop = None

    def on_train_batch_end(self, batch, logs=None):
        self._left -= 1
        if self._left == 0:
            self.request_stop()


def _build():
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    return model


@pytest.fixture(autouse=True)
def _no_seed_is_left():
    yield
    import tensorflow as tf

    tf.random.set_seed(None)


def _run(directory, *, stop_at=0, strategy_name="one_device", epochs=2, rate=0.01):
    """Fits three times, with a learning rate and single batches in between."""
    stop = StopAt(stop_at)
    trainer = tfdist.Trainer(
        _build, strategy=zoo.STRATEGIES[strategy_name](), checkpoint_dir=str(directory)
    )
    stop.request_stop = trainer.request_stop
    options = {"batch_size": 16, "callbacks": [stop], "verbose": 0}
    trainer.fit(X, Y, epochs=epochs, **options)
    trainer.model.optimizer.learning_rate.assign(rate)
    trainer.fit(X, Y, epochs=2, **options)
    trainer.train_on_batch(X[:8], Y[:8])
    trainer.fit(X, Y, epochs=1, **options)
    return trainer, hash_weights(trainer.model)


@functools.cache
def _run_whole(strategy_name="one_device", **change):
    with tempfile.TemporaryDirectory() as directory:
        trainer, found = _run(directory, strategy_name=strategy_name, **change)
    assert trainer.step == 21 + (4 if change.get("epochs") == 3 else 0)
    return found


# 8 and 16 are the last steps of the first two calls of `fit`.
@pytest.mark.thorough(keep=2)
@pytest.mark.filterwarnings("ignore:This trainer was stopped")
@pytest.mark.parametrize(
    ("stop_at", "strategy_name"),
    [
        *((10, "mirrored-2"), (16, "one_device"), (3, "mirrored-2"), (8, "mirrored-2")),
        *((18, "one_device"), (3, "one_device"), (8, "one_device"), (10, "one_device")),
        *((16, "mirrored-2"), (18, "mirrored-2")),
    ],
)
def test_a_stop_in_any_fit_changes_nothing(tmp_path, strategy_name, stop_at):
    trainer, found = _run(tmp_path, stop_at=stop_at, strategy_name=strategy_name)
    assert trainer.progress.was_stopped
    assert found != _run_whole(strategy_name)
    assert _run(tmp_path, strategy_name=strategy_name)[1] == _run_whole(strategy_name)


@pytest.mark.filterwarnings("ignore:This trainer was stopped")
def test_two_stops_change_nothing(tmp_path):
    for stop_at in (3, 7):
        assert _run(tmp_path, stop_at=stop_at)[0].progress.was_stopped
    assert _run(tmp_path)[1] == _run_whole()


def test_a_stop_between_two_fits_is_not_lost(tmp_path):
    trainer = tfdist.Trainer(_build, checkpoint_dir=str(tmp_path))
    trainer.fit(X, Y, verbose=0)
    trainer.request_stop()
    before = hash_weights(trainer.model)
    trainer.fit(X, Y, verbose=0)
    assert trainer.progress.was_stopped
    assert hash_weights(trainer.model) == before


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("change", [{"epochs": 3}, {"rate": 0.02}])
def test_checkpoints_that_began_from_another_state_are_replaced(tmp_path, caplog, change):
    _run(tmp_path / "run")
    expected = _run_whole(**change)
    assert "another state" not in caplog.text
    assert _run(tmp_path / "run", **change)[1] == expected
    assert "fit-2 belong to a training that began from another state of the model" in caplog.text
    caplog.clear()
    assert _run(tmp_path / "run", **change)[1] == expected
    assert not caplog.text


@pytest.mark.parametrize("strategy_name", ["one_device", "mirrored-2"])
def test_a_training_that_begins_from_the_weights_of_another_one(tmp_path, caplog, strategy_name):
    def run(name, stop_at=0):
        first, second = (
            tfdist.Trainer(
                _build,
                strategy=zoo.STRATEGIES[strategy_name](),
                checkpoint_dir=str(tmp_path / name / which),
            )
            for which in ("first", "second")
        )
        stop = StopAt(stop_at)
        stop.request_stop = first.request_stop
        first.fit(X, Y, batch_size=16, epochs=2, callbacks=[stop], verbose=0)
        second.model.set_weights(first.model.get_weights())
        second.fit(X, Y, batch_size=16, epochs=2, verbose=0)
        return hash_weights(second.model), second.progress.resumed_from_step

    expected = run("whole")
    assert run("parts", stop_at=3) != expected
    assert run("parts") == expected
    assert "second belong to a training that began from another state of the model" in caplog.text
    assert run("parts") == (expected[0], 8)


def test_a_training_continues_whose_program_loads_what_it_has_saved(tmp_path, monkeypatch):
    """A process that trains first from other weights than those that the checkpoints began from."""
    saved = []

    def run(directory, stop_at=0):
        monkeypatch.setattr(Progress, "num_fits_of_all", 0)
        trainer = tfdist.Trainer(_build, checkpoint_dir=str(tmp_path / directory))
        if saved:
            trainer.model.set_weights(saved[-1])
        stop = StopAt(stop_at)
        stop.request_stop = trainer.request_stop
        trainer.fit(X, Y, batch_size=16, epochs=2, callbacks=[stop], verbose=0)
        saved.append(trainer.model.get_weights())
        return hash_weights(trainer.model), trainer.progress.resumed_from_step

    expected, _ = run("whole")
    saved.clear()
    assert run("parts", stop_at=3) != (expected, None)
    assert run("parts") == (expected, 3)


def test_a_student_of_a_teacher_that_was_stopped_is_told_what_to_do(tmp_path):
    def run(stop_at=0):
        teacher, student = (
            tfdist.Trainer(_build, checkpoint_dir=str(tmp_path / name))
            for name in ("teacher", "student")
        )
        stop = StopAt(stop_at)
        stop.request_stop = teacher.request_stop
        teacher.fit(X, Y, batch_size=16, epochs=2, callbacks=[stop], verbose=0)
        labels = teacher.predict(X, verbose=0)
        student.fit(X, labels, batch_size=16, epochs=2, verbose=0)
        return hash_weights(student.model)

    begun = run(stop_at=3)
    with pytest.raises(TfdistError, match="another model predicts.*remove the checkpoints of this"):
        run()
    shutil.rmtree(tmp_path / "student")
    found = run()
    shutil.rmtree(tmp_path / "teacher")
    shutil.rmtree(tmp_path / "student")
    assert run() == found != begun


def test_without_a_seed_other_weights_are_expected(tmp_path):
    def build():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("adam", "mse")
        return model

    import tensorflow as tf

    for resumed_from in (None, 4):
        tf.random.set_seed(None)
        trainer = tfdist.Trainer(build, checkpoint_dir=str(tmp_path))
        trainer.model.set_weights([np.random.rand(*w.shape) for w in trainer.model.get_weights()])
        trainer.fit(X, Y, batch_size=16, verbose=0)
        assert trainer.progress.resumed_from_step == resumed_from


SCRIPT = """
import os, signal, sys
import keras, numpy as np, tfdist
from tfdist.errors import TfdistError
from tfdist.training.fit.schedule import Progress
from tfdist.training.step.model_variables import hash_weights

is_stopped, keeps, *directories = sys.argv[1] == "stop", sys.argv[2] == "keep", *sys.argv[3:]
x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")

class Stop(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if is_stopped and epoch == 0:
            os.kill(os.getpid(), signal.SIGTERM)

def build():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    return model

for directory in directories:
    keras.utils.set_random_seed(1)
    model = tfdist.Trainer(build, checkpoint_dir=directory) if keeps else build()
    for rate in (0.1, 0.01):
        getattr(model, "model", model).optimizer.learning_rate = rate
        callbacks = [Stop()] if keeps else [keras.callbacks.BackupAndRestore(directory), Stop()]
        model.fit(x, x.sum(1), batch_size=16, epochs=2, verbose=0, callbacks=callbacks)
    print("end", hash_weights(getattr(model, "model", model)))
"""


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("kind", ["keep", "backup"])
def test_sigterm_ends_a_script_after_a_checkpoint(tmp_path, kind):
    (tmp_path / "script.py").write_text(SCRIPT)

    def run(stop, *names):
        command = [sys.executable, "-m", "tfdist.run", "--strategy=mirrored", "--virtual_devices=2"]
        return subprocess.run(
            [*command, "script.py", stop, kind, *names],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=1000,
            env={**os.environ, "PYTHONPATH": os.getcwd()},
        )

    stopped = run("stop", "parts")
    assert stopped.returncode == 143, stopped.stderr
    assert "end" not in stopped.stdout
    assert "Traceback" not in stopped.stderr
    assert os.listdir(tmp_path / "parts")
    if kind == "keep":
        said = run("go", "parts", "whole").stdout
        ends = [line for line in said.splitlines() if line.startswith("end")]
        assert len(ends) == 2
        assert len(set(ends)) == 1
