"""The loop of `fit`: steps one by one or several at a time, epochs and checkpoints."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests import zoo
from tests.training.programs import X, Y, dense
from tfdist.errors import TfdistError, TrainingError
from tfdist.runs.callbacks import Throughput
from tfdist.strategies import LocalSgdStrategy
from tfdist.training.kinds.synchronous import SynchronousSteps
from tfdist.training.replicas.step_checks import check_strategy
from tfdist.training.step.model_variables import hash_weights
from tfdist.training.step_options import StepOptions

EPOCHS, STEPS_PER_EPOCH, BATCH = 2, 4, 12  # loops of three: 3, 1, 3, 1
ADAM = lambda: keras.optimizers.Adam(1e-2)  # noqa: E731


class Seen(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.logs = []
        self.order = ""

    def on_train_batch_begin(self, batch, logs=None):
        self.order += f"({batch}"

    def on_train_batch_end(self, batch, logs=None):
        self.order += ")"
        self.logs.append(dict(logs))


def _make(example, strategy_name="one_device", **options):
    return zoo.make_trainer(
        lambda: example.build(ADAM()), strategy=zoo.STRATEGIES[strategy_name](), **options
    )


def _fit(trainer, example, *callbacks, **options):
    options = {"epochs": EPOCHS, "steps_per_epoch": STEPS_PER_EPOCH, **options}
    return trainer.fit(
        *example.data,
        sample_weight=example.sample_weight,
        global_batch_size=BATCH,
        callbacks=callbacks,
        verbose=0,
        **options,
    )


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize(
    ("model_name", "strategy_name"),
    [
        ("two_inputs", "central_storage-2"),
        ("unet", "one_device"),
        ("random", "mirrored-2"),
    ],
)
def test_loops_end_where_single_steps_end(model_name, strategy_name):
    example, found = zoo.EXAMPLES[model_name], []
    for steps_per_loop in (1, 3):
        trainer, seen = _make(example, strategy_name, steps_per_loop=steps_per_loop), Seen()
        history = _fit(trainer, example, seen).history
        assert trainer.engine.count_traces()["train"] == 1
        weights = [weight.numpy() for weight in trainer.model.weights]
        found.append((weights, history, seen))
    (weights, history, seen), (of_loops, history_of_loops, seen_of_loops) = found
    assert zoo.largest_difference(of_loops, weights) < 1e-6
    assert seen_of_loops.order == seen.order == "(0)(1)(2)(3)" * EPOCHS
    for logs, expected in zip(seen_of_loops.logs, seen.logs, strict=True):
        assert logs == pytest.approx(expected, rel=1e-5)
    assert seen.logs[0] != seen.logs[1]
    for name, values in history.items():
        assert history_of_loops[name] == pytest.approx(values, rel=1e-5), name


def test_a_loop_ends_where_a_checkpoint_is_due(tmp_path):
    example = zoo.EXAMPLES["dense"]
    whole = _make(example, steps_per_loop=3)
    _fit(whole, example)
    stopped = _make(example, steps_per_loop=3, checkpoint_dir=str(tmp_path), keep_checkpoints=9)
    stop = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: stopped.request_stop()
    )
    _fit(stopped, example, stop, checkpoint_every=2)
    assert (stopped.step, stopped.progress.was_stopped) == (2, True)
    continued = _make(example, steps_per_loop=3, checkpoint_dir=str(tmp_path))
    _fit(continued, example, checkpoint_every=2)
    assert continued.progress.resumed_from_step == 2
    assert hash_weights(continued.model) == hash_weights(whole.model)


def test_saves_where_a_checkpoint_is_due_and_after_each_epoch(tmp_path):
    example = zoo.EXAMPLES["dense"]
    trainer = _make(example, checkpoint_dir=str(tmp_path), keep_checkpoints=9)
    _fit(trainer, example, checkpoint_every=3)
    steps = {int(path.name.split("-")[1]) for path in tmp_path.glob("step-*")}
    assert steps == {3, 4, 6, 8}


def test_names_the_step_in_a_loop_whose_loss_is_not_finite():
    example = zoo.EXAMPLES["dense"]
    trainer = _make(example, steps_per_loop=3)
    x, y = example.data
    x = np.concatenate([x[:BATCH], np.full_like(x[:BATCH], np.nan), x[:BATCH]])
    y = np.concatenate([y[:BATCH]] * 3)
    with pytest.raises(TrainingError, match="The loss of step 2 is nan"):
        trainer.fit(x, y, global_batch_size=BATCH, shuffle=False, verbose=0)


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("steps_per_epoch", [None, 6])
def test_a_loop_does_not_reach_beyond_data_of_unknown_length(steps_per_epoch):
    example = zoo.EXAMPLES["dense"]
    dataset = tf.data.Dataset.from_tensor_slices(example.data).batch(BATCH).take(STEPS_PER_EPOCH)
    dataset = dataset.filter(lambda *batch: True)
    found = []
    for steps_per_loop in (1, 3):
        trainer = _make(example, steps_per_loop=steps_per_loop)
        with contextlib.nullcontext() if steps_per_epoch is None else pytest.warns(match="ran out"):
            trainer.fit(dataset, epochs=EPOCHS, steps_per_epoch=steps_per_epoch, verbose=0)
        found.append((trainer.step, trainer.history.history, hash_weights(trainer.model)))
    assert found[0] == found[1]


@pytest.fixture
def _ahead(monkeypatch):
    """Starts each step before the results of the last one are read, as on GPUs."""
    monkeypatch.setattr(SynchronousSteps, "runs_ahead", True)


class Late(Seen):
    async_safe = True


@pytest.mark.thorough(keep=2)
@pytest.mark.usefixtures("_ahead")
@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize("steps_per_loop", [1, 3])
def test_callbacks_that_allow_it_see_a_step_while_the_next_one_runs(steps_per_loop, is_known):
    example, found = zoo.EXAMPLES["dense"], []
    dataset = tf.data.Dataset.from_tensor_slices(example.data).batch(BATCH).take(STEPS_PER_EPOCH)
    if not is_known:
        dataset = dataset.filter(lambda *batch: True)
    for make_callback in (Seen, Late):
        trainer, seen = _make(example, steps_per_loop=steps_per_loop), make_callback()
        history = trainer.fit(dataset, epochs=EPOCHS, callbacks=[seen], verbose=0).history
        found.append((hash_weights(trainer.model), history, seen.logs, seen.order))
    assert found[0][:-1] == found[1][:-1]
    orders = [order for *_, order in found]
    if steps_per_loop == 1 and is_known:
        assert orders == ["(0)(1)(2)(3)" * EPOCHS, "(0(1)(2)(3))" * EPOCHS]
    elif steps_per_loop == 1:  # data that have ended are asked for a batch
        assert orders == ["(0)(1)(2)(3)(4" * EPOCHS, "(0(1)(2)(3)(4)" * EPOCHS]


class SeenTests(keras.callbacks.Callback):
    def __init__(self, stop_after=None):
        super().__init__()
        self.logs = []
        self.order = ""
        self._stop_after = stop_after

    def on_test_batch_begin(self, batch, logs=None):
        self.order += f"({batch}"

    def on_test_batch_end(self, batch, logs=None):
        self.order += ")"
        self.logs.append((batch, dict(logs)))
        self.model.stop_evaluating = batch == self._stop_after


class LateTests(SeenTests):
    async_safe = True


@pytest.mark.usefixtures("_ahead")
@pytest.mark.parametrize("is_known", [True, False])
def test_an_evaluation_runs_ahead_of_callbacks_that_allow_it(is_known):
    example, found = zoo.EXAMPLES["dense"], []
    dataset = tf.data.Dataset.from_tensor_slices(example.data).batch(BATCH)  # 4, of 40 examples
    if not is_known:
        dataset = dataset.filter(lambda *batch: True)
    trainer = _make(example)
    _fit(trainer, example)
    for seen in (SeenTests(), LateTests()):
        logs = trainer.evaluate(dataset, callbacks=[seen], verbose=0)
        found.append((logs, seen.logs, seen.order))
    assert found[0][:-1] == found[1][:-1]
    asked = "" if is_known else "(4"
    assert found[0][-1] == f"(0)(1)(2)(3){asked}"
    assert found[1][-1] == (f"(0(1)(2)(3)){asked}" if is_known else "(0(1)(2)(3)(4)")
    late = LateTests(stop_after=1)
    trainer.evaluate(dataset, callbacks=[late], verbose=0)
    assert late.order == "(0(1)(2))"


class SeenPredictions(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.order = ""
        self.outputs = []

    def on_predict_batch_begin(self, batch, logs=None):
        self.order += f"({batch}"

    def on_predict_batch_end(self, batch, logs=None):
        self.order += ")"
        self.outputs.append((batch, logs["outputs"].tolist()))


class LatePredictions(SeenPredictions):
    async_safe = True


@pytest.mark.thorough(keep=1)
@pytest.mark.usefixtures("_ahead")
@pytest.mark.parametrize("strategy_name", ["mirrored-2", "one_device"])
def test_a_prediction_runs_ahead_of_callbacks_that_allow_it(strategy_name):
    example, found = zoo.EXAMPLES["dense"], []
    trainer = _make(example, strategy_name)
    _fit(trainer, example)
    for seen in (SeenPredictions(), LatePredictions()):
        x = example.data[0]
        outputs = trainer.predict(x, batch_size=BATCH, callbacks=[seen], verbose=0)
        found.append((outputs.tolist(), seen.outputs, seen.order))
    assert found[0][:-1] == found[1][:-1]
    assert [order for *_, order in found] == ["(0)(1)(2)(3)", "(0(1)(2)(3))"]


@pytest.mark.usefixtures("_ahead")
def test_a_run_that_a_late_callback_stops_continues_to_the_same_bits(tmp_path):
    example = zoo.EXAMPLES["dense"]
    whole = _make(example)
    _fit(whole, example)
    stopped = _make(example, checkpoint_dir=str(tmp_path))
    stop = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: stopped.request_stop()
    )
    stop.async_safe = True
    _fit(stopped, example, stop)
    assert (stopped.step, stopped.progress.was_stopped) == (2, True)
    continued = _make(example, checkpoint_dir=str(tmp_path), keep_checkpoints=9)
    _fit(continued, example, checkpoint_every=3)
    assert continued.progress.resumed_from_step == 2
    assert hash_weights(continued.model) == hash_weights(whole.model)
    steps = {int(path.name.split("-")[1]) for path in tmp_path.glob("step-*")}
    assert steps == {2, 3, 4, 6, 8}


@pytest.mark.usefixtures("_ahead")
def test_names_the_step_whose_loss_is_not_finite_while_the_next_one_runs():
    example = zoo.EXAMPLES["dense"]
    x, y = (np.concatenate([part[:BATCH]] * 3) for part in example.data)
    x[BATCH : 2 * BATCH] = np.nan
    with pytest.raises(TrainingError, match="The loss of step 2 is nan"):
        _make(example).fit(x, y, global_batch_size=BATCH, shuffle=False, verbose=0)


def test_the_first_loop_is_not_measured():
    example = zoo.EXAMPLES["dense"]
    for max_steps, is_measured in ((3, False), (4, True)):
        trainer = _make(example, steps_per_loop=3)
        throughput = Throughput(trainer, BATCH)
        _fit(trainer, example, throughput, max_steps=max_steps)
        assert (throughput.examples_per_second > 0) == is_measured


def test_refuses_workers_that_train_by_themselves():
    strategy = LocalSgdStrategy(tf.distribute.get_strategy())
    with pytest.raises(TfdistError, match="LocalSgdStrategy does not support `steps_per_loop`"):
        check_strategy(StepOptions(steps_per_loop=3), strategy, num_workers=2)


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("strategy_name", ["mirrored-2", "one_device"])
def test_training_on_a_batch_in_a_callback_takes_no_step_of_the_epochs(strategy_name):
    def fit(trainer, model):
        class TrainMore(keras.callbacks.Callback):
            def on_epoch_end(self, epoch, logs=None):
                trainer.train_on_batch(X[:8], Y[:8])

        options = {"batch_size": 8, "epochs": 3, "shuffle": False, "verbose": 0}
        trainer.fit(X, Y, callbacks=[TrainMore()], **options)
        return model.get_weights()

    expected = zoo.trace_once(dense())
    trainer = zoo.make_trainer(dense, strategy=zoo.STRATEGIES[strategy_name]())
    for ours, theirs in zip(fit(trainer, trainer.model), fit(expected, expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    assert trainer.step == 15
