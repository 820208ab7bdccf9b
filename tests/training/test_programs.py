"""A stranger's program gives what Keras gives, under every strategy, or is refused."""

import dataclasses
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests import zoo
from tests.training import programs
from tests.training.programs import INDIVISIBLE, METRICS, OPTIMIZERS, PROGRAMS, SGD, X, Y, dense
from tfdist.errors import TfdistError

EPOCHS = 2
WHOLE_BATCH_LOSSES = ("Dice", "Tversky", "a scalar with weights", "a contrast", "pairs")
FIT = {"epochs": EPOCHS, "verbose": 0, "shuffle": False}


def _read(model):
    return [weight.numpy() for weight in model.weights]


def _fit_keras(program):
    keras.utils.set_random_seed(1)
    model = program.build()
    data = program.make_dataset()
    validation = {"validation_data": data} if len(program.data) > 1 else {}
    return model.fit(data, **validation, **FIT).history, _read(model)


def _fit(program, strategy_name, **options):
    keras.utils.set_random_seed(1)
    strategy = zoo.STRATEGIES[strategy_name]()
    trainer = tfdist.Trainer(program.build, strategy=strategy, **options)
    data = program.make_dataset()
    validation = {"validation_data": data} if len(program.data) > 1 else {}
    return trainer.fit(data, **validation, **FIT).history, _read(trainer.model)


@pytest.mark.parametrize("name", PROGRAMS)
def test_one_device_is_keras_to_the_bit(name):
    expected, weights = _fit_keras(PROGRAMS[name])
    history, found = _fit(PROGRAMS[name], "one_device")
    assert history.keys() == expected.keys()
    for key, values in expected.items():
        np.testing.assert_array_equal(history[key], values, err_msg=key)
    for ours, theirs in zip(found, weights, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("strategy_name", ["mirrored-3", "central_storage-2"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_replicas_end_where_keras_ends(name, strategy_name):
    """Over three replicas batches of 8 are of 3, 3 and 2 rows."""
    if name == "Keras's own random numbers":
        # A generator of one strategy does not outlive it.
        keras.src.backend.common.global_state.set_global_attribute("global_seed_generator", None)
    expected, weights = _fit_keras(PROGRAMS[name])
    history, found = _fit(PROGRAMS[name], strategy_name)
    assert history.keys() == expected.keys()
    for key, values in expected.items():
        np.testing.assert_allclose(history[key], values, rtol=2e-5, atol=1e-6, err_msg=key)
    assert zoo.largest_difference(found, weights) < 1e-5


@pytest.mark.parametrize("strategy_name", ["one_device", "mirrored-3"])
def test_a_model_s_own_prediction_is_what_keras_predicts(strategy_name):
    build = PROGRAMS["own steps"].build
    trainer = tfdist.Trainer(build, strategy=zoo.STRATEGIES[strategy_name]())
    expected = build().predict(X, batch_size=8, verbose=0)
    np.testing.assert_allclose(trainer.predict(X, batch_size=8), expected, rtol=1e-6)


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


@pytest.mark.parametrize("masked", ["", "some", "all"])
@pytest.mark.parametrize("strategy_name", ["one_device", "mirrored-3"])
def test_every_reduction_weighs_and_masks_as_keras_does(strategy_name, masked):
    program = programs.make_reductions(masked)
    dataset = program.make_dataset()
    model = program.build()
    expected = model.fit(dataset, **FIT).history
    trainer = tfdist.Trainer(program.build, strategy=zoo.STRATEGIES[strategy_name]())
    found = trainer.fit(dataset, **FIT).history
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, err_msg=name)
    assert zoo.largest_difference(_read(trainer.model), _read(model)) < 1e-5


@pytest.mark.parametrize("strategy_name", ["one_device", "mirrored-2"])
def test_a_size_that_changes_in_training_is_no_obstacle(strategy_name):
    model = programs.build_cropping()
    model.fit(programs.PIXELS, Y, batch_size=8, **FIT)
    strategy = zoo.STRATEGIES[strategy_name]()
    trainer = tfdist.Trainer(programs.build_cropping, strategy=strategy)
    trainer.fit(programs.PIXELS, Y, batch_size=8, **FIT)
    assert zoo.largest_difference(_read(trainer.model), _read(model)) < 1e-5


@pytest.mark.parametrize("strategy_name", zoo.STRATEGIES)
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
    with pytest.raises(TfdistError, match="keeps a state for each row from batch to batch"):
        trainer.fit(x, Y, batch_size=16, **FIT)


@pytest.mark.parametrize("name", INDIVISIBLE)
def test_what_replicas_cannot_divide_is_refused_before_the_first_step(name):
    with pytest.raises(TfdistError, match="Cannot divide a batch over 2 replicas: .* depends on"):
        _fit(INDIVISIBLE[name], "mirrored-2")
    history, _ = _fit(INDIVISIBLE[name], "mirrored-2", check="off")
    assert len(next(iter(history.values()))) == EPOCHS


def test_a_loss_of_the_whole_batch_is_known_where_its_halves_agree():
    y = np.tile(np.array([[1, 0], [0, 1]], "f4"), (16, 1))
    program = dataclasses.replace(INDIVISIBLE["Dice"], data=(X * 0.01, y))
    with pytest.raises(TfdistError, match="the loss 'dice' is no mean .* gather_outputs=True"):
        _fit(program, "mirrored-2")


@pytest.mark.parametrize("strategy_name", ["mirrored-3", "central_storage-2"])
@pytest.mark.parametrize("name", WHOLE_BATCH_LOSSES)
def test_a_loss_of_the_whole_batch_is_exact_where_outputs_are_gathered(name, strategy_name):
    """Batches of 8, and a last one of 2 rows, which every replica has whole."""
    program = INDIVISIBLE[name]
    program = dataclasses.replace(program, data=tuple(part[:18] for part in program.data))
    expected, weights = _fit_keras(program)
    history, found = _fit(program, strategy_name, gather_outputs=True)
    for key, values in expected.items():
        np.testing.assert_allclose(history[key], values, rtol=2e-5, atol=1e-6, err_msg=key)
    assert zoo.largest_difference(found, weights) < 1e-5


def test_the_check_leaves_no_trace():
    options = {"strategy": zoo.STRATEGIES["mirrored-2"]()}
    found = []
    for check in ("on", "off"):
        trainer = tfdist.Trainer(PROGRAMS["batch normalization"].build, check=check, **options)
        trainer.fit(X, Y, batch_size=8, **FIT)
        assert (trainer.check_s > 0) == (check == "on")
        found.append(_read(trainer.model) + [v.numpy() for v in trainer.model.optimizer.variables])
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_what_is_known_to_be_divisible_is_not_checked():
    trainer = tfdist.Trainer(dense, strategy=zoo.STRATEGIES["mirrored-2"]())
    trainer.fit(X, Y, **FIT)
    assert trainer.check_s == 0


def _compare_fits(fit, *, build=dense):
    """Compares what a function does with Keras's model and with a trainer."""
    model = build()
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
    "arrays": ((X, Y), ARRAYS),
    "a last batch": ((X[:30], Y[:30]), ARRAYS),
    "one row": ((X[:1], Y[:1]), ARRAYS),
    "weights": ((X, Y), {**ARRAYS, "sample_weight": programs.WEIGHTS}),
    "class weights": ((X, programs.KINDS), {**ARRAYS, "class_weight": {0: 1.0, 1: 3.0}}),
    "a part to validate": ((X, Y), {**ARRAYS, "validation_split": 0.25}),
    "batches to validate": (
        (X, Y),
        {**ARRAYS, "validation_data": (X, Y), "validation_batch_size": 5, "validation_steps": 2},
    ),
    "every second epoch": ((X, Y), {**ARRAYS, "validation_data": (X, Y), "validation_freq": 2}),
    "a later epoch": ((X, Y), {**ARRAYS, "initial_epoch": 1}),
    "steps of an epoch": ((X, Y), {**ARRAYS, "steps_per_epoch": 4}),
    "a data set of pages": ((Pages(),), {}),
    "numbers of other kinds": ((X.astype("f8"), (Y > 0).astype("i8")), ARRAYS),
    "a list to validate on": ((X, Y), {**ARRAYS, "validation_data": [X, Y]}),
    "no batches": ((tf.data.Dataset.from_tensor_slices((X, Y)).batch(8).take(0),), {}),
    "no epochs": ((X, Y), {**ARRAYS, "epochs": 0}),
}


@pytest.mark.filterwarnings("ignore:.*data ran out", "ignore:Your input ran out of data")
@pytest.mark.parametrize("name", FITS)
def test_fit_takes_what_keras_takes(name):
    data, options = FITS[name]
    _compare_fits(lambda model: model.fit(*data, **{**FIT, **options}).history)


def test_fit_takes_a_generator_until_it_ends():
    def fit(model):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Keras: the data ran out
            return model.fit(_generate(), epochs=1, verbose=0, shuffle=False).history

    _compare_fits(fit)


def test_an_endless_generator_has_steps():
    def repeat():
        while True:
            yield from _generate()

    spec = (tf.TensorSpec((None, 6)), tf.TensorSpec((None, 2)))
    data = tf.data.Dataset.from_generator(repeat, output_signature=spec)
    _compare_fits(lambda model: model.fit(data, steps_per_epoch=3, **FIT).history)


def test_a_second_fit_trains_on():
    def fit(model):
        first = model.fit(X, Y, **ARRAYS, **FIT).history
        return first, model.fit(X * 2, Y, **ARRAYS, **FIT).history

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


def test_refuses_labels_beside_a_dataset():
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)
    with pytest.raises(TfdistError, match="Cannot take y beside"):
        tfdist.Trainer(dense).fit(data, Y, **FIT)


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
    expected = dense()
    expected.fit(X, Y, **ARRAYS, **FIT)
    assert zoo.largest_difference(_read(model), _read(expected)) < 1e-5
    with pytest.raises(TfdistError, match="created outside of the strategy's scope"):
        tfdist.Trainer(dense(), strategy=strategy).fit(X, Y, **FIT)


def test_refuses_weights_that_are_not_finite_before_a_checkpoint(tmp_path):
    class Root(keras.layers.Layer):
        def call(self, x):
            return keras.ops.sqrt(keras.ops.relu(x))

    x = np.abs(X)
    x[24:] = 0  # the loss is finite there, and its gradient is not
    trainer = tfdist.Trainer(lambda: dense(between=Root()), checkpoint_dir=str(tmp_path))
    with pytest.raises(tfdist.errors.TrainingError, match="is not finite"):
        trainer.fit(x * 0, Y, **ARRAYS, checkpoint_every=1, **FIT)
    assert not list(tmp_path.glob("step-*"))


def test_refuses_to_continue_on_other_data(tmp_path):
    def fit(rows, batch):
        trainer = tfdist.Trainer(dense, checkpoint_dir=str(tmp_path))
        trainer.fit(X[:rows], Y[:rows], batch_size=batch, epochs=4, max_steps=3, verbose=0)

    fit(16, 4)
    with pytest.raises(TfdistError, match="32 examples instead of 16"):
        fit(32, 4)
    with pytest.raises(TfdistError, match="batch size is 8 instead of 4"):
        fit(16, 8)


def test_refuses_an_order_of_chance_where_it_matters(tmp_path):
    tf.random.set_seed(None)  # with a seed of the whole process, the order is always the same
    data = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(32).batch(8)
    with pytest.raises(TfdistError, match="shuffled without a seed"):
        tfdist.Trainer(dense, checkpoint_dir=str(tmp_path)).fit(data, **FIT)


@pytest.mark.parametrize(
    ("name", "strategy_name"),
    [
        ("Keras's own random numbers", "one_device"),
        ("two optimizers", "one_device"),
        ("a plain compute_loss", "mirrored-2"),
    ],
)
def test_continues_to_the_same_bits(tmp_path, name, strategy_name):
    def train(directory, stop=None):
        keras.utils.set_random_seed(1)
        trainer = tfdist.Trainer(
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
    train("parts", stop=5)
    parts = train("parts")
    assert parts.resumed_from_step == 5
    assert parts.weights_sha256() == whole.weights_sha256()
    assert parts.history.history == whole.history.history
