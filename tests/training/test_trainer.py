"""Contract 1 and 5: every strategy trains every model to the same weights."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests import zoo
from tfdist.data.source import ArraySource
from tfdist.errors import TfdistError, TrainingError
from tfdist.training.step.model_variables import hash_weights

pytestmark = pytest.mark.optimized
STEPS = 9  # three epochs of 16, 16 and 8 examples
BATCH = 16
SGD = lambda: keras.optimizers.SGD(0.05, momentum=0.9, global_clipnorm=0.5)  # noqa: E731
ADAM = lambda: keras.optimizers.Adam(1e-3)  # noqa: E731


def _train(model_name, strategy_name, make_optimizer, **options):
    example = zoo.EXAMPLES[model_name]
    trainer = tfdist.Trainer(
        lambda: example.build(make_optimizer()), strategy=zoo.STRATEGIES[strategy_name](), seed=5
    )
    x, y = example.data
    history = trainer.fit(
        x,
        y,
        sample_weight=example.sample_weight,
        global_batch_size=BATCH,
        max_steps=STEPS,
        verbose=0,
        **options,
    )
    logs = trainer.evaluate(
        x,
        y,
        sample_weight=example.sample_weight,
        global_batch_size=BATCH,
        verbose=0,
        return_dict=True,
    )
    return [weight.numpy() for weight in trainer.model.weights], history.history, logs


@pytest.fixture(scope="module")
def references():
    """What one device computes, once a model and optimizer."""
    return {}


def _compare(references, model_name, strategy_name, make_optimizer, tolerance):
    key = (model_name, make_optimizer, tolerance)
    if key not in references:
        references[key] = _train(model_name, "one_device", make_optimizer)
    weights, history, logs = _train(model_name, strategy_name, make_optimizer)
    expected_weights, expected_history, expected_logs = references[key]
    assert zoo.largest_difference(weights, expected_weights) < tolerance
    assert logs.keys() == expected_logs.keys()
    for name, value in expected_logs.items():
        np.testing.assert_allclose(logs[name], value, rtol=20 * tolerance, err_msg=name)
    np.testing.assert_allclose(history["loss"], expected_history["loss"], rtol=20 * tolerance)


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize(
    ("model_name", "strategy_name"),
    zoo.take_turns(sorted(zoo.EXAMPLES.keys() - {"unet"}), list(zoo.STRATEGIES)[1:]),
)
def test_sgd_ends_where_one_device_ends(references, model_name, strategy_name):
    """Adam in float64, below, trains the U-Net, and is compared more closely."""
    _compare(references, model_name, strategy_name, SGD, 1e-5)


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("strategy_name", list(zoo.STRATEGIES)[1:])
def test_adam_in_float64_ends_where_one_device_ends(references, float64, strategy_name):
    _compare(references, "unet", strategy_name, ADAM, 1e-10)


def _make_dense_trainer(strategy_name="mirrored-2", **options):
    example = zoo.EXAMPLES["dense"]
    return tfdist.Trainer(
        lambda: example.build(SGD()), strategy=zoo.STRATEGIES[strategy_name](), **options
    )


X, Y = zoo.EXAMPLES["dense"].data


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("strategy_name", zoo.REPLICAS_FIRST)
def test_takes_a_keras_dataset_with_an_uneven_last_batch(strategy_name):
    """Batches of 12, 12, 12 and 4, as Keras would see them on one device."""
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(12)
    trainer = _make_dense_trainer(strategy_name)
    trainer.fit(dataset, epochs=3, verbose=0)
    model = zoo.trace_once(zoo.EXAMPLES["dense"].build(SGD()))
    model.fit(dataset, epochs=3, verbose=0, shuffle=False)
    ours, theirs = ([weight.numpy() for weight in m.weights] for m in (trainer.model, model))
    assert zoo.largest_difference(ours, theirs) < 1e-5
    logs = trainer.evaluate(dataset, verbose=0, return_dict=True)
    expected = model.evaluate(dataset, verbose=0, return_dict=True)
    assert logs["accuracy"] == pytest.approx(expected["accuracy"], rel=1e-6)


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize(
    ("rows", "strategy_name"),
    [
        *((1, "mirrored-2"), (37, "central_storage-2"), (2, "mirrored-3")),
        *((37, "mirrored-2"), (1, "one_device"), (2, "one_device"), (37, "one_device")),
        *((37, "mirrored-3"), (1, "mirrored-3"), (2, "mirrored-2")),
        *((1, "central_storage-2"), (2, "central_storage-2")),
    ],
)
def test_a_batch_may_have_fewer_rows_than_there_are_replicas(strategy_name, rows):
    dataset = tf.data.Dataset.from_tensor_slices((X[:rows], Y[:rows])).batch(12)
    trainer = _make_dense_trainer(strategy_name)
    history = trainer.fit(dataset, epochs=2, validation_data=dataset, verbose=0).history
    model = zoo.trace_once(zoo.EXAMPLES["dense"].build(SGD()))
    options = {"epochs": 2, "validation_data": dataset, "verbose": 0}
    expected = model.fit(dataset, shuffle=False, **options).history
    ours, theirs = ([weight.numpy() for weight in m.weights] for m in (trainer.model, model))
    assert zoo.largest_difference(ours, theirs) < 1e-5
    for name, values in expected.items():
        np.testing.assert_allclose(history[name], values, rtol=1e-5)
    outputs = trainer.predict(X[:rows], batch_size=12)
    np.testing.assert_allclose(outputs, model.predict(X[:rows], verbose=0), rtol=1e-4, atol=1e-6)


def test_takes_a_function_of_the_input_context():
    def make(context):
        batch = context.get_per_replica_batch_size(16)
        return tf.data.Dataset.from_tensor_slices((X, Y)).batch(batch, drop_remainder=True)

    trainer = _make_dense_trainer()
    trainer.fit(make, steps_per_epoch=2, epochs=2, verbose=0)
    assert trainer.step == 4
    trainer.evaluate(make, verbose=0)


def test_says_that_a_dataset_is_read_past_what_was_seen(tmp_path, capsys):
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)
    _make_dense_trainer(checkpoint_dir=str(tmp_path)).fit(dataset, max_steps=3, verbose=0)
    _make_dense_trainer(checkpoint_dir=str(tmp_path)).fit(dataset, max_steps=5, verbose=2)
    assert "Continuing after step 3 of 5, skipping the batches seen" in capsys.readouterr().out


def test_an_unbounded_dataset_needs_a_length():
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8).repeat()
    with pytest.raises(TfdistError, match="Give steps_per_epoch or max_steps"):
        _make_dense_trainer().fit(dataset, verbose=0)


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize(
    ("model_name", "strategy_name"),
    [
        *(("two_inputs", "mirrored-3"), ("dense", "central_storage-2")),
        *(("two_inputs", "one_device"), ("dense", "mirrored-2")),
        *(("two_inputs", "central_storage-2"), ("dense", "mirrored-3")),
        *(("two_inputs", "mirrored-2"), ("dense", "one_device")),
    ],
)
def test_predicts_every_example_in_order(strategy_name, model_name):
    example = zoo.EXAMPLES[model_name]
    trainer = tfdist.Trainer(lambda: example.build(SGD()), strategy=zoo.STRATEGIES[strategy_name]())
    x = keras.tree.map_structure(lambda t: t[:19], example.data[0])
    ours = trainer.predict(x, global_batch_size=8)
    expected = example.build(SGD()).predict(x, verbose=0)
    keras.tree.map_structure(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), ours, expected
    )


def test_keras_callbacks_work_as_in_keras(tmp_path):
    class Counter(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.calls = []

        def on_epoch_begin(self, epoch, logs=None):
            self.calls.append(f"epoch {epoch}")

        def on_train_batch_end(self, batch, logs=None):
            assert {"loss", "accuracy"} <= logs.keys()
            self.calls.append(f"batch {batch}")

    counter = Counter()
    trainer = tfdist.Trainer(
        lambda: zoo.EXAMPLES["dense"].build(keras.optimizers.SGD(0.1)),
        strategy=zoo.STRATEGIES["mirrored-2"](),
    )
    history = trainer.fit(
        X,
        Y,
        validation_data=(X, Y),
        global_batch_size=20,
        epochs=6,
        verbose=0,
        callbacks=[
            counter,
            keras.callbacks.ModelCheckpoint(
                str(tmp_path / "best.keras"), monitor="val_loss", save_best_only=True
            ),
            keras.callbacks.TensorBoard(str(tmp_path / "tensorboard"), histogram_freq=1),
            keras.callbacks.CSVLogger(str(tmp_path / "log.csv")),
            keras.callbacks.ReduceLROnPlateau("val_loss", patience=1, min_delta=10, factor=0.5),
            keras.callbacks.EarlyStopping(
                "val_loss", patience=3, min_delta=10, restore_best_weights=True
            ),
        ],
    )
    assert counter.calls[:3] == ["epoch 0", "batch 0", "batch 1"]
    assert history.epoch == [0, 1, 2, 3]  # stopped early
    assert float(trainer.model.optimizer.learning_rate.numpy()) == pytest.approx(0.1 * 0.5**3)
    assert {"loss", "val_loss", "accuracy", "val_accuracy"} <= history.history.keys()
    assert keras.saving.load_model(tmp_path / "best.keras").count_params() > 0
    assert list((tmp_path / "tensorboard").rglob("*tfevents*"))
    assert len((tmp_path / "log.csv").read_text().splitlines()) == 5


def test_a_scheduled_learning_rate_follows_the_steps():
    seen = []
    schedule = keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.1 / (epoch + 1))
    spy = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: seen.append(logs["learning_rate"])
    )
    trainer = tfdist.Trainer(
        lambda: zoo.EXAMPLES["dense"].build(keras.optimizers.SGD(0.1)),
        strategy=zoo.STRATEGIES["mirrored-2"](),
    )
    trainer.fit(X, Y, epochs=3, verbose=0, callbacks=[schedule, spy])
    assert seen == pytest.approx([0.1, 0.05, 0.1 / 3])


def test_random_layers_draw_on_one_device_as_in_keras():
    example = zoo.EXAMPLES["random"]
    x, y = example.data
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(16)
    trainer = tfdist.Trainer(lambda: example.build(SGD()))
    trainer.fit(dataset, epochs=2, verbose=0)
    model = zoo.trace_once(example.build(SGD()))
    model.fit(dataset, epochs=2, verbose=0, shuffle=False)
    ours, theirs = ([w.numpy() for w in m.variables] for m in (trainer.model, model))
    assert zoo.largest_difference(ours[: len(model.weights)], theirs[: len(model.weights)]) < 1e-6
    states = [v.numpy().tolist() for v in model.variables if "seed" in v.name]
    assert [v.numpy().tolist() for v in trainer.model.variables if "seed" in v.name] == states
    assert len(states) == 6


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize(
    ("strategy_name", "model_name"),
    [*((name, "convolutional") for name in zoo.REPLICAS_FIRST), ("mirrored-3", "random")],
)
def test_continues_to_the_same_bits(deterministic, path_with_spaces, strategy_name, model_name):
    example = zoo.EXAMPLES[model_name]

    def make(directory):
        return tfdist.Trainer(
            lambda: example.build(ADAM()),
            strategy=zoo.STRATEGIES[strategy_name](),
            checkpoint_dir=str(path_with_spaces / directory),
            seed=1,
        )

    options = {"global_batch_size": 16, "epochs": 3, "verbose": 0, "checkpoint_every": 1}
    whole = make("whole")
    expected = whole.fit(*example.data, validation_data=example.data, **options)
    assert whole.step == 9

    stopped = make("stopped")
    stop = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: stopped.step == 5 and stopped.request_stop()
    )
    stopped.fit(*example.data, validation_data=example.data, callbacks=[stop], **options)
    assert (stopped.step, stopped.progress.was_stopped) == (5, True)

    continued = make("stopped")
    history = continued.fit(*example.data, validation_data=example.data, **options)
    assert (continued.progress.resumed_from_step, continued.step) == (5, 9)
    assert hash_weights(continued.model) == hash_weights(whole.model)
    assert history.epoch == expected.epoch
    for name, values in expected.history.items():
        # Of an epoch that was stopped, the replicas' sums are added in another order.
        np.testing.assert_allclose(history.history[name], values, rtol=3e-7, err_msg=name)

    finished = make("stopped")
    finished.fit(*example.data, **options)
    assert finished.step == 9
    assert hash_weights(finished.model) == hash_weights(whole.model)


def test_a_loss_that_is_not_finite_stops_and_keeps_the_last_checkpoint(tmp_path):
    y = Y.copy()
    x = X.copy()
    x[25] = np.inf
    trainer = _make_dense_trainer(checkpoint_dir=str(tmp_path))
    with pytest.raises(TrainingError, match=r"loss of step 4 is (nan|inf)\. .*step 3 is kept"):
        trainer.fit(
            x, y, global_batch_size=8, shuffle=False, epochs=2, verbose=0, checkpoint_every=1
        )


def test_refuses_a_source_s_batch_smaller_than_the_replicas():
    source = ArraySource.from_arrays((X, Y))
    with pytest.raises(TfdistError, match="global batch of 2 over 3 replicas.*batch_size=3"):
        _make_dense_trainer("mirrored-3").fit(source, global_batch_size=2, verbose=0)


class _Hidden(keras.Model):
    """Its name would be `__hidden`, which TensorFlow refuses."""


@pytest.mark.parametrize(("kind", "name"), [(_Hidden, "fine"), (keras.Model, "not fine")])
def test_refuses_a_name_that_keras_leaves_a_scope_open_for(kind, name):
    def build():
        given = keras.Input((3,))
        model = kind(given, keras.layers.Dense(2, name=name)(given))
        model.compile("sgd", "mse")
        return model

    try:
        trainer = tfdist.Trainer(build)
    except ValueError as error:
        keras.utils.clear_session()  # of the scope that Keras leaves open then, too
        pytest.skip(f"Keras 3.16 refuses the name itself, in the layer's call: {error}")
    x, y = np.zeros((4, 3)), np.zeros((4, 2))
    for use in (lambda: trainer.fit(x, y, verbose=0), lambda: trainer.predict(x, verbose=0)):
        with pytest.raises(
            TfdistError, match="TensorFlow cannot train .* under the name"
        ) as caught:
            use()
        assert "\n" not in str(caught.value)
    later = keras.layers.Dense(1, name="later")
    later.build((None, 2))
    assert later.kernel.path == "later/kernel"


def test_refuses_what_is_not_a_compiled_model():
    with pytest.raises(TfdistError, match="returned Sequential, not a compiled keras.Model"):
        tfdist.Trainer(lambda: keras.Sequential([keras.layers.Dense(1)]))


def test_a_model_predicts_before_it_is_compiled_and_trains_after():
    strategy = zoo.STRATEGIES["mirrored-3"]()
    with strategy.scope():
        model = keras.Sequential([keras.Input(X.shape[1:]), keras.layers.Dense(1)])
    trainer = tfdist.Trainer(model)
    expected = X @ model.get_weights()[0]
    np.testing.assert_allclose(trainer.predict(X, batch_size=16), expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(TfdistError, match="is not compiled. Call model.compile"):
        trainer.fit(X, Y, verbose=0)
    trainer.compile("sgd", "mse")
    assert trainer.fit(X, Y, verbose=0).history["loss"]


class WithoutCall(keras.Model):
    """Uses one layer by its own method, and never builds another."""

    def __init__(self):
        super().__init__()
        self.used, self.later = keras.layers.Dense(1), keras.layers.Dense(2)
        self.used.build((None, X.shape[1]))
        self.used.kernel.assign(0.1 * tf.ones_like(self.used.kernel))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self.used.call(x) - tf.cast(y, x.dtype)[:, None]) ** 2)
        weights = self.used.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


@pytest.mark.parametrize("strategy_name", ["one_device", "mirrored-2"])
def test_a_step_may_leave_layers_without_weights(strategy_name):
    def build():
        model = WithoutCall()
        model.compile(keras.optimizers.SGD(0.01, momentum=0.9))
        return model

    trainer, model = tfdist.Trainer(build, strategy=zoo.STRATEGIES[strategy_name]()), build()
    options = {"batch_size": 16, "epochs": 2, "shuffle": False, "verbose": 0}
    found, expected = trainer.fit(X, Y, **options), model.fit(X, Y, **options)
    np.testing.assert_allclose(found.history["loss"], expected.history["loss"], rtol=1e-5)
    np.testing.assert_allclose(trainer.model.used.kernel, model.used.kernel, rtol=1e-5)


def test_traces_each_step_once():
    trainer = _make_dense_trainer("mirrored-3")
    trainer.fit(X, Y, global_batch_size=16, epochs=3, validation_data=(X, Y), verbose=0)
    assert set(trainer.engine.count_traces().values()) == {1}
