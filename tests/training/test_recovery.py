"""A run that was stopped, however and wherever, ends as the one that was not."""

import hashlib
import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests import zoo
from tfdist import Trainer
from tfdist.errors import TfdistError
from tfdist.records.run_directory import RunDirectory
from tfdist.training.checkpoint.files import CheckpointStore
from tfdist.training.checkpoint.recovery import Recovery, _name_arrays
from tfdist.training.step.model_variables import hash_weights

EXAMPLES, BATCH = 40, 8  # 5 steps an epoch
EPOCHS = 12


class Interrupt(keras.callbacks.Callback):
    """Ends training as a crash would, when an event has happened so many times."""

    def __init__(self, event, count):
        super().__init__()
        self._left = count
        setattr(self, event, self._count)

    def _count(self, *_, logs=None):
        self._left -= 1
        if self._left == 0:
            raise InterruptedError


class Counter(keras.callbacks.Callback):
    """A user's own callback that remembers something."""

    epochs = 0

    def on_epoch_end(self, epoch, logs=None):
        self.epochs += 1

    def get_state(self):
        return {"epochs": self.epochs}

    def set_state(self, state):
        self.epochs = state["epochs"]


def _make_model():
    keras.utils.set_random_seed(5)
    model = keras.Sequential(
        [keras.Input([4]), keras.layers.Dense(8, "relu"), keras.layers.Dense(1)]
    )
    model.compile(keras.optimizers.Adam(0.05), "mse", metrics=["mae"])
    return model


def _fit(directory, *extra, **options):
    x = np.random.default_rng(0).normal(size=[EXAMPLES, 4]).astype("f4")
    y = np.random.default_rng(1).normal(size=[EXAMPLES, 1]).astype("f4")  # nothing to generalise
    trainer = Trainer(_make_model, checkpoint_dir=str(directory), seed=3)
    callbacks = [
        keras.callbacks.EarlyStopping(patience=4, restore_best_weights=True),
        keras.callbacks.ReduceLROnPlateau(patience=1, cooldown=1, factor=0.5),
        Counter(),
        *extra,
    ]
    trainer.fit(
        x,
        y,
        validation_data=(x[::-1] * 0.9, y),
        global_batch_size=BATCH,
        epochs=EPOCHS,
        callbacks=callbacks,
        verbose=0,
        **options,
    )
    return trainer, callbacks


def _describe(trainer, callbacks):
    early, plateau, counter, *_ = callbacks
    return {
        "step": trainer.step,
        "weights": hash_weights(trainer.model),
        "history": trainer.history.history,
        "epochs": trainer.history.epoch,
        "early": (early.best, early.wait, early.stopped_epoch, early.best_epoch),
        "plateau": (plateau.best, plateau.wait, plateau.cooldown_counter),
        "counted": counter.epochs,
        "learning_rate": float(trainer.model.optimizer.learning_rate.numpy()),
    }


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    found = _describe(*_fit(tmp_path_factory.mktemp("run")))
    assert 0 < found["early"][2] < EPOCHS - 1, "no early stop: the test would show little"
    assert found["learning_rate"] < 0.05
    return found


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize(
    ("event", "counts"),
    [
        ("on_test_batch_end", (8, 3)),
        ("on_train_batch_begin", (7, 4, 9)),
        ("on_train_batch_end", (6, 5, 1)),
        ("on_epoch_end", (3, 1, 4)),
        ("on_train_end", (1,)),
    ],
)
def test_a_crash_changes_nothing(tmp_path, uninterrupted, event, counts):
    for count in counts:
        with pytest.raises(InterruptedError):
            _fit(tmp_path, Interrupt(event, count), checkpoint_every=2)
    assert _describe(*_fit(tmp_path, checkpoint_every=2)) == uninterrupted


class StopAt(keras.callbacks.Callback):
    """Asks for a stop, as a signal would."""

    def __init__(self, event, count):
        super().__init__()
        self._left = count
        self.request_stop = None
        setattr(self, event, self._count)

    def _count(self, *_, logs=None):
        self._left -= 1
        if self._left == 0:
            self.request_stop()


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize(
    ("event", "count", "step", "epochs"),
    [
        ("on_test_batch_begin", 8, 10, 1),  # in the midst of a validation
        ("on_train_batch_end", 7, 7, 1),
        ("on_train_batch_end", 10, 10, 1),  # the last of an epoch: not validated yet
        ("on_epoch_end", 2, 10, 2),
    ],
)
def test_a_stop_changes_nothing(tmp_path, uninterrupted, event, count, step, epochs, monkeypatch):
    stop = StopAt(event, count)
    make = Trainer.__init__

    def remember(self, *args, **kwargs):
        make(self, *args, **kwargs)
        stop.request_stop = self.request_stop

    monkeypatch.setattr(Trainer, "__init__", remember)
    trainer, _ = _fit(tmp_path, stop)
    assert trainer.progress.was_stopped
    assert (trainer.step, len(trainer.history.epoch)) == (step, epochs)
    stop.request_stop = None
    trainer, callbacks = _fit(tmp_path)
    assert trainer.progress.resumed_from_step == step
    assert _describe(trainer, callbacks) == uninterrupted


def test_a_run_that_a_callback_ended_goes_on_when_asked_for_more(tmp_path):
    class Stop(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.stop_training = True

    x, y = np.zeros([8, 4], "f4"), np.zeros([8, 1], "f4")

    def run(epochs, *callbacks):
        trainer = Trainer(_make_model, checkpoint_dir=str(tmp_path))
        trainer.fit(x, y, global_batch_size=8, epochs=epochs, callbacks=callbacks, verbose=0)
        return trainer.step

    assert run(4, Stop()) == 1
    assert run(4) == 1
    assert run(5) == 5


def test_an_epoch_that_a_callback_ended_in_its_middle_is_ended_by_the_next_run(tmp_path):
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = batch == 1

    x, y = np.ones([32, 4], "f4"), np.ones([32, 1], "f4")

    def run(epochs, *callbacks, directory=tmp_path / "parts"):
        trainer = Trainer(_make_model, checkpoint_dir=str(directory))
        options = {"batch_size": 8, "epochs": epochs, "verbose": 0}
        history = trainer.fit(x, y, callbacks=callbacks, **options)
        return trainer.step, history.epoch, history.history

    assert run(2, Stop())[:2] == (2, [0])
    assert run(3) == run(3, directory=tmp_path / "whole")


def test_a_stop_that_was_asked_for_before_the_first_step():
    trainer = Trainer(_make_model)
    trainer.request_stop()
    x, y = np.zeros([8, 4], "f4"), np.zeros([8, 1], "f4")
    trainer.fit(x, y, batch_size=8, verbose=0)
    assert (trainer.step, trainer.progress.was_stopped) == (0, True)
    with pytest.warns(UserWarning, match="trains no further"):
        assert trainer.fit(x, y, batch_size=8, verbose=0).epoch == []
    assert (trainer.step, trainer.progress.was_stopped) == (0, True)


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize(("event", "count"), [("on_train_batch_end", 6), ("on_epoch_begin", 3)])
def test_weights_that_change_places_with_their_average_come_back(tmp_path, event, count):
    """Interrupted in the middle of an epoch and after one, with weights of which either is held."""

    def build():
        model = _make_model()
        average = keras.optimizers.SGD(0.2, use_ema=True, ema_momentum=0.5)
        model.compile(average, "mse")
        return model

    def fit(directory, *callbacks):
        x = np.random.default_rng(0).normal(size=[32, 4]).astype("f4")
        trainer = Trainer(build, checkpoint_dir=str(tmp_path / directory))
        for callback in callbacks:
            callback.request_stop = trainer.request_stop
        swap = keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
        options = {"batch_size": 8, "epochs": 4, "checkpoint_every": 1, "verbose": 0}
        trainer.fit(x, x[:, :1], callbacks=[swap, *callbacks], **options)
        return trainer

    whole = fit("whole")
    with pytest.raises(InterruptedError):
        fit("parts", Interrupt(event, count))
    parts = fit("parts")
    assert parts.progress.resumed_from_step == {"on_train_batch_end": 5, "on_epoch_begin": 8}[event]
    assert hash_weights(parts.model) == hash_weights(whole.model)
    assert fit("stopped", StopAt(event, count)).progress.was_stopped
    assert hash_weights(fit("stopped").model) == hash_weights(whole.model)


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("checkpoint_every", [None, 1])
@pytest.mark.parametrize(("event", "count"), [("on_train_batch_end", 6), ("on_test_batch_end", 3)])
def test_an_epoch_that_continues_begins_only_once(tmp_path, event, count, checkpoint_every):
    """Stopped or interrupted in the second epoch, or in the validation of the first or second."""

    class Remember(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.begun, self.rates = 0, []

        def on_epoch_begin(self, epoch, logs=None):
            self.begun += 1
            weight = self.model.trainable_weights[0]
            weight.assign(weight * 0.9)

        def on_train_batch_end(self, batch, logs=None):
            self.rates.append(float(self.model.optimizer.learning_rate.numpy()))

        def get_state(self):
            return {"begun": self.begun}

        def set_state(self, state):
            self.begun = state["begun"]

    def fit(directory, *callbacks):
        x = np.random.default_rng(0).normal(size=[32, 4]).astype("f4")
        trainer = Trainer(_make_model, checkpoint_dir=str(tmp_path / directory))
        for callback in callbacks:
            callback.request_stop = trainer.request_stop
        remember = Remember()
        halve = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)
        trainer.fit(
            x,
            x[:, :1],
            batch_size=8,
            validation_data=(x, x[:, :1]),
            callbacks=[halve, remember, *callbacks],
            checkpoint_every=checkpoint_every,
            epochs=3,
            verbose=0,
        )
        return trainer, remember

    whole, expected = fit("whole")
    if checkpoint_every:
        with pytest.raises(InterruptedError):
            fit("parts", Interrupt(event, count))
    else:
        assert fit("parts", StopAt(event, count))[0].progress.was_stopped
    parts, found = fit("parts")
    assert parts.progress.resumed_from_step % 4 or event == "on_test_batch_end"
    assert found.rates == expected.rates[parts.progress.resumed_from_step :]
    assert (found.begun, expected.begun) == (3, 3)
    assert hash_weights(parts.model) == hash_weights(whole.model)
    assert parts.history.history == whole.history.history


def test_a_run_that_ended_within_an_epoch_keeps_it(tmp_path):
    """7 steps are an epoch and two fifths; started again, there is nothing left to do."""
    first, again = (_fit(tmp_path, max_steps=7)[0] for _ in range(2))
    assert again.history.epoch == first.history.epoch == [0, 1]
    assert again.history.history == first.history.history


class _Remember(keras.callbacks.Callback):
    """Remembers the variables after step 2, whose checkpoint is written after the next one."""

    def __init__(self, may_write):
        super().__init__()
        self._may_write, self.values, self._steps = may_write, {}, 0

    def on_train_batch_end(self, batch, logs=None):
        self._steps += 1
        if self._steps == 2:
            every = [*self.model.variables, *self.model.optimizer.variables]
            self.values = {name: value.numpy() for name, value in _name_arrays(every).items()}
        if self._steps == 3:
            self._may_write.set()


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adafactor"])
@pytest.mark.parametrize(
    ("strategy", "jit_compile"),
    [
        ("mirrored-2", False),
        ("one_device", True),
        ("one_device", False),
        ("central_storage-2", False),
    ],
)
def test_a_checkpoint_keeps_its_step_while_training_continues(
    tmp_path, monkeypatch, strategy, optimizer, jit_compile
):
    """The values are not copied: a step must not write over those that are not written yet."""
    may_write = threading.Event()
    write = CheckpointStore.write

    def wait_and_write(store, checkpoint):
        assert may_write.wait(60)
        return write(store, checkpoint)

    def build():
        keras.utils.set_random_seed(5)
        model = keras.Sequential(
            [
                keras.Input([4]),
                keras.layers.Embedding(20, 3),  # SGD updates single rows of it
                keras.layers.Flatten(),
                keras.layers.BatchNormalization(),
                keras.layers.Dense(1),
            ]
        )
        model.compile(optimizer, "mse", metrics=["mae"], jit_compile=jit_compile)
        return model

    monkeypatch.setattr(CheckpointStore, "write", wait_and_write)
    x = np.random.default_rng(0).integers(0, 20, size=[24, 4])
    y = np.random.default_rng(1).normal(size=[24, 1]).astype("f4")
    remember = _Remember(may_write)
    trainer = Trainer(build, strategy=zoo.STRATEGIES[strategy](), checkpoint_dir=str(tmp_path))
    trainer.fit(x, y, batch_size=8, checkpoint_every=2, callbacks=[remember], verbose=0)
    arrays = CheckpointStore(str(tmp_path)).read(2).arrays
    assert len(remember.values) > 8
    last = {variable.path: variable.numpy() for variable in trainer.model.trainable_variables}
    for name, value in remember.values.items():
        np.testing.assert_array_equal(arrays[name], value, err_msg=name)
    assert all((arrays[f"variables/{path}"] != value).any() for path, value in last.items())


def test_checkpoints_by_the_clock(tmp_path):
    with pytest.raises(InterruptedError):
        _fit(tmp_path / "some", Interrupt("on_train_batch_begin", 8), checkpoint_every_s=1e-9)
    again, _ = _fit(tmp_path / "some")
    assert again.progress.resumed_from_step == 7
    with pytest.raises(InterruptedError):
        _fit(tmp_path / "few", Interrupt("on_train_batch_begin", 8), checkpoint_every_s=1e9)
    again, _ = _fit(tmp_path / "few")
    assert again.progress.resumed_from_step == 5


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize(
    "path",
    [
        ["mirrored-2", "central_storage-2"],
        ["mirrored-3", "one_device", "central_storage-2", "mirrored-2", "mirrored-3"],
    ],
    ids=["once", "four times"],
)
def test_other_replicas_continue_where_those_before_stopped(tmp_path, path):
    """Stopped under another strategy each time."""
    example = zoo.EXAMPLES["convolutional"]
    x, y = example.data
    *path, last = path

    def run(strategy, directory, *callbacks):
        trainer = Trainer(
            lambda: example.build(keras.optimizers.SGD(0.05, momentum=0.9)),
            strategy=zoo.STRATEGIES[strategy](),
            checkpoint_dir=str(directory),
            seed=5,
        )
        for callback in callbacks:
            callback.request_stop = trainer.request_stop
        trainer.fit(
            x,
            y,
            validation_data=(x, y),
            global_batch_size=16,
            max_steps=20,
            callbacks=callbacks,
            verbose=0,
        )
        return trainer

    whole = run("one_device", tmp_path / "whole")
    for count, strategy in enumerate(path, start=1):
        trainer = run(strategy, tmp_path / "stopped", StopAt("on_train_batch_end", 4))
        assert trainer.step == 4 * count
    trainer = run(last, tmp_path / "stopped")
    assert (trainer.progress.resumed_from_step, trainer.step) == (4 * len(path), 20)
    pairs = zip(trainer.model.weights, whole.model.weights, strict=True)
    ours, expected = zip(*((ours.numpy(), other.numpy()) for ours, other in pairs), strict=True)
    assert zoo.largest_difference(ours, expected) < 1e-5
    for name, values in whole.history.history.items():
        np.testing.assert_allclose(trainer.history.history[name], values, rtol=1e-4)


def _change_record(directory, change):
    """Changes the record of a checkpoint, as if it had been written so."""
    path = directory / "step-000000003" / "state.json"
    record = json.loads(path.read_text())["record"]
    change(record)
    digest = hashlib.sha256(json.dumps(record).encode()).hexdigest()
    path.write_text(json.dumps({"sha256": digest, "record": record}))


def _keep_sums(record):
    """Leaves what the first releases wrote: metrics as sums over the replicas."""
    state = record["state"]
    state["metrics"] = [np.sum(parts, 0).tolist() for parts in state.pop("metric_states")]
    for name in ("reading", "data", "steps_per_epoch"):
        del state[name]
    del record["begun_from"]


@pytest.mark.parametrize("change", [lambda record: None, _keep_sums], ids=["all", "first"])
def test_continues_from_a_checkpoint_of_format_1(tmp_path, change):
    """The stored one was written after 3 steps, before checkpoints had the number of a format."""

    def fit(directory, max_steps):
        trainer = Trainer(
            _make_model,
            strategy=zoo.STRATEGIES["mirrored-2"](),
            checkpoint_dir=str(tmp_path / directory),
        )
        x, y = np.random.default_rng(0).normal(size=(2, 40, 4)).astype("f4")
        data = {"x": x, "y": y[:, :1], "global_batch_size": BATCH}
        trainer.fit(**data, max_steps=max_steps, verbose=0)
        return trainer

    whole = fit("whole", 5)
    shutil.copytree(pathlib.Path(__file__).with_name("format_1"), tmp_path / "parts")
    _change_record(tmp_path / "parts", change)
    parts = fit("parts", 5)
    assert parts.progress.resumed_from_step == 3
    for name, values in whole.history.history.items():
        np.testing.assert_allclose(parts.history.history[name], values, rtol=1e-5)
    names = tf.train.list_variables(str(tmp_path / "parts" / "step-000000005" / "variables"))
    assert {f"variables/{v.path}" for v in parts.model.variables} <= {name for name, _ in names}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda record: record.update(format=3), "it has format 3, and this tfdist knows formats"),
        (lambda record: record.pop("structure"), "it does not describe its variables"),
    ],
)
def test_a_checkpoint_of_an_unknown_format_is_refused(tmp_path, change, message):
    shutil.copytree(pathlib.Path(__file__).with_name("format_1"), tmp_path / "run")
    _change_record(tmp_path / "run", change)
    with pytest.raises(TfdistError, match=message):
        _fit_steps(tmp_path / "run", 5)


def _fit_steps(directory, max_steps, *callbacks):
    trainer = Trainer(_make_model, checkpoint_dir=str(directory))
    x, y = np.zeros([8, 4], "f4"), np.zeros([8, 1], "f4")
    trainer.fit(x, y, global_batch_size=8, max_steps=max_steps, callbacks=callbacks, verbose=0)
    return trainer


class Try(keras.callbacks.Callback):
    """Trains in the same directory at the end of the second epoch."""

    def __init__(self, directory):
        super().__init__()
        self._directory = directory
        self.error = None

    def on_epoch_end(self, epoch, logs=None):
        if epoch == 1:
            with pytest.raises(TfdistError) as found:
                _fit_steps(self._directory, 9)
            self.error = str(found.value)


def test_a_second_trainer_on_the_same_checkpoints_is_refused(path_with_spaces):
    second = Try(path_with_spaces)
    assert _fit_steps(path_with_spaces, 4, second).step == 4
    assert second.error == (
        f"checkpoint_dir={path_with_spaces} is in use by process {os.getpid()} on "
        f"{socket.gethostname()}, which is this process. Wait for it to end, or give another "
        "checkpoint_dir."
    )
    assert _fit_steps(path_with_spaces, 6).progress.resumed_from_step == 4


def test_a_trainer_that_failed_leaves_the_checkpoints_to_the_next(tmp_path):
    with pytest.raises(InterruptedError) as held:  # its traceback keeps the trainer
        _fit_steps(tmp_path, 4, Interrupt("on_epoch_end", 2))
    assert _fit_steps(tmp_path, 4).progress.resumed_from_step == 1
    assert held


def test_a_process_that_is_killed_leaves_the_checkpoints_to_the_next(path_with_spaces):
    code = (
        "import sys, time\n"
        "from tfdist.records.run_lock import hold_run_lock\n"
        "with hold_run_lock(sys.argv[1]): print('held', flush=True); time.sleep(60)"
    )
    arguments = [sys.executable, "-c", code, str(path_with_spaces)]
    owner = subprocess.Popen(arguments, stdout=subprocess.PIPE)
    try:
        assert owner.stdout.readline() == b"held\n"
        with pytest.raises(TfdistError, match=f"is in use by process {owner.pid} on .*another ch"):
            _fit_steps(path_with_spaces, 1)
    finally:
        owner.kill()
        owner.communicate()
    assert _fit_steps(path_with_spaces, 1).step == 1


def test_a_command_that_holds_the_run_directory_trains_in_it(tmp_path):
    run = RunDirectory(str(tmp_path / "run"))
    with run.claim({}, result={}):
        assert _fit_steps(run.checkpoints, 1).step == 1


def test_a_finished_training_is_read_where_nothing_can_be_written(tmp_path, monkeypatch):
    _fit_steps(tmp_path, 2)
    (tmp_path / ".lock").unlink()
    monkeypatch.setattr(os, "access", lambda path, mode: path != str(tmp_path))
    assert _fit_steps(tmp_path, 2).progress.resumed_from_step == 2
    assert not (tmp_path / ".lock").exists()


def test_other_file_systems_have_no_lock(path_with_spaces):
    directory = f"ram://{path_with_spaces}/checkpoints"
    _fit_steps(directory, 1)
    assert tf.io.gfile.listdir(directory) == ["step-000000001"]


def _make_dataset(x, seed):
    data = tf.data.Dataset.from_tensor_slices((x, x[:, :1]))
    return {"x": data.shuffle(16, seed=seed).batch(4)}


def _make_pages(x, seed):
    class Pages(keras.utils.PyDataset):
        def __len__(self):
            return len(x) // 4

        def __getitem__(self, index):
            return x[index * 4 : index * 4 + 4], x[index * 4 : index * 4 + 4, :1]

    return {"x": Pages()}


DATA = {
    "arrays": lambda x, seed: {"x": x, "y": x[:, :1], "batch_size": 4},
    "unshuffled": lambda x, seed: {"x": x, "y": x[:, :1], "batch_size": 4, "shuffle": False},
    "dataset": _make_dataset,
    "pages": _make_pages,
}
_X = np.random.default_rng(0).normal(size=[16, 4]).astype("f4")
_CHANGED = np.concatenate([_X[:9], _X[9:10] + 1, _X[10:]])


@pytest.mark.thorough(keep=4)
@pytest.mark.parametrize(
    ("before", "name", "options", "difference"),
    [
        ("arrays", "arrays", {"x": _CHANGED}, "example 9 of array 0 changed"),
        ("dataset", "dataset", {"seed": 2}, "the seed of shuffle is 2 instead of 1"),
        ("pages", "pages", {}, None),
        ("unshuffled", "unshuffled", {"seed": 2}, None),
        ("arrays", "arrays", {}, None),
        ("arrays", "arrays", {"seed": 2}, "the seed of the order is 2 instead of 1"),
        ("arrays", "unshuffled", {}, "shuffle is False instead of True"),
        ("dataset", "dataset", {}, None),
        ("dataset", "dataset", {"x": _CHANGED}, "example 9 of tensor 0 changed"),
        ("pages", "pages", {"x": _X[:12]}, "3 batches instead of 4"),
        ("pages", "dataset", {}, "the kind is dataset instead of batches"),
    ],
)
def test_continues_on_the_same_data_only(tmp_path, before, name, options, difference):
    def fit(name, max_steps, x=_X, seed=1):
        trainer = Trainer(_make_model, checkpoint_dir=str(tmp_path), seed=seed)
        trainer.fit(**DATA[name](x, seed), max_steps=max_steps, verbose=0)
        return trainer

    fit(before, 2)
    if difference is None:
        assert fit(name, 5, **options).progress.resumed_from_step == 2
        return
    with pytest.raises(TfdistError, match=f"Cannot continue after step 2: {difference}") as found:
        fit(name, 5, **options)
    assert "\n" not in str(found.value)


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("kept", [(), ("format", "kind", "num_examples", "element_spec")])
def test_continues_from_a_checkpoint_that_says_less_about_the_data(tmp_path, monkeypatch, kept):
    def agree(workers, adapter):
        return {name: part for name, part in adapter.make_fingerprint().items() if name in kept}

    def fit(max_steps):
        trainer = Trainer(_make_model, checkpoint_dir=str(tmp_path))
        trainer.fit(**DATA["dataset"](_X, 1), max_steps=max_steps, verbose=0)
        return trainer

    with monkeypatch.context() as patch:
        patch.setattr("tfdist.training.fit.trainer.agree_on_data", agree)
        fit(2)
    assert fit(5).progress.resumed_from_step == 2


class WorkerOne:
    """The second of two workers, whose chief is refused."""

    is_chief = False
    index = 1

    def ask_chief(self, number):
        assert number == -1
        return -2


def test_the_other_workers_stop_when_the_chief_is_refused(tmp_path):
    recovery = Recovery(str(tmp_path), keep=1, workers=WorkerOne())
    with pytest.raises(TfdistError, match="Worker 1 stops: the chief cannot use the checkpoints"):
        recovery.restore([])
    assert not list(tmp_path.iterdir())


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("kind", ["of unknown length", "pages", "arrays", "endless"])
def test_a_run_that_begins_with_a_later_epoch_continues(kind, tmp_path):
    x, y = np.arange(64, dtype="f4").reshape(32, 2) / 64, np.arange(32, dtype="f4") / 32

    class Pages(keras.utils.PyDataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            return x[index * 8 : index * 8 + 8], y[index * 8 : index * 8 + 8]

    def run(directory, *, stop_at=None):
        keras.utils.set_random_seed(1)  # of which the order of a shuffled dataset is made, too
        pairs = tf.data.Dataset.from_tensor_slices((x, y))
        data = {
            "arrays": lambda: {"x": x, "y": y, "batch_size": 8},
            "endless": lambda: {"x": pairs.batch(8).repeat(), "steps_per_epoch": 3},
            "pages": lambda: {"x": Pages()},
            "of unknown length": lambda: {
                "x": pairs.shuffle(32, seed=1).batch(8).filter(lambda *batch: True)
            },
        }[kind]()

        def build():
            keras.utils.set_random_seed(1)
            model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
            model.compile("adam", "mse")
            return model

        trainer = Trainer(build, checkpoint_dir=str(directory))

        def end(batch, logs):
            if trainer.step == stop_at:
                trainer.request_stop()

        stop = keras.callbacks.LambdaCallback(on_train_batch_end=end)
        trainer.fit(**data, epochs=4, initial_epoch=1, verbose=0, callbacks=[stop])
        return trainer

    whole = run(tmp_path / "whole")
    steps = whole.step // 4
    stopped = run(tmp_path / "stopped", stop_at=2 * steps + 2)
    assert stopped.progress.was_stopped
    continued = run(tmp_path / "stopped")
    assert continued.progress.resumed_from_step == 2 * steps + 2
    assert hash_weights(continued.model) == hash_weights(whole.model)
