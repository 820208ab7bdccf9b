"""A model with a `fit`, `predict` and so on of its own: they run, with a trainer inside."""

import contextlib
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests import zoo
from tfdist.errors import TfdistError
from tfdist.run.routing import Routing
from tfdist.training.fit.own_methods import TrainerRoute, open_route
from tfdist.training.step_options import StepOptions

X = np.random.default_rng(0).normal(size=(40, 4)).astype(np.float32) * 100
Y = X.sum(1, keepdims=True) / 255
STRATEGIES = ["mirrored-2", "one_device"]
METHODS = ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")


class Scaled(keras.Sequential):
    """Scales its inputs in every method, as the tasks of keras-hub preprocess theirs."""

    def fit(self, x=None, y=None, **options):
        return super().fit(x / 255, y, **options)

    def evaluate(self, x=None, y=None, **options):
        options.pop("_use_cached_eval_dataset", None)
        return super().evaluate(x / 255, y, **options)

    def predict(self, x, **options):
        return super().predict(x / 255, **options)

    def train_on_batch(self, x, y=None, **options):
        return super().train_on_batch(x / 255, y, **options)

    def test_on_batch(self, x, y=None, **options):
        return super().test_on_batch(x / 255, y, **options)

    def predict_on_batch(self, x):
        return super().predict_on_batch(x / 255)


def _build(kind=Scaled, **options):
    model = kind(
        [keras.Input((4,)), keras.layers.Dense(1, kernel_initializer=zoo.seeded(1))], **options
    )
    model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
    return model


class Listening(keras.callbacks.Callback):
    """Evaluates and predicts at the end of each epoch, as callbacks with pictures do."""

    def __init__(self):
        super().__init__()
        self.found = []

    def on_epoch_end(self, epoch, logs=None):
        found = self.model.predict(X[:6], verbose=0)
        self.found.append((found, self.model.evaluate(X[:6], Y[:6], verbose=0)))


def _use(model):
    listening = Listening()
    history = model.fit(
        X,
        Y,
        batch_size=16,
        epochs=2,
        shuffle=False,
        validation_data=(X[:10], Y[:10]),
        callbacks=[listening],
        verbose=0,
    )
    return (
        history.history,
        listening.found,
        model.evaluate(X, Y, batch_size=16, verbose=0),
        model.predict(X, verbose=0),
        model.train_on_batch(X[:6], Y[:6]),
        model.test_on_batch(X[:6], Y[:6]),
        model.predict_on_batch(X[:6]),
    )


def _compare(found, expected):
    keras.tree.map_structure(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, expected
    )


@pytest.fixture(autouse=True)
def _keras_is_left_alone():
    before = {name: getattr(keras.Model, name) for name in METHODS}
    yield
    assert before == {name: getattr(keras.Model, name) for name in METHODS}


@pytest.fixture(scope="module")
def expected():
    return _use(zoo.trace_once(_build()))


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("strategy_name", STRATEGIES)
def test_a_model_s_methods_run_with_a_trainer(expected, strategy_name):
    _compare(_use(tfdist.Trainer(_build, strategy=zoo.STRATEGIES[strategy_name]())), expected)


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("strategy_name", STRATEGIES)
def test_a_script_s_models_validate_with_their_methods(expected, strategy_name):
    strategy = zoo.STRATEGIES[strategy_name]()
    routing = Routing(strategy, StepOptions())
    with strategy.scope(), routing.open():
        _compare(_use(_build()), expected)


def test_a_validation_that_keras_caches_is_not_prepared_again():
    class Doubled(keras.Sequential):
        def evaluate(self, x=None, y=None, **options):
            return super().evaluate(x * 2, y, **options)

    def use(model):
        options = {"validation_data": (X[:10] / 255, Y[:10]), "shuffle": False, "verbose": 0}
        return model.fit(X / 255, Y, **options).history, model.evaluate(X / 255, Y, verbose=0)

    trainer = tfdist.Trainer(lambda: _build(Doubled), strategy=zoo.STRATEGIES["mirrored-2"]())
    _compare(use(trainer), use(_build(Doubled)))


def _replace_fit(model):
    """Replaces a method of one model, as one does in a notebook."""
    fit = model.fit
    model.fit = lambda x, y, **options: fit(x / 255, y, **options)
    return model


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("strategy_name", STRATEGIES)
def test_a_method_of_one_model_runs(strategy_name):
    def build():
        return _replace_fit(_build(keras.Sequential))

    def use(model):
        return model.fit(X, Y, batch_size=16, shuffle=False, verbose=0).history

    found = use(tfdist.Trainer(build, strategy=zoo.STRATEGIES[strategy_name]()))
    _compare(found, use(build()))


def test_refuses_a_method_that_goes_past_the_trainer():
    strategy = zoo.STRATEGIES["mirrored-2"]()
    with strategy.scope():
        model = _replace_fit(_build(keras.Sequential))
    with pytest.raises(TfdistError, match=r"Cannot divide fit of Sequential: .* keras.Model.fit\("):
        tfdist.Trainer(model, strategy=strategy).fit(X, Y, verbose=0)


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("strategy_name", STRATEGIES)
def test_the_trainer_s_own_arguments_go_past_the_model_s_method(tmp_path, strategy_name):
    class Strict(keras.Sequential):
        def fit(self, x, y, batch_size=None):
            return super().fit(x, y, batch_size=batch_size, shuffle=False, verbose=0)

    trainer = tfdist.Trainer(
        lambda: _build(Strict),
        strategy=zoo.STRATEGIES[strategy_name](),
        checkpoint_dir=str(tmp_path),
    )
    trainer.fit(X / 255, Y, global_batch_size=8, max_steps=7, checkpoint_every=3)
    assert trainer.step == 7
    names = sorted(path.name for path in tmp_path.glob("step-*"))
    assert names == ["step-000000005", "step-000000006", "step-000000007"]


def test_a_method_that_never_trains_is_named(tmp_path):
    class Solved(keras.Sequential):
        def fit(self, x, y):
            self.layers[0].bias.assign([1.0])

    trainer = tfdist.Trainer(lambda: _build(Solved), checkpoint_dir=str(tmp_path))
    with pytest.raises(TfdistError, match=r"Solved.fit never called .* checkpoint_dir, max_steps"):
        trainer.fit(X, Y, max_steps=3)
    trainer = tfdist.Trainer(lambda: _build(Solved), strategy=zoo.STRATEGIES["mirrored-2"]())
    with pytest.warns(UserWarning, match="the strategy had no part in it"):
        trainer.fit(X, Y)
    assert trainer.model.layers[0].bias.numpy() == [1.0]


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("strategy_name", STRATEGIES)
def test_a_method_may_train_another_model_first(strategy_name):
    class Pretrained(keras.Model):
        def __init__(self):
            super().__init__()
            self.first = _build(keras.Sequential)
            self.last = keras.layers.Dense(1, kernel_initializer=zoo.seeded(2))

        def call(self, x):
            return self.last(self.first(x))

        def fit(self, x, y, **options):
            self.first.fit(x, y, batch_size=7, shuffle=False, verbose=0)
            return super().fit(x, y + self.first.predict(x, verbose=0), **options)

    def build():
        model = Pretrained()
        model.compile(keras.optimizers.SGD(0.01), "mse")
        return model

    def use(model):
        history = model.fit(X / 255, Y, batch_size=16, shuffle=False, verbose=0).history
        return history, model.predict(X / 255, verbose=0)

    found = use(tfdist.Trainer(build, strategy=zoo.STRATEGIES[strategy_name]()))
    _compare(found, use(build()))


def test_another_thread_reaches_keras():
    seen = []
    strategy = zoo.STRATEGIES["mirrored-2"]()
    trainer = tfdist.Trainer(_build, strategy=strategy)
    other = _build(keras.Sequential)

    class Asking(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            thread = threading.Thread(target=lambda: seen.append(other.predict(X, verbose=0)))
            thread.start()
            thread.join()

    trainer.fit(X, Y, callbacks=[Asking()], verbose=0)
    _compare(seen, [_build(keras.Sequential).predict(X, verbose=0)])
    assert other.predict_function is not None  # Keras's own


def test_an_error_in_a_model_s_method_is_the_user_s():
    class Failing(keras.Sequential):
        def fit(self, x, y, **options):
            with contextlib.suppress(ZeroDivisionError):
                super().fit(x, y, callbacks=[Raising()], verbose=0)
            raise KeyError("of the user's")

    class Raising(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            raise ZeroDivisionError

    trainer = tfdist.Trainer(lambda: _build(Failing))
    with pytest.raises(KeyError, match="of the user's"):
        trainer.fit(X, Y)


@pytest.mark.parametrize("strategy_name", STRATEGIES)
def test_the_train_function_of_keras_is_refused_where_it_would_divide(strategy_name):
    trainer = zoo.make_trainer(
        lambda: _build(keras.Sequential), strategy=zoo.STRATEGIES[strategy_name]()
    )
    trainer.fit(X, Y, batch_size=8, verbose=0)
    with open_route(TrainerRoute(trainer)):
        trainer.model.make_train_function(force=True)
    batches = iter(tf.data.Dataset.from_tensor_slices((X, Y)).batch(8))
    if strategy_name == "one_device":
        assert float(trainer.model.train_function(batches)["loss"]) > 0
        return
    with pytest.raises(TfdistError, match="Cannot divide train_function of Sequential"):
        trainer.model.train_function(batches)
