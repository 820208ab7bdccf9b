"""Callbacks that train, evaluate or count by themselves change what they change under Keras."""

import keras
import numpy as np
import pytest

import tfdist
from tests import zoo
from tests.training.programs import X, Y, dense
from tfdist.errors import TfdistError
from tfdist.run.routing import Routing
from tfdist.training.step_options import StepOptions

FEW = {"x": X[:6], "y": Y[:6], "verbose": 0}
FIT = {**FEW, "shuffle": False}
STRATEGIES = ["mirrored-2", "one_device"]


def _on(event, act):
    """Returns a callback that does something with the model at an event."""
    callback = keras.callbacks.Callback()
    setattr(callback, event, lambda *arguments, **_: act(callback.model, arguments[0]))
    return callback


def _test_first(model, epoch):
    if epoch == 0:
        model.fit(**FIT, batch_size=4, epochs=2)


ACTIONS = {
    "fit in an epoch": ("on_epoch_end", _test_first),
    "fit after a batch": ("on_train_batch_end", lambda m, b: b == 1 and m.fit(**FIT)),
    "fit at the end": ("on_train_end", lambda m, _: m.fit(**FIT)),
    "train on each batch": ("on_train_batch_end", lambda m, _: m.train_on_batch(X[:6], Y[:6])),
    "evaluate after each batch": ("on_train_batch_end", lambda m, _: m.evaluate(**FEW)),
    "evaluate, and stop": (
        "on_train_batch_end",
        lambda m, b: (m.evaluate(**FEW), setattr(m, "stop_training", b == 1)),
    ),
    "reset after each batch": ("on_train_batch_end", lambda m, _: m.reset_metrics()),
    "count by hand": ("on_train_batch_end", lambda m, _: m.metrics[0].update_state([3.0, 4.0])),
    "reset in a validation": ("on_test_batch_end", lambda m, _: m.reset_metrics()),
    "evaluate in a validation": ("on_test_batch_end", lambda m, b: b == 1 and m.evaluate(**FEW)),
}


def _use(model, action):
    options = {"batch_size": 12, "epochs": 2, "shuffle": False, "verbose": 0}
    event, act = ACTIONS[action]
    history = model.fit(X, Y, validation_data=(X, Y), callbacks=[_on(event, act)], **options)
    again = model.fit(X, Y, **options).history
    return history.history, history.epoch, again, model.get_weights()


def _build():
    return dense(metrics=["mae"])


@pytest.mark.thorough(keep=10)
@pytest.mark.parametrize(("action", "strategy_name"), zoo.take_turns(ACTIONS, STRATEGIES))
def test_a_callback_calls_methods_of_the_model(action, strategy_name):
    expected = _use(_build(), action)
    strategy = zoo.STRATEGIES[strategy_name]()
    with strategy.scope(), Routing(strategy, StepOptions()).open():
        found = _use(_build(), action)
    tolerance = {"rtol": 0} if strategy_name == "one_device" else {"rtol": 1e-5, "atol": 1e-6}
    keras.tree.map_structure(
        lambda a, b: np.testing.assert_allclose(a, b, **tolerance), found, expected
    )


def test_no_checkpoint_holds_two_calls_of_fit(tmp_path):
    trainer = tfdist.Trainer(_build, checkpoint_dir=str(tmp_path))
    with pytest.raises(TfdistError, match="A callback of `fit` calls `fit` of the same trainer"):
        trainer.fit(X, Y, verbose=0, callbacks=[_on("on_epoch_end", lambda m, _: m.fit(**FIT))])
    assert trainer.fit(X, Y, verbose=0).epoch == [0]
