"""Between fits, the variables of a trainer's model are ordinary variables, in no scope."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(8, 3)), RNG.normal(size=(8, 1))


class _Halve(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        rate = self.model.optimizer.learning_rate
        rate.assign(float(rate) / 2 if int(self.model.optimizer.iterations) % 2 else float(rate))


def _make():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.layers[0].kernel.assign([[1.0], [2.0], [3.0]])
    model.compile(keras.optimizers.Adam(0.1), "mse")
    return model


def _use(model, fit):
    fit(X, Y, batch_size=4, shuffle=False, verbose=0, callbacks=[_Halve()])
    weights, optimizer = model.trainable_weights, model.optimizer
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(X) - Y) ** 2)
    gradients = tape.gradient(loss, weights)
    optimizer.apply(gradients, weights)
    weights[0].value[1].assign([5.0])
    weights[0].value.scatter_nd_add([[0]], [[1.0]])
    optimizer.learning_rate = float(optimizer.learning_rate) + 0.5
    fit(X, Y, batch_size=4, shuffle=False, verbose=0)
    for variable in [*model.variables, *optimizer.variables]:
        first, *others = getattr(variable.value, "values", [variable.value])
        for other in others:
            np.testing.assert_array_equal(other.numpy(), first.numpy())
    numbers = float(optimizer.learning_rate), int(optimizer.iterations)
    return [*numbers, *(g.numpy() for g in gradients), *(w.numpy() for w in weights)]


@pytest.mark.parametrize("strategy", ["mirrored", "central_storage"])
def test_a_script_reads_and_writes_a_trained_model(strategy):
    trainer = tfdist.Trainer(_make, strategy=strategy)
    model = _make()
    found = _use(trainer.model, trainer.fit)
    for ours, theirs in zip(found, _use(model, model.fit), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


class _WritesByHandle(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        kernel = self.model.trainable_weights[0]
        new = tf.constant([[0.5 * batch], [1.0], [2.0]])
        tf.raw_ops.AssignVariableOp(resource=kernel.value.handle, value=new)


@pytest.mark.parametrize("of", ["tf", "keras"])
def test_a_write_through_a_handle_reaches_all_copies(of):
    def use(model, fit, predict):
        kernel = model.layers[0].kernel
        handle = (kernel.value if of == "tf" else kernel).handle
        new = tf.constant([[3.0], [2.0], [1.0]])
        tf.raw_ops.AssignVariableOp(resource=handle, value=new)
        found = [predict(X, verbose=0)]
        options = {"batch_size": 4, "shuffle": False, "verbose": 0}
        losses = fit(X, Y, epochs=2, callbacks=[_WritesByHandle()], **options).history["loss"]
        tf.raw_ops.AssignAddVariableOp(resource=handle, value=new)
        return [*found, losses, predict(X, verbose=0), kernel.numpy()]

    trainer, model = tfdist.Trainer(_make, strategy="mirrored"), _make()
    found = use(trainer.model, trainer.fit, trainer.predict)
    for ours, theirs in zip(found, use(model, model.fit, model.predict), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_the_steps_live_as_long_as_the_functions_of_keras():
    def answer(model, trainer):
        found = [trainer.predict(X, verbose=0)]
        model.layers[0].activation = keras.activations.tanh
        found.append(trainer.predict(X, verbose=0))
        model.make_predict_function(force=True)
        return [*found, trainer.predict(X, verbose=0)]

    trainer, model = tfdist.Trainer(_make, strategy="mirrored"), _make()
    for ours, theirs in zip(answer(trainer.model, trainer), answer(model, model), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)
