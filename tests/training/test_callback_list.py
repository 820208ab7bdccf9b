"""Callbacks of batches are called if they exist, wherever they come from."""

import keras
import pytest

import tfdist
from tests.training.programs import X, Y, dense

HOOKS = [
    "on_batch_begin",
    "on_batch_end",
    *(
        f"on_{kind}_batch_{end}"
        for kind in ("train", "test", "predict")
        for end in ("begin", "end")
    ),
]


@pytest.mark.parametrize("is_of_class", [True, False])
@pytest.mark.parametrize("name", HOOKS)
def test_a_single_hook_is_called_for_each_batch(name, is_of_class):
    calls = []

    def hook(*arguments, logs=None):
        calls.append(arguments)

    callback = keras.callbacks.Callback()
    if is_of_class:
        callback = type("Own", (keras.callbacks.Callback,), {name: hook})()
    else:
        setattr(callback, name, hook)
    trainer = tfdist.Trainer(dense)
    options = {"batch_size": 8, "verbose": 0, "callbacks": [callback]}
    if "test" in name:
        trainer.evaluate(X, Y, **options)
    elif "predict" in name:
        trainer.predict(X, **options)
    else:
        trainer.fit(X, Y, shuffle=False, **options)
    assert len(calls) == 4


def test_a_hook_that_comes_later_is_called():
    calls = []

    class Late(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                self.on_train_batch_end = lambda batch, logs: calls.append(batch)

    tfdist.Trainer(dense).fit(X, Y, batch_size=8, epochs=2, verbose=0, callbacks=[Late()])
    assert calls == [0, 1, 2, 3]
