"""A stranger's program gives what Keras gives, under every strategy, or is refused."""

import contextlib
import dataclasses
import functools
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests import zoo
from tests.training import programs
from tests.training.programs import (
    INDIVISIBLE,
    METRICS,
    OPTIMIZERS,
    PROGRAMS,
    SGD,
    DrawsAlways,
    X,
    Y,
    dense,
)
from tfdist.errors import TfdistError
from tfdist.internals import find_untested, python_utils
from tfdist.training.inputs import make_adapter as inputs
from tfdist.training.step.model_variables import hash_weights

pytestmark = [
    pytest.mark.optimized,
    pytest.mark.filterwarnings("ignore:Gradients do not exist"),
]
ALL_PROGRAMS = {**PROGRAMS, **INDIVISIBLE}
EPOCHS = 2
WHOLE_BATCH_LOSSES = (
    "one loss an example",
    "Dice",
    "Tversky",
    "a scalar with weights",
    "a contrast",
    "pairs",
)
FIT = {"epochs": EPOCHS, "verbose": 0, "shuffle": False}


def _read(model):
    return [weight.numpy() for weight in model.weights]


def _fit_keras(program, *, is_built_early=True):
    keras.utils.set_random_seed(1)
    model = program.build()
    if is_built_early:
        zoo.trace_once(model)
    data = program.make_dataset()
    validation = {"validation_data": data} if len(program.data) > 1 else {}
    return model.fit(data, **validation, **FIT).history, _read(model)


@functools.cache
def _fit_keras_once(name):
    return _fit_keras(ALL_PROGRAMS[name])


def _fit(program, strategy_name, *, by_hand=False, **options):
    keras.utils.set_random_seed(1)
    strategy = zoo.STRATEGIES[strategy_name]()
    build = program.build
    if by_hand:
        with strategy.scope():
            build = build()
    trainer = zoo.make_trainer(build, strategy=strategy, **options)
    data = program.make_dataset()
    validation = {"validation_data": data} if len(program.data) > 1 else {}
    return trainer.fit(data, **validation, **FIT).history, _read(trainer.model)


@pytest.mark.thorough(keep=6)
@pytest.mark.parametrize("name", ALL_PROGRAMS)
def test_one_device_is_keras_to_the_bit(name):
    expected, weights = _fit_keras_once(name)
    history, found = _fit(ALL_PROGRAMS[name], "one_device")
    assert history.keys() == expected.keys()
    for key, values in expected.items():
        np.testing.assert_array_equal(history[key], values, err_msg=key)
    for ours, theirs in zip(found, weights, strict=True):
        np.testing.assert_array_equal(ours, theirs)


WAYS = (("mirrored-3", False), ("central_storage-2", True))
# These build their weights, or more variables, after the model was made.
LATE = (
    "no training argument",
    "no training argument around an augmentation",
    "positions",
    "two optimizers",
    "a metric in a layer",
    "several optimizers in one",
    "an average of the weights",
    "Keras's own random numbers",
    "a generator outside of layers",
)


@pytest.mark.thorough(keep=6)
@pytest.mark.parametrize(
    ("name", "strategy_name", "by_hand"),
    [
        *((name, *way) for name, way in zoo.take_turns(PROGRAMS, WAYS)),
        *((name, "mirrored-2", True) for name in LATE),
    ],
)
def test_replicas_end_where_keras_ends(name, strategy_name, by_hand):
    """Over three replicas batches of 8 are of 3, 3 and 2 rows."""
    if name == "Keras's own random numbers":
        # A generator of one strategy does not outlive it.
        keras.src.backend.common.global_state.set_global_attribute("global_seed_generator", None)
    expected, weights = _fit_keras_once(name)
    history, found = _fit(PROGRAMS[name], strategy_name, by_hand=by_hand)
    assert history.keys() == expected.keys()
    for key, values in expected.items():
        np.testing.assert_allclose(history[key], values, rtol=2e-5, atol=1e-6, err_msg=key)
    assert zoo.largest_difference(found, weights) < 1e-5


@pytest.mark.smoke
@pytest.mark.parametrize("strategy_name", ["one_device", "mirrored-3"])
def test_a_model_s_own_prediction_is_what_keras_predicts(strategy_name):
    build = PROGRAMS["own steps"].build
    trainer = tfdist.Trainer(build, strategy=zoo.STRATEGIES[strategy_name]())
    expected = build().predict(X, batch_size=8, verbose=0)
    np.testing.assert_allclose(trainer.predict(X, batch_size=8), expected, rtol=1e-6)


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_of_replicas_ends_where_keras_ends(name):
    def build():
        model = dense(OPTIMIZERS[name]())
        model.optimizer.build(model.trainable_variables)  # Keras builds one too late in `fit`
        return model

    program = programs.Program(build)
    expected, weights = _fit_keras(program)
    history, found = _fit(program, "mirrored-2")
    np.testing.assert_allclose(history["loss"], expected["loss"], rtol=1e-5)
    assert zoo.largest_difference(found, weights) < 1e-5


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("loss", ["cross_entropy", "dice", "focal"])
def test_images_that_count_nothing_change_nothing(loss):
    program = programs.Program(
        lambda: programs.build_segmenting(loss), (programs.PIXELS, programs.LABELS)
    )
    expected, weights = _fit_keras(program)
    history, found = _fit(program, "mirrored-2")
    np.testing.assert_allclose(history["loss"], expected["loss"], rtol=1e-5)
    assert np.isfinite(expected["loss"]).all()
    assert zoo.largest_difference(found, weights) < 1e-5
    ignored = tf.data.Dataset.from_tensor_slices((programs.PIXELS, programs.LABELS)).take(9)
    trainer = tfdist.Trainer(program.build, strategy=zoo.STRATEGIES["mirrored-2"]())
    assert trainer.evaluate(ignored.batch(4), verbose=0, return_dict=True)["loss"] == 0


@pytest.mark.skipif(
    not hasattr(keras.optimizers, "ScheduleFreeAdamW"), reason="Keras 3.13 has no such optimizer"
)
@pytest.mark.parametrize("strategy_name", zoo.STRATEGIES)
def test_an_optimizer_whose_start_keras_loses_is_refused(strategy_name):
    strategy = zoo.STRATEGIES[strategy_name]()
    trainer = tfdist.Trainer(lambda: dense(OPTIMIZERS["ScheduleFreeAdamW"]()), strategy=strategy)
    with pytest.raises(TfdistError, match="Cannot train with ScheduleFreeAdamW as Keras's fit"):
        trainer.fit(X, Y, **ARRAYS, **FIT)


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize("name", sorted(set(OPTIMIZERS) - {"ScheduleFreeAdamW"}))
def test_every_optimizer_may_be_built_late(name):
    program = programs.Program(lambda: dense(OPTIMIZERS[name]()))
    _, weights = _fit_keras(program, is_built_early=False)
    _, found = _fit(program, "one_device")
    assert zoo.largest_difference(found, weights) == 0


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("kind", METRICS)
def test_keras_s_losses_and_metrics_count_every_row_of_replicas_once(kind, is_weighted):
    """Batches of 8, and a last one of 6."""

    def build():
        return programs.build_measured(kind, is_weighted=is_weighted)

    names = build().output_names
    weights = np.linspace(0, 2, 30).astype("f4")
    data = X[:30], dict.fromkeys(names, METRICS[kind][1])
    data += (dict.fromkeys(names, weights),) if is_weighted else ()
    dataset = tf.data.Dataset.from_tensor_slices(data).batch(8)
    expected = build().evaluate(dataset, verbose=0, return_dict=True)
    trainer = tfdist.Trainer(build, strategy=zoo.STRATEGIES["mirrored-2"]())
    found = trainer.evaluate(dataset, verbose=0, return_dict=True)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=2e-5, atol=1e-6, err_msg=name)


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("strategy_name", ["mirrored-3", "one_device"])
@pytest.mark.parametrize("masked", ["some", "", "all"])
@pytest.mark.parametrize("kind", ["place", None])
def test_every_reduction_weighs_and_masks_as_keras_does(strategy_name, masked, kind):
    program = programs.make_reductions(masked, programs.PLACES, 4, kind=kind)
    _check_reductions(strategy_name, program)


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("kind", ["value", None])
def test_reductions_of_images_are_keras_s(kind):
    _check_reductions("mirrored-3", programs.make_reductions("", 2, 3, 4, kind=kind))


def _check_reductions(strategy_name, program):
    dataset = program.make_dataset()
    model = zoo.trace_once(program.build())
    expected = model.fit(dataset, **FIT).history
    trainer = tfdist.Trainer(program.build, strategy=zoo.STRATEGIES[strategy_name]())
    found = trainer.fit(dataset, **FIT).history
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, err_msg=name)
    assert zoo.largest_difference(_read(trainer.model), _read(model)) < 1e-5


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize(
    ("strategy_name", "options"),
    [
        ("mirrored-2", {}),
        ("one_device", {"micro_batches": 2}),
        ("one_device", {}),
        ("central_storage-2", {}),
    ],
)
def test_a_size_that_changes_in_training_is_no_obstacle(strategy_name, options):
    model = zoo.trace_once(programs.build_cropping())
    model.fit(programs.PIXELS, Y, batch_size=8, **FIT)
    strategy = zoo.STRATEGIES[strategy_name]()
    trainer = zoo.make_trainer(programs.build_cropping, strategy=strategy, **options)
    trainer.fit(programs.PIXELS, Y, batch_size=8, **FIT)
    assert zoo.largest_difference(_read(trainer.model), _read(model)) < 1e-5


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("strategy_name", zoo.REPLICAS_FIRST)
def test_a_model_that_predicts_first_trains_as_keras_s(strategy_name):
    model = programs.build_lazily()
    trainer = tfdist.Trainer(programs.build_lazily, strategy=zoo.STRATEGIES[strategy_name]())
    found, expected = (m.predict(X[:7], batch_size=4, verbose=0) for m in (trainer, model))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    for each in (trainer, model):
        each.fit(X, Y, batch_size=8, **FIT)
    assert zoo.largest_difference(_read(trainer.model), _read(model)) < 1e-5


def test_rows_that_keep_a_state_stay_on_one_device():
    x = X.reshape(32, 3, 2)
    _compare_fits(
        lambda model: model.fit(x, Y, **ARRAYS, **FIT).history, build=programs.build_stateful
    )
    trainer = tfdist.Trainer(programs.build_stateful, strategy=zoo.STRATEGIES["mirrored-2"]())
    with pytest.raises(TfdistError, match="keeps a state per example from batch to batch"):
        trainer.fit(x, Y, batch_size=16, **FIT)


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize(
    ("name", "strategy_name", "options"),
    [
        *(
            ("a constraint", strategy_name, options)
            for strategy_name in ("one_device", "mirrored-2")
            for options in ({"micro_batches": 2}, {"steps_per_loop": 2}, {"jit_compile": True})
        ),
        ("a spectral norm", "one_device", {"steps_per_loop": 2}),
        ("a spectral norm", "one_device", {"jit_compile": True}),
        ("a spectral norm", "mirrored-2", {"steps_per_loop": 2}),
        ("a metric in a layer", "one_device", {"micro_batches": 2}),
        ("a metric in a layer", "mirrored-2", {"micro_batches": 2}),
        ("a metric in a layer", "mirrored-2", {"steps_per_loop": 2}),
        ("draws beside a normalization", "mirrored-2", {"steps_per_loop": 3}),
        ("an added sum", "one_device", {"micro_batches": 2}),
        ("one loss an example", "mirrored-2", {"micro_batches": 2}),
        ("a sum by a known size", "mirrored-2", {"steps_per_loop": 2}),
    ],
)
def test_ends_where_keras_ends_however_steps_are_computed(name, strategy_name, options):
    expected, weights = _fit_keras_once(name)
    history, found = _fit(PROGRAMS[name], strategy_name, **options)
    for key, values in expected.items():
        np.testing.assert_allclose(history[key], values, rtol=2e-5, atol=1e-6, err_msg=key)
    assert zoo.largest_difference(found, weights) < 1e-5


@pytest.mark.parametrize(
    ("strategy_name", "options"),
    [("one_device", {"micro_batches": 2}), ("mirrored-2", {"jit_compile": True})],
)
def test_an_assigned_weight_is_refused_where_steps_are_divided(strategy_name, options):
    with pytest.raises(TfdistError, match="the layer 'spectral'"):
        _fit(PROGRAMS["a spectral norm"], strategy_name, **options)


@pytest.mark.thorough(keep=3)
@pytest.mark.parametrize("kind", ["float32", "int32"])
@pytest.mark.parametrize(
    ("strategy_name", "options"),
    [("one_device", {"micro_batches": 2}), ("central_storage-2", {}), ("one_device", {})],
)
def test_a_layer_s_count_of_examples_is_keras_s_or_refused(strategy_name, options, kind):
    program = programs.Program(lambda: dense(between=programs.Counts(kind)))
    if strategy_name == "one_device" and not options:
        _, weights = _fit_keras(program)
        _, found = _fit(program, strategy_name)
        assert zoo.largest_difference(found, weights) == 0
    else:
        with pytest.raises(TfdistError) as refused:
            _fit(program, strategy_name, **options)
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize("strategy_name", ["one_device", "mirrored-3"])
def test_a_metric_may_return_its_variable(strategy_name):
    def build():
        return dense(metrics=[programs.Bare()])

    strategy = zoo.STRATEGIES[strategy_name]()
    found, expected = (
        model.evaluate(X, Y, batch_size=8, verbose=0, return_dict=True)
        for model in (tfdist.Trainer(build, strategy=strategy), build())
    )
    for key, value in expected.items():
        np.testing.assert_allclose(found[key], value, rtol=1e-5, err_msg=key)


@pytest.mark.parametrize("strategy_name", ["one_device", "mirrored-2"])
def test_arrays_of_strings_are_read(strategy_name):
    build = PROGRAMS["texts"].build
    trainer = tfdist.Trainer(build, strategy=zoo.STRATEGIES[strategy_name]())
    found, expected = (
        model.fit(programs.TEXTS, Y, **ARRAYS, **FIT).history["loss"]
        for model in (trainer, build())
    )
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize("name", INDIVISIBLE)
def test_what_replicas_cannot_divide_trains_without_the_check(name):
    history, _ = _fit(INDIVISIBLE[name], "mirrored-2", check="off")
    assert len(next(iter(history.values()))) == EPOCHS


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize(
    ("name", "strategy_name"),
    [*((name, "mirrored-3") for name in WHOLE_BATCH_LOSSES), ("Dice", "central_storage-2")],
)
def test_a_loss_of_the_whole_batch_is_exact_where_outputs_are_gathered(name, strategy_name):
    """Batches of 8, and a last one of 2 rows, which every replica has whole."""
    program = ALL_PROGRAMS[name]
    program = dataclasses.replace(program, data=tuple(part[:18] for part in program.data))
    expected, weights = _fit_keras(program)
    history, found = _fit(program, strategy_name, gather_outputs=True)
    for key, values in expected.items():
        np.testing.assert_allclose(history[key], values, rtol=2e-5, atol=1e-6, err_msg=key)
    assert zoo.largest_difference(found, weights) < 1e-5


@pytest.mark.skipif(bool(find_untested()), reason="under such versions, everything is checked")
def test_what_is_known_to_be_divisible_is_not_checked():
    trainer = tfdist.Trainer(dense, strategy=zoo.STRATEGIES["mirrored-2"]())
    trainer.fit(X, Y, **FIT)
    assert trainer.engine.check_s == 0


def _compare_fits(fit, *, build=dense):
    """Compares what a function does with Keras's model and with a trainer."""
    model = zoo.trace_once(build())
    trainer = tfdist.Trainer(build)
    expected, found = fit(model), fit(trainer)
    np.testing.assert_equal(found, expected)
    for ours, theirs in zip(_read(trainer.model), _read(model), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def _generate():
    for start in range(0, 32, 8):
        yield X[start : start + 8], Y[start : start + 8]


class Pages(keras.utils.PyDataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return X[index * 8 : index * 8 + 8], Y[index * 8 : index * 8 + 8]


ARRAYS = {"batch_size": 8}
FITS = {
    "a data set of pages": ((Pages(),), {}),
    "no batches": ((tf.data.Dataset.from_tensor_slices((X, Y)).batch(8).take(0),), {}),
    "one row": ((X[:1], Y[:1]), ARRAYS),
    "arrays": ((X, Y), ARRAYS),
    "a last batch": ((X[:30], Y[:30]), ARRAYS),
    "weights": ((X, Y), {**ARRAYS, "sample_weight": programs.WEIGHTS}),
    "class weights": ((X, programs.KINDS), {**ARRAYS, "class_weight": {0: 1.0, 1: 3.0}}),
    "a part to validate": ((X, Y), {**ARRAYS, "validation_split": 0.25}),
    "batches to validate": (
        (X, Y),
        {**ARRAYS, "validation_data": (X, Y), "validation_batch_size": 5, "validation_steps": 2},
    ),
    "every second epoch": ((X, Y), {**ARRAYS, "validation_data": (X, Y), "validation_freq": 2}),
    "a later epoch": ((X, Y), {**ARRAYS, "initial_epoch": 1}),
    "a later epoch of fewer steps": (
        (X, Y),
        {**ARRAYS, "epochs": 4, "initial_epoch": 1, "steps_per_epoch": 2},
    ),
    "steps of an epoch": ((X, Y), {**ARRAYS, "steps_per_epoch": 4}),
    "numbers of other kinds": ((X.astype("f8"), (Y > 0).astype("i8")), ARRAYS),
    "a list to validate on": ((X, Y), {**ARRAYS, "validation_data": [X, Y]}),
    "no epochs": ((X, Y), {**ARRAYS, "epochs": 0}),
}


@pytest.mark.thorough  # a new model for each; below, one model takes all of them
@pytest.mark.filterwarnings("ignore:.*data ran out", "ignore:Your input ran out of data")
@pytest.mark.parametrize("name", FITS)
def test_fit_takes_what_keras_takes(name):
    data, options = FITS[name]
    _compare_fits(lambda model: model.fit(*data, **{**FIT, **options}).history)


@pytest.mark.filterwarnings("ignore:.*data ran out", "ignore:Your input ran out of data")
def test_the_same_model_takes_all_that_keras_takes():
    def fit(model):
        return {
            name: model.fit(*data, **{**FIT, **options}).history
            for name, (data, options) in FITS.items()
        }

    _compare_fits(fit)


@pytest.mark.thorough(keep=2)
@pytest.mark.filterwarnings("ignore:.*data ran out", "ignore:Your input ran out of data")
@pytest.mark.parametrize("name", ["generator", "of unknown length", "endless", "shuffled"])
def test_a_later_epoch_begins_with_the_first_data(name):
    def fit(model):
        dataset = tf.data.Dataset.from_tensor_slices((X, Y))
        data = {
            "endless": lambda: dataset.batch(8).repeat(),
            "shuffled": lambda: dataset.shuffle(32, seed=1).batch(8),
            "generator": lambda: (batch for _ in range(2) for batch in _generate()),
            "of unknown length": lambda: (
                dataset.shuffle(32, seed=1).batch(8).filter(lambda *b: True)
            ),
        }[name]()
        steps = 3 if name in ("endless", "generator") else None
        options = {"initial_epoch": 1, "epochs": 3, "steps_per_epoch": steps}
        return model.fit(data, **{**FIT, **options}).history

    _compare_fits(fit)


def test_fit_takes_generators_one_after_the_other():
    """Until one ends, some steps of one, and an endless one; then arrays, twice."""

    def repeat():
        while True:
            yield from _generate()

    spec = (tf.TensorSpec((None, 6)), tf.TensorSpec((None, 2)))
    endless = tf.data.Dataset.from_generator(repeat, output_signature=spec)

    def fit(model):
        once = {"epochs": 1, "verbose": 0, "shuffle": False}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Keras: the data ran out
            fits = [model.fit(_generate(), **once)]
        fits.append(model.fit(_generate(), steps_per_epoch=2, **once))
        fits.append(model.fit(endless, steps_per_epoch=3, **FIT))
        fits += [model.fit(x, Y, **ARRAYS, **FIT) for x in (X, X * 2)]
        return [dict(each.history) for each in fits]

    _compare_fits(fit)


def test_a_model_is_unfrozen_and_compiled_between_two_fits():
    def build():
        model = dense()
        model.get_layer("a").trainable = False
        model.compile(SGD(), "mse")
        return model

    def fit(model):
        of_keras = getattr(model, "model", model)
        first = model.fit(X, Y, **ARRAYS, **FIT).history
        of_keras.get_layer("a").trainable = True
        model.compile(keras.optimizers.SGD(1e-3), "mae")
        return first, model.fit(X, Y, **ARRAYS, **FIT).history

    _compare_fits(fit, build=build)


def test_a_model_is_evaluated_unfrozen_and_compiled_before_it_trains():
    def build():
        model = dense()
        model.get_layer("a").trainable = False
        model.compile(SGD(), "mse")
        return model

    def use(model):
        of_keras = getattr(model, "model", model)
        found = model.evaluate(X, Y, batch_size=8, verbose=0)
        of_keras.get_layer("a").trainable = True
        of_keras.compile(keras.optimizers.SGD(0.01), "mae")
        return found, model.fit(X, Y, **ARRAYS, **FIT).history

    _compare_fits(use, build=build)


def test_a_program_needs_no_optimizer_of_keras_s():
    class Own(keras.Model):
        def compile(self, optimizer):
            super().compile(optimizer=None, loss="mse")
            self.own_optimizer = optimizer

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
            weights = self.trainable_variables
            self.own_optimizer.apply(tape.gradient(loss, weights), weights)
            return {"distance": loss}

    def build():
        compiled = dense()
        model = Own(compiled.inputs, compiled.outputs)
        model.compile(SGD())
        return model

    _compare_fits(lambda model: model.fit(X, Y, **ARRAYS, **FIT).history, build=build)


def test_a_backup_of_keras_s_restores_the_epochs_too(tmp_path):
    class Die(keras.callbacks.Callback):
        def __init__(self, epoch):
            super().__init__()
            self.epoch = epoch
            self.begun = []

        def on_epoch_begin(self, epoch, logs=None):
            if epoch == self.epoch:
                raise InterruptedError
            self.begun.append(epoch)

    found = {}
    for name, make in (("keras", dense), ("trainer", lambda: tfdist.Trainer(dense))):
        for epoch in (2, None):
            model, die = make(), Die(epoch)
            if name == "keras":
                model.build((None, 6))
            callbacks = [keras.callbacks.BackupAndRestore(str(tmp_path / name)), die]
            with contextlib.suppress(InterruptedError):
                model.fit(X, Y, **ARRAYS, **FIT | {"epochs": 4}, callbacks=callbacks)
            steps = getattr(model, "model", model).optimizer.iterations
            found.setdefault(name, []).append((die.begun, int(steps.numpy())))
    assert found["trainer"] == found["keras"] == [([0, 1], 8), ([2, 3], 16)]


def test_callbacks_may_act_at_every_batch(tmp_path):
    callbacks = [
        keras.callbacks.TensorBoard(str(tmp_path / "board"), update_freq=1, profile_batch=0),
        keras.callbacks.ModelCheckpoint(
            str(tmp_path / "models" / "{epoch}-{batch}.keras"), save_freq=2
        ),
    ]
    tfdist.Trainer(dense).fit(X, Y, **ARRAYS, **FIT, callbacks=callbacks)
    assert list((tmp_path / "board").rglob("*tfevents*"))
    names = sorted(path.name for path in (tmp_path / "models").iterdir())
    assert names == ["1-2.keras", "1-4.keras", "2-2.keras", "2-4.keras"]


class Logs(keras.callbacks.Callback):
    """Logs a number of NumPy's, and adds to the history by itself."""

    def on_train_batch_end(self, batch, logs=None):
        self.model.history.history.setdefault("mine", [])

    def on_epoch_end(self, epoch, logs=None):
        logs["number"] = np.float32(0.5)


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("directory", [None, "checkpoints"])
def test_the_history_holds_what_callbacks_log(tmp_path, directory):
    trainer = tfdist.Trainer(dense, checkpoint_dir=directory and str(tmp_path / directory))
    model = dense()
    histories = []
    for each in (trainer, model):
        callbacks = [Logs(), keras.callbacks.LearningRateScheduler(lambda epoch: 0.1 / (1 + epoch))]
        histories.append(each.fit(X, Y, **ARRAYS, **FIT, callbacks=callbacks).history)
    found, expected = histories
    assert found == expected
    assert {"mine", "number", "learning_rate"} <= found.keys()


def test_evaluates_predicts_and_trains_on_batches_as_keras():
    def use(model):
        return (
            model.evaluate(X, Y, batch_size=5, verbose=0),
            model.evaluate(X, Y, batch_size=5, verbose=0, return_dict=True),
            model.train_on_batch(X[:7], Y[:7]),
            model.train_on_batch(X[:7], Y[:7], return_dict=True),
            model.test_on_batch(X[:7], Y[:7]),
            model.predict_on_batch(X[:3]),
            model.predict(X, batch_size=5, steps=2, verbose=0),
        )

    _compare_fits(use, build=lambda: dense(metrics=["mae"]))


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("name", zoo.STRATEGIES)
def test_predictions_of_a_layer_that_always_draws(name):
    def use(model):
        found = [model.predict(X[:25], batch_size=8, verbose=0) for _ in range(2)]
        model.fit(X, Y, batch_size=8, epochs=1, shuffle=False, verbose=0)
        found += [model.predict_on_batch(X[:rows]) for rows in (7, 1)]
        return [*found, model.evaluate(X, Y, batch_size=8, verbose=0)]

    expected = use(zoo.trace_once(dense(between=DrawsAlways())))
    assert np.abs(expected[0] - expected[1]).max() > 0.1
    trainer = tfdist.Trainer(lambda: dense(between=DrawsAlways()), strategy=zoo.STRATEGIES[name]())
    for found, values in zip(use(trainer), expected, strict=True):
        np.testing.assert_allclose(found, values, rtol=1e-5, atol=1e-6)


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("options", [{}, {"steps_per_loop": 2}])
@pytest.mark.parametrize("name", ["mirrored-2", "one_device", "central_storage-2"])
def test_single_batches_change_in_size_and_structure(name, options):
    def use(model):
        found = []
        for rows in (8, 6, 5, 1, 8):
            weights = np.arange(1.0, rows + 1)
            found += [
                model.train_on_batch(X[:rows], Y[:rows]),
                model.train_on_batch(X[:rows], Y[:rows], sample_weight=weights),
                model.test_on_batch(X[:rows], Y[:rows], sample_weight=weights),
                model.predict_on_batch(X[:rows]),
            ]
        return found

    trainer = zoo.make_trainer(dense, strategy=zoo.STRATEGIES[name](), **options)
    for found, expected in zip(use(trainer), use(zoo.trace_once(dense())), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["one_device", "mirrored-2"])
def test_single_batches_make_no_dataset(monkeypatch, name):
    trainer = tfdist.Trainer(dense, strategy=zoo.STRATEGIES[name]())
    trainer.train_on_batch(X[:8], Y[:8])
    trainer.fit(X, Y, **ARRAYS, **FIT)
    for name in ("make_train_dataset", "make_eval_dataset"):
        monkeypatch.setattr(inputs, name, None)
    trainer.train_on_batch(X[:8], Y[:8])
    trainer.test_on_batch(X[:8], Y[:8])
    trainer.predict_on_batch(X[:8])
    assert trainer.engine.count_traces()["train"] == 2  # of the batch, and of the dataset


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("kind", [list, tuple])
def test_inputs_come_in_a_list_or_a_tuple(kind):
    def build():
        inputs = keras.Input((6,)), keras.Input((6,))
        last = keras.layers.Dense(2, kernel_initializer=zoo.seeded(1))
        model = keras.Model(list(inputs), last(keras.layers.Concatenate()(inputs)))
        model.compile(SGD(), "mse")
        return model

    x = kind([X, X * 2])
    _compare_fits(
        lambda model: (
            model.fit(x, Y, **ARRAYS, **FIT).history,
            model.predict(x, batch_size=32, verbose=0),
        ),
        build=build,
    )


def test_rows_of_different_lengths_are_read_on_one_device():
    ragged = tf.RaggedTensor.from_tensor(X[:8])
    data = tf.data.Dataset.from_tensors((ragged, Y[:8]))
    _compare_fits(lambda model: model.fit(data, **FIT).history)
    trainer = tfdist.Trainer(dense, strategy=zoo.STRATEGIES["mirrored-2"]())
    with pytest.raises(TfdistError, match="Cannot split a dataset of RaggedTensorSpec"):
        trainer.fit(data, **FIT)


def test_a_model_that_is_run_eagerly_may_be_of_any_code():
    class Eager(keras.Model):
        def __init__(self):
            super().__init__()
            self.out = keras.layers.Dense(2, kernel_initializer=zoo.seeded(1))

        def call(self, x):
            return self.out(x) * float(np.mean(x.numpy()))

    def build():
        model = Eager()
        model.compile(SGD(), "mse", run_eagerly=True)
        return model

    _compare_fits(lambda model: model.fit(X, Y, **ARRAYS, **FIT).history, build=build)


@pytest.mark.filterwarnings("ignore:Even though the `tf.config")  # that pipelines are compiled
@pytest.mark.parametrize("strategy_name", ["one_device", "mirrored-2"])
def test_functions_run_eagerly_where_tensorflow_is_told_so(strategy_name):
    """As one does to debug a step: before the first fit, or between two."""
    was_eager = []

    class Watched(keras.Model):
        def train_step(self, data):
            was_eager.append(tf.executing_eagerly())
            return super().train_step(data)

    def fit(strategy_name):
        strategy = zoo.STRATEGIES[strategy_name]()
        trainer = zoo.make_trainer(lambda: dense(cls=Watched), strategy=strategy, check="on")
        found = []
        for is_eager in (True, False, True):
            tf.config.run_functions_eagerly(is_eager)
            was_eager.clear()
            found += trainer.fit(X, Y, **ARRAYS, **FIT).history["loss"]
            assert any(was_eager) == is_eager
        return found

    try:
        found = fit(strategy_name)
    finally:
        tf.config.run_functions_eagerly(False)
    alone = dense()
    expected = [loss for _ in range(3) for loss in alone.fit(X, Y, **ARRAYS, **FIT).history["loss"]]
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_eager_replicas_log_the_metrics_of_the_global_batch():
    """Also as numbers, which Keras 3.13 makes of them within the step."""

    class Numbers(keras.Model):
        def get_metrics_result(self):
            return python_utils.pythonify_logs(super().get_metrics_result())

    def fit(strategy_name):
        def build():
            metrics = [keras.metrics.RootMeanSquaredError(name="root"), "mae"]
            return dense(cls=Numbers, metrics=metrics, run_eagerly=True)

        strategy = zoo.STRATEGIES[strategy_name]()
        trainer = zoo.make_trainer(build, strategy=strategy, check="on")
        return trainer.fit(X[:29], Y[:29], **ARRAYS, **FIT).history

    expected, found = fit("one_device"), fit("mirrored-2")
    assert list(found) == list(expected)
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-5)


def test_nothing_to_train_is_measured():
    def build():
        model = dense()
        model.trainable = False
        model.compile(SGD(), "mse")
        return model

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Keras: the model has no trainable weights
        _compare_fits(lambda model: model.fit(X, Y, **ARRAYS, **FIT).history, build=build)


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        (lambda: (_batch(), Y), {}, "Cannot use y with"),
        (lambda: (_batch(),), {"sample_weight": np.ones(32)}, "Cannot use sample_weight with"),
        (lambda: (X,), {"sample_weight": np.ones(32)}, "Cannot weight examples without labels"),
        (lambda: (X, Y), {"sample_weight": np.ones(31)}, "cardinality is ambiguous.*sizes: 31"),
        (lambda: (X[:0], Y[:0]), {}, "must be equal and at least 1, found 0, 0"),
    ],
)
def test_refuses_in_one_line_data_that_do_not_fit(data, options, message):
    with pytest.raises(TfdistError, match=message) as caught:
        tfdist.Trainer(dense).fit(*data(), **options, **FIT)
    assert "\n" not in str(caught.value)


def _batch():
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)


def test_refuses_nothing_to_validate_on():
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)
    with pytest.raises(TfdistError, match="the validation data are empty"):
        tfdist.Trainer(dense).fit(data, validation_data=data.take(0), **FIT)


def test_takes_a_model_made_in_the_scope_and_refuses_another():
    strategy = zoo.STRATEGIES["mirrored-2"]()
    with strategy.scope():
        model = dense()
    trainer = tfdist.Trainer(model)
    assert trainer.strategy is strategy
    trainer.fit(X, Y, **ARRAYS, **FIT)
    expected = zoo.trace_once(dense())
    expected.fit(X, Y, **ARRAYS, **FIT)
    assert zoo.largest_difference(_read(model), _read(expected)) < 1e-5
    with pytest.raises(TfdistError, match="created outside of the strategy's scope"):
        tfdist.Trainer(dense(), strategy=strategy).fit(X, Y, **FIT)


@pytest.mark.parametrize("is_built", [False, True])
@pytest.mark.parametrize("strategy_name", zoo.STRATEGIES)
def test_a_function_may_not_return_a_model_of_elsewhere(strategy_name, is_built):
    model, expected = dense(), dense()
    if is_built:
        model.optimizer.build(model.trainable_variables)
    strategy = zoo.STRATEGIES[strategy_name]()
    if strategy_name == "one_device" and is_built:
        tfdist.Trainer(lambda: model, strategy=strategy).fit(X, Y, **ARRAYS, **FIT)
        expected.fit(X, Y, **ARRAYS, **FIT)
        assert zoo.largest_difference(_read(model), _read(expected)) == 0
    else:
        with pytest.raises(TfdistError, match="created outside of the strategy's scope"):
            tfdist.Trainer(lambda: model, strategy=strategy)


@pytest.mark.parametrize("strategy_name", zoo.STRATEGIES)
@pytest.mark.parametrize(
    ("make", "options"),
    [(SGD, "optimizer"), (keras.metrics.MeanAbsoluteError, "metrics")],
    ids=["optimizer", "metrics"],
)
def test_what_is_compiled_with_is_made_in_the_scope_too(strategy_name, make, options):
    made = make()
    build = lambda: dense(**{options: [made] if options == "metrics" else made})  # noqa: E731
    strategy = zoo.STRATEGIES[strategy_name]()

    def fit():
        trainer = tfdist.Trainer(build, strategy=strategy)
        trainer.fit(X, Y, **ARRAYS, **FIT)
        return trainer

    if strategy_name != "one_device":
        with pytest.raises(TfdistError, match="created outside of the strategy's scope"):
            fit()
        return
    expected = zoo.trace_once(dense())
    expected.fit(X, Y, **ARRAYS, **FIT)
    assert zoo.largest_difference(_read(fit().model), _read(expected)) == 0


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("strategy_name", zoo.REPLICAS_FIRST)
def test_a_model_that_was_saved_trains_on(tmp_path, strategy_name):
    path = str(tmp_path / "model.keras")
    first = dense(keras.optimizers.SGD(0.1, momentum=0.9))
    first.fit(X, Y, **ARRAYS, **FIT)
    first.save(path)
    first.fit(X, Y, **ARRAYS, **FIT)

    def load():
        return keras.models.load_model(path)

    strategy = zoo.STRATEGIES[strategy_name]()
    trainer = tfdist.Trainer(load, strategy=strategy)
    trainer.fit(X, Y, **ARRAYS, **FIT)
    assert zoo.largest_difference(_read(trainer.model), _read(first)) < 1e-5
    assert trainer.model.optimizer.iterations.numpy() == first.optimizer.iterations.numpy()
    model = load()
    if strategy_name == "one_device":
        tfdist.Trainer(model, strategy=strategy).fit(X, Y, **ARRAYS, **FIT)
        assert zoo.largest_difference(_read(model), _read(first)) == 0
    else:
        with pytest.raises(TfdistError, match="created outside of the strategy's scope"):
            tfdist.Trainer(model, strategy=strategy)


def test_refuses_weights_that_are_not_finite_before_a_checkpoint(tmp_path):
    def build():
        inputs = keras.Input((6,))
        hidden = keras.layers.Dense(4, use_bias=False, kernel_initializer=zoo.seeded(1))(inputs)
        root = keras.ops.sqrt(keras.ops.abs(hidden))
        model = keras.Model(inputs, keras.layers.Dense(2, kernel_initializer=zoo.seeded(2))(root))
        model.compile(SGD(), "mse")
        return model

    def make_trainer():
        return tfdist.Trainer(build, checkpoint_dir=str(tmp_path))

    x = X.copy()
    x[24:] = 0  # the loss is finite there, and its gradient is not
    for resumed_from in (None, 3, 3):
        trainer = make_trainer()
        with pytest.raises(tfdist.errors.TrainingError, match="is not finite"):
            trainer.fit(x, Y, **ARRAYS, checkpoint_every=1, **FIT)
        assert trainer.progress.resumed_from_step == resumed_from
        assert {path.name[-1] for path in tmp_path.glob("step-*")} == set("123")


def test_refuses_to_continue_on_other_data(tmp_path):
    def fit(rows, batch):
        trainer = tfdist.Trainer(dense, checkpoint_dir=str(tmp_path))
        trainer.fit(X[:rows], Y[:rows], batch_size=batch, epochs=4, max_steps=3, verbose=0)

    fit(16, 4)
    with pytest.raises(TfdistError, match="32 examples instead of 16"):
        fit(32, 4)
    with pytest.raises(TfdistError, match="batch size is 8 instead of 4"):
        fit(16, 8)


@pytest.mark.skipif(zoo.KIND == "GPU", reason="deterministic kernels, as on GPUs, require a seed")
def test_refuses_an_order_of_chance_where_it_matters(tmp_path):
    tf.random.set_seed(None)  # with a seed of the whole process, the order is always the same
    data = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(32).batch(8)
    with pytest.raises(TfdistError, match="without a seed"):
        tfdist.Trainer(dense, checkpoint_dir=str(tmp_path)).fit(data, **FIT)


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize(
    ("name", "strategy_name", "stop"),
    [
        # The mean of the losses differs if the replicas' sums are added before it continues.
        ("a plain compute_loss", "mirrored-2", 3),
        ("two optimizers", "one_device", 5),
        ("Keras's own random numbers", "one_device", 5),
        ("a generator outside of layers", "one_device", 5),
        ("a plain compute_loss", "mirrored-2", 5),
    ],
)
def test_continues_to_the_same_bits(tmp_path, name, strategy_name, stop):
    def train(directory, stop=None):
        keras.utils.set_random_seed(1)
        trainer = zoo.make_trainer(
            PROGRAMS[name].build,
            strategy=zoo.STRATEGIES[strategy_name](),
            checkpoint_dir=str(tmp_path / directory),
            check="on",
        )
        stopping = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: trainer.step == stop and trainer.request_stop()
        )
        trainer.fit(PROGRAMS[name].make_dataset(), callbacks=[stopping], **FIT)
        return trainer

    whole = train("whole")
    train("parts", stop=stop)
    parts = train("parts")
    assert parts.progress.resumed_from_step == stop
    assert hash_weights(parts.model) == hash_weights(whole.model)
    assert parts.history.history == whole.history.history


def test_memory_that_is_short_for_an_optimizer_is_said():
    """Not what half of the optimizer lacks."""

    class Large(keras.optimizers.SGD):
        def add_variable_from_reference(self, *args, **kwargs):
            raise tf.errors.ResourceExhaustedError(None, None, "OOM")

    trainer = tfdist.Trainer(lambda: dense(Large(0.1, momentum=0.9)))
    with pytest.raises(tf.errors.ResourceExhaustedError):
        trainer.fit(X, Y, **ARRAYS, **FIT)


@pytest.mark.parametrize(("strategy", "is_compiled"), [("one_device", True), ("mirrored", False)])
def test_one_device_chooses_xla_as_outside_of_a_scope(strategy, is_compiled, monkeypatch):
    """Keras would, on a GPU; its rule is reduced to the part about scopes."""
    resolve = lambda model: model._distribute_strategy is None  # noqa: E731
    monkeypatch.setattr(keras.Model, "_resolve_auto_jit_compile", resolve)
    assert tfdist.Trainer(dense, strategy=strategy).model.jit_compile is is_compiled


def test_one_device_predicts_with_xla_as_keras_does():
    def build(*, is_compiled=True):
        model = dense(last="softmax", jit_compile=is_compiled)
        model.set_weights([7.0 * weight for weight in model.get_weights()])
        return model

    expected = build().predict(X, batch_size=5, verbose=0)
    assert np.any(expected != build(is_compiled=False).predict(X, batch_size=5, verbose=0))
    trainer = tfdist.Trainer(build)
    np.testing.assert_array_equal(trainer.predict(X, batch_size=5, verbose=0), expected)
    np.testing.assert_array_equal(trainer.predict_on_batch(X[:5]), expected[:5])


@pytest.mark.parametrize("kind", ["fit", "evaluate", "predict", "validation"])
def test_steps_are_those_that_keras_takes(kind):
    """It takes 4 steps for 3, and two for one."""
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)

    def use(model, data, steps):
        if kind == "fit":
            return model.fit(data, steps_per_epoch=steps, shuffle=False, verbose=0).history["loss"]
        if kind == "validation":
            options = {"validation_data": data, "validation_steps": steps}
            fitted = model.fit(dataset, shuffle=False, verbose=0, **options)
            return fitted.history["val_loss"]
        return getattr(model, kind)(data, steps=steps, verbose=0)

    build = lambda: dense(steps_per_execution=2)  # noqa: E731
    trainer, model = tfdist.Trainer(build), zoo.trace_once(build())
    for data, steps in ((dataset.repeat(), 3), (dataset, 1), (dataset.repeat(), 4)):
        np.testing.assert_array_equal(use(trainer, data, steps), use(model, data, steps))


@pytest.mark.thorough(keep=2)  # in two of the four ways, each strategy, class and size
@pytest.mark.parametrize(
    ("cls", "size", "strategy_name"),
    [
        *((keras.Model, 3, "one_device"), (programs.SumByConstant, 1, "mirrored-2")),
        *((keras.Model, 3, "mirrored-2"), (programs.SumByConstant, 1, "one_device")),
    ],
)
def test_a_step_that_waits_for_data_may_create_variables(cls, size, strategy_name):
    class Late(cls):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(2, kernel_initializer=programs.seeded(1))

        def call(self, x):
            return self.dense(x)

    def build():
        model = Late()
        model.compile(SGD(), "mse", metrics=["mae"], steps_per_execution=size)
        return model

    model = build()
    trainer = tfdist.Trainer(build, strategy=zoo.STRATEGIES[strategy_name]())
    found, expected = (m.fit(X, Y, batch_size=4, **FIT).history for m in (trainer, model))
    exact = strategy_name == "one_device"
    for key, values in expected.items():
        np.testing.assert_allclose(found[key], values, rtol=0 if exact else 1e-5, err_msg=key)
    assert zoo.largest_difference(_read(trainer.model), _read(model)) < (1e-12 if exact else 1e-5)


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("mirrored-2", {}),
        ("one_device", {"micro_batches": 2}),
        ("one_device", {"jit_compile": True}),
    ],
)
def test_draws_of_xla_are_refused_where_the_step_is_divided(strategy, options):
    def train(model, *, is_noisy):
        layer = programs.Noise if is_noisy else keras.layers.LayerNormalization
        keras.utils.set_random_seed(1)
        build = lambda: dense(between=lambda x: layer()(x), jit_compile=True)  # noqa: E731
        if model == "Keras":
            trained = trainer = build()
        else:
            trainer = zoo.make_trainer(build, strategy=zoo.STRATEGIES[strategy](), **model)
            trained = trainer.model
        trainer.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0)
        return trained.get_weights()

    found, expected = (train(model, is_noisy=False) for model in (options, "Keras"))
    assert zoo.largest_difference(found, expected) < 1e-5
    with pytest.raises(TfdistError, match="^The layer .* draws others than TensorFlow"):
        train(options, is_noisy=True)


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize(
    "ways", [("mirrored-2", "one_device"), ("Keras", "mirrored-2"), ("one_device", "mirrored-3")]
)
def test_programs_that_take_turns_share_the_global_generator(ways):
    """Each of them has a compiled step that draws from it."""

    def train(*ways):
        keras.utils.set_random_seed(1)
        build = lambda: dense(between=lambda x: programs.Noise()(x))  # noqa: E731
        trained = [
            build() if way == "Keras" else tfdist.Trainer(build, strategy=zoo.STRATEGIES[way]())
            for way in ways
        ]
        for model in trained * 2:
            model.fit(X, Y, batch_size=8, shuffle=False, verbose=0)
        return [weight for model in trained for weight in getattr(model, "model", model).weights]

    expected = [weight.numpy() for weight in train("Keras", "Keras")]
    assert zoo.largest_difference([w.numpy() for w in train(*ways)], expected) < 1e-5


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize(
    "ways", [("mirrored-2", "one_device"), ("Keras", "mirrored-2"), ("one_device", "mirrored-3")]
)
def test_predictions_draw_from_the_global_generator(ways):
    class Always(keras.layers.Layer):
        def call(self, x):
            return x + keras.random.normal(keras.ops.shape(x))

    build = functools.partial(dense, between=lambda x: Always()(x))

    def use(*ways):
        keras.utils.set_random_seed(1)
        models = [
            build() if way == "Keras" else tfdist.Trainer(build, strategy=zoo.STRATEGIES[way]())
            for way in ways
        ]
        found = []
        for model in models * 2:
            found += [model.predict(X, batch_size=8, verbose=0), model.predict_on_batch(X[:7])]
            found += [model.evaluate(X, Y, batch_size=8, verbose=0), model.test_on_batch(X, Y)]
        return [np.asarray(values) for values in found]

    assert zoo.largest_difference(use(*ways), use("Keras", "Keras")) < 1e-5
