"""What depends on a branch of a replica's own mean is refused before the first step."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests import zoo
from tests.training.programs import Y, dense
from tfdist.errors import TfdistError

# The mean of the sign is 1 in the first batch, and 0 on one of two replicas in the second.
X = np.repeat([[1.0], [1.0], [1.0], [0.0]], 8, 0).astype("f4") * np.ones((32, 6), "f4")


class Adapts(keras.layers.Layer):
    """Keeps a state that depends on a mean over the examples.

    Args:
      adapt: the state's value and the examples -> its next value.
    """

    def __init__(self, adapt):
        super().__init__()
        self._adapt = adapt

    def build(self, shape):
        self.state = self.add_weight(shape=(), initializer="zeros", trainable=False, name="state")

    def call(self, x, training=None):
        if training:
            self.state.assign(self._adapt(self.state.value, x))
        return x


def _train(adapt, strategy="mirrored-2", **options):
    def build():
        inputs = keras.Input((6,))
        model = keras.Model(inputs, dense().layers[-1](dense().layers[1](Adapts(adapt)(inputs))))
        model.compile("sgd", "mse")
        return model

    trainer = zoo.make_trainer(build, strategy=zoo.STRATEGIES[strategy](), **options)
    trainer.fit(X, Y, epochs=1, batch_size=16, shuffle=False, verbose=0)
    return next(float(v) for v in trainer.model.non_trainable_variables if "state" in v.path)


def _clip(state, x):
    return tf.clip_by_value(state + tf.reduce_mean(x) - 0.75, 0.0, 0.3)


def _choose(state, x):
    return tf.where(tf.reduce_mean(x) > 0.75, state + 1.0, state)


def _take_branch(state, x):
    return tf.cond(tf.reduce_mean(x) > 0.75, lambda: state + 1.0, lambda: state)


def _keep_lowest(state, x):
    return keras.ops.minimum(state, keras.ops.mean(x) - 0.75)


@pytest.mark.parametrize(
    ("adapt", "operation"),
    [
        (_clip, "Maximum"),
        (_choose, "SelectV2"),
        (_take_branch, "If|StatelessIf"),
        (_keep_lowest, "Minimum"),
    ],
)
def test_a_branch_that_the_first_batch_does_not_show_is_refused(adapt, operation):
    with pytest.raises(TfdistError, match=f"state is what ({operation}) makes of a"):
        _train(adapt)
    assert _train(adapt, check="off") != _train(adapt, "one_device")


def _reduce_first(state, x):
    context = tf.distribute.get_replica_context()
    mean = context.all_reduce(tf.distribute.ReduceOp.MEAN, tf.reduce_mean(x))
    return tf.clip_by_value(state + mean - 0.75, 0.0, 0.3)


@pytest.mark.parametrize(
    "adapt",
    [
        lambda state, x: 0.9 * state + tf.reduce_mean(tf.nn.relu(x - 0.5)),
        lambda state, x: tf.clip_by_value(state + 0.2, 0.0, 0.3),
        lambda state, x: state + tf.reduce_sum(x) / tf.cast(tf.maximum(tf.size(x), 1), x.dtype),
        lambda state, x: tf.cond(state < 9.0, lambda: state + tf.reduce_mean(x), lambda: state),
        _reduce_first,
    ],
    ids=["of each example", "of no example", "of sizes", "of a state", "of all replicas"],
)
def test_other_branches_are_equal_to_one_device(adapt):
    assert _train(adapt) == pytest.approx(_train(adapt, "one_device"), abs=1e-6)


class Floods(keras.Model):
    """Keeps the loss of a batch above a level, as "flooding" does."""

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        loss = super().compute_loss(x, y, y_pred, sample_weight)
        return tf.abs(loss - self.level) + self.level


@pytest.mark.parametrize(
    ("level", "text"),
    [(0.0, "the loss is what Abs makes of a replica's own"), (1.3, "depends on which examples")],
    ids=["which does not show", "which shows"],
)
def test_a_loss_with_a_branch_is_refused_by_what_shows_first(level, text):
    def build():
        model = dense(cls=Floods)
        model.level = level
        return model

    trainer = zoo.make_trainer(build, strategy=zoo.STRATEGIES["mirrored-2"]())
    with pytest.raises(TfdistError, match=text):
        trainer.fit(X, Y, epochs=1, batch_size=16, verbose=0)


def test_a_loss_with_branches_for_each_example_is_divided():
    def build():
        return dense(loss=lambda y, found: tf.reduce_mean(tf.maximum(tf.abs(y - found), 0.1), -1))

    trainer = zoo.make_trainer(build, strategy=zoo.STRATEGIES["mirrored-2"]())
    found = trainer.fit(X, Y, epochs=1, batch_size=16, shuffle=False, verbose=0).history["loss"]
    expected = build().fit(X, Y, epochs=1, batch_size=16, shuffle=False, verbose=0)
    assert found == pytest.approx(expected.history["loss"], rel=1e-6)
