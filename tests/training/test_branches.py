"""What depends on a branch of a replica's own numbers is refused before the first step."""

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


def _choose_one(state, x):
    index = tf.cast(tf.reduce_mean(x) > 0.75, tf.int32)
    return tf.switch_case(index, [lambda: state, lambda: state + 1.0])


def _count(state, x):
    mean = tf.reduce_mean(x)
    return state + tf.while_loop(lambda n: n < mean, lambda n: [n + 0.4], [0.0])[0]


def _branch_in_loop(state, x):
    mean = tf.reduce_mean(x)
    return tf.while_loop(
        lambda n, _: n < 2, lambda n, s: [n + 1, s + tf.maximum(mean, 0.75)], [0, state]
    )[1]


def _branch_in_function(state, x):
    limit = tf.function(lambda mean: tf.maximum(mean, 0.75))
    return state + limit(tf.reduce_mean(x))


def _branch_in_branch(state, x):
    mean = tf.reduce_mean(x)
    return tf.cond(state < 9.0, lambda: state + tf.maximum(mean, 0.75), lambda: state)


def _truncate(state, x):
    return state + tf.cast(tf.cast(2.0 * tf.reduce_mean(x[:, 0]), tf.int32), tf.float32) ** 2


def _scale_all(state, x):
    return state + tf.reduce_mean(x * tf.where(tf.reduce_mean(x) > 0.75, 2.0, 1.0))


def _take_largest(state, x):
    return state + tf.reduce_max(tf.stack([tf.reduce_mean(x), 0.75]))


@pytest.mark.parametrize(
    ("adapt", "operation"),
    [
        (_clip, "Maximum"),
        (_choose, "SelectV2"),
        (_take_branch, "If|StatelessIf"),
        (_keep_lowest, "Minimum"),
        (_choose_one, "Case|StatelessCase"),
        (_count, "While|StatelessWhile"),
        (_branch_in_loop, "Maximum"),
        (_branch_in_function, "Maximum"),
        (_branch_in_branch, "Maximum"),
        (_truncate, "Cast"),
        (_scale_all, "SelectV2"),
        (_take_largest, "Max"),
    ],
)
def test_a_branch_that_the_first_batch_does_not_show_is_refused(adapt, operation):
    with pytest.raises(TfdistError, match=f"state is what ({operation}) makes of a"):
        _train(adapt)
    assert _train(adapt, check="off") != _train(adapt, "one_device")


def _loop_until_the_longest_has_ended(state, x):
    longest = tf.cast(tf.reduce_max(3.0 * x), tf.int32)

    def add(n, total):
        is_in = tf.cast(n, tf.float32) < 3.0 * x
        return [n + 1, total + tf.where(is_in, 1.0, 0.0)]

    _, total = tf.while_loop(lambda n, _: n < longest, add, [0, tf.zeros_like(x)])
    return state + tf.reduce_mean(total)


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
        _loop_until_the_longest_has_ended,
    ],
    ids=[
        "of each example",
        "of no example",
        "of sizes",
        "of a state",
        "of all replicas",
        "longest",
    ],
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


class Limits(keras.Model):
    """Evaluates and predicts with numbers of a batch that has a limit."""

    def __init__(self, *args, part="", **kwargs):
        super().__init__(*args, **kwargs)
        self.part, self.score = part, keras.metrics.Mean(name="score")

    def test_step(self, data):
        x, _ = data
        limited = tf.maximum(tf.reduce_mean(x), 0.75)
        if self.part == "log":
            return {"limited": limited}
        if self.part == "metric":
            self.score.update_state(limited)
            return {"limited": self.score.result()}
        if self.part == "rows":
            self.score.update_state(x[:, 0] * limited)
            return {"limited": self.score.result()}
        return super().test_step(data)

    def predict_step(self, data):
        found = super().predict_step(data)
        mean = tf.reduce_mean(data[0] if isinstance(data, tuple) else data)
        return found * tf.maximum(mean, 0.75) if self.part == "outputs" else found


@pytest.mark.parametrize(
    ("part", "text"),
    [
        ("log", "the log 'limited' is what Maximum makes of a"),
        ("metric", "the metric 'score' .Mean. is what Maximum"),
        ("rows", "the metric 'score' .Mean. is what Maximum"),
        ("outputs", "output 0 is what Maximum"),
    ],
)
def test_an_evaluation_and_a_prediction_with_a_branch_are_refused(part, text):
    def use(strategy, **options):
        def build():
            model = dense(cls=Limits)
            model.part = part
            return model

        trainer = zoo.make_trainer(build, strategy=zoo.STRATEGIES[strategy](), **options)
        if part == "outputs":
            return trainer.predict(X, batch_size=16)
        return trainer.evaluate(X, Y, batch_size=16, verbose=0, return_dict=True)["limited"]

    with pytest.raises(TfdistError, match=text):
        use("mirrored-2")
    assert not np.allclose(use("mirrored-2", check="off"), use("one_device"))


def test_an_evaluated_loss_with_a_branch_is_refused():
    def build():
        model = dense(cls=Floods)
        model.level = 0.0
        return model

    trainer = zoo.make_trainer(build, strategy=zoo.STRATEGIES["mirrored-2"]())
    with pytest.raises(TfdistError, match="the loss is what Abs makes of a"):
        trainer.evaluate(X, Y, batch_size=16, verbose=0)


class Adds(keras.Model):
    """Adds a number of the batch that has a limit to the loss."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return super().compute_loss(x, y, y_pred) + tf.maximum(tf.reduce_mean(x), 0.75)


def test_micro_batches_of_a_loss_with_a_branch_are_refused():
    def train(**options):
        strategy = zoo.STRATEGIES["one_device"]()
        trainer = zoo.make_trainer(lambda: dense(cls=Adds), strategy=strategy, **options)
        fit = {"epochs": 1, "batch_size": 16, "shuffle": False, "verbose": 0}
        return trainer.fit(X, Y, **fit).history["loss"]

    with pytest.raises(TfdistError, match="the loss is what Maximum makes of a micro-batch's own"):
        train(micro_batches=2)
    assert not np.allclose(train(micro_batches=2, check="off"), train(), rtol=1e-3)


def test_a_loss_with_branches_for_each_example_is_divided():
    def build():
        return dense(loss=lambda y, found: tf.reduce_mean(tf.maximum(tf.abs(y - found), 0.1), -1))

    trainer = zoo.make_trainer(build, strategy=zoo.STRATEGIES["mirrored-2"]())
    found = trainer.fit(X, Y, epochs=1, batch_size=16, shuffle=False, verbose=0).history["loss"]
    expected = build().fit(X, Y, epochs=1, batch_size=16, shuffle=False, verbose=0)
    assert found == pytest.approx(expected.history["loss"], rel=1e-6)


class Scales(keras.Model):
    """Scales its gradients by a factor that depends on a number with a limit."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.score = keras.metrics.Mean(name="score")
        self.flag = self.add_weight(
            shape=(), initializer="zeros", dtype="bool", trainable=False, name="flag"
        )

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.score.update_state(tf.reduce_mean(x))
        factor = tf.cast(self.choose(self, x), loss.dtype)
        pairs = zip([factor * g for g in gradients], self.trainable_variables, strict=True)
        self.optimizer.apply_gradients(pairs)
        return {"loss": loss}


def _by_mean(model, x):
    return tf.where(tf.reduce_mean(x) > 0.75, 1.0, 0.0)


def _by_result(model, x):
    return tf.where(model.score.result() > 0.9, 1.0, 0.0)


def _by_result_in_branch(model, x):
    return tf.cond(model.score.count > 0.0, lambda: tf.round(model.score.result()), lambda: 1.0)


def _by_total(model, x):
    return tf.where(model.score.total < 1.25, 1.0, 0.0)


def _by_rate(model, x):
    model.optimizer.learning_rate.assign(tf.where(tf.reduce_mean(x) > 0.75, 0.01, 0.1))
    return 1.0


def _by_flag(model, x):
    model.flag.assign(tf.logical_or(model.flag, tf.reduce_mean(x) < 0.75))
    return tf.where(model.flag, 0.0, 1.0)


def _repeat(model, x):
    with tf.GradientTape() as tape:
        weight = model.trainable_variables[0]
        _, total = tf.while_loop(
            lambda n, _: n < 2, lambda n, t: [n + 1, t + tf.reduce_sum(weight**2)], [0, 0.0]
        )
    return 1.0 + 0.1 * tf.reduce_mean(tape.gradient(total, weight))


def _scale(choose, strategy, run_eagerly=False, **options):
    def build():
        model = dense(cls=Scales, run_eagerly=run_eagerly)
        model.choose = choose
        return model

    trainer = zoo.make_trainer(build, strategy=zoo.STRATEGIES[strategy](), **options)
    trainer.fit(X, Y, epochs=2, batch_size=16, shuffle=False, verbose=0)
    return [weight.numpy() for weight in trainer.model.trainable_variables]


@pytest.mark.parametrize(
    ("choose", "text"),
    [
        (_by_mean, "the gradient is what SelectV2"),
        (_by_result_in_branch, "communicates within tf.function, tf.cond or a loop"),
        (_by_total, "the gradient is what SelectV2"),
        (_by_rate, "learning_rate is what SelectV2"),
        (_by_flag, "flag is what Less"),
    ],
)
def test_gradients_and_states_that_are_no_means_are_searched(choose, text):
    with pytest.raises(TfdistError, match=text):
        _scale(choose, "mirrored-2")
    found, expected = _scale(choose, "mirrored-2", check="off"), _scale(choose, "one_device")
    assert zoo.largest_difference(found, expected) > 1e-4


def test_a_result_that_a_step_reads_is_that_of_all_replicas():
    found, expected = _scale(_by_result, "mirrored-2"), _scale(_by_result, "one_device")
    assert zoo.largest_difference(found, expected) < 1e-6
    other = _scale(lambda *_: 1.0, "one_device")
    assert zoo.largest_difference(other, expected) > 1e-4


@pytest.mark.parametrize(
    "choose",
    [
        lambda model, x: tf.where(model.optimizer.iterations < 1, 0.5, 1.0),
        lambda model, x: tf.where(model.flag, 0.5, 1.0),
        _repeat,
    ],
    ids=["of the step", "of a state", "of a loop with a gradient"],
)
def test_gradients_may_depend_on_what_all_replicas_have(choose):
    found, expected = _scale(choose, "mirrored-2"), _scale(choose, "one_device")
    assert zoo.largest_difference(found, expected) < 1e-5


def _by_python(model, x):
    return 1.0 if tf.reduce_mean(x) > 0.75 else 0.0


def _by_number(model, x):
    return round(float(tf.reduce_mean(x)))


@pytest.mark.parametrize(
    ("choose", "text"),
    [
        (_by_mean, "the gradient is what SelectV2"),
        (_by_python, "Scales runs eagerly and may choose in Python"),
        (_by_number, "Scales runs eagerly and may choose in Python"),
    ],
)
def test_steps_that_run_eagerly_are_searched(choose, text):
    with pytest.raises(TfdistError, match=text):
        _scale(choose, "mirrored-2", run_eagerly=True)


def test_steps_that_run_eagerly_may_be_divided():
    def choose(model, x):
        return tf.where(model.optimizer.iterations < 1, 0.5, 1.0)

    found, expected = (
        _scale(choose, name, run_eagerly=True) for name in ("mirrored-2", "one_device")
    )
    assert zoo.largest_difference(found, expected) < 1e-5
