"""The guard refuses what replicas cannot divide, by name, and leaves everything as it was."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests import zoo
from tests.training.programs import (
    INDIVISIBLE,
    KINDS,
    PROGRAMS,
    AssigningLoss,
    Draws,
    OwnSteps,
    X,
    Y,
    build_summing_over_time,
    dense,
)
from tfdist.errors import TfdistError
from tfdist.training.guard.examples import choose_rows
from tfdist.training.guard.guard import Guard
from tfdist.training.replicas.divisible import is_known, predicts_by_known_layers

FIT = {"epochs": 1, "verbose": 0, "shuffle": False, "batch_size": 8}
L = keras.layers


def _train(build, x=X, y=Y, **options):
    trainer = zoo.make_trainer(build, strategy=zoo.STRATEGIES["mirrored-2"](), **options)
    trainer.fit(x, y, **FIT)
    return trainer


def _read_all(trainer):
    """Returns the values of all variables that a program may have."""
    model = trainer.model
    names = ("num_steps", "distance", "scale")
    others = [getattr(holder, name, None) for holder in (model, model.loss) for name in names]
    variables = [*model.variables, *model.optimizer.variables, *others]
    return [variable.numpy() for variable in variables if variable is not None]


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize(
    "build",
    [
        PROGRAMS["a step that changes variables"].build,
        PROGRAMS["batch normalization"].build,
        PROGRAMS["a moving mean"].build,
        PROGRAMS["draws beside a normalization"].build,
        lambda: dense(loss=AssigningLoss()),
        lambda: dense(keras.optimizers.Adam(0.01), metrics=[keras.metrics.AUC()]),
    ],
)
def test_the_guard_leaves_no_trace(build):
    found = []
    for check in ("on", "off"):
        keras.utils.set_random_seed(1)
        trainer = _train(build, KINDS[:, :1] * X, KINDS, check=check)
        assert (trainer.engine.check_s > 0) == (check == "on")
        found.append(_read_all(trainer))
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_array_equal(ours, theirs)


CULPRITS = {
    "a mean of some": "the loss '_mean_of_present' is not a mean over examples",
    "a mean of some of one output": "the loss '_mean_of_present' is not a mean over examples",
    "a centered batch after others": "the layer 'centered.*' .Centered. combines the examples",
    "a centered batch": "the layer 'centered.*' .Centered. combines the examples",
    "Dice": "the loss 'dice' is not a mean over examples",
    "a contrast": "the loss 'contrast' is not a mean over examples",
    "a nested mean": "the operation 'mean.*' .Mean. combines the examples",
    "an added maximum": "add_loss is not a mean",
    "pairs": "Pairs.compute_loss",
    "sums by two sizes": "SumsByTwoSizes.train_step",
    "a count": "the state .*seen",
}


@pytest.mark.thorough(keep=5)
@pytest.mark.parametrize("name", {**CULPRITS, **INDIVISIBLE})
def test_what_replicas_cannot_divide_is_refused_before_the_first_step(name):
    program = INDIVISIBLE[name]
    trainer = zoo.make_trainer(program.build, strategy=zoo.STRATEGIES["mirrored-2"]())
    with pytest.raises(TfdistError, match=CULPRITS.get(name)) as error:
        trainer.fit(program.make_dataset(), shuffle=False, verbose=0)
    assert re.fullmatch("Cannot divide a batch over 2 replicas: .* depends on .*", str(error.value))
    assert trainer.step == 0


def test_sums_that_no_scale_makes_right_are_refused_after_one_trace():
    traces = []

    def product_of_sums(y_true, y_pred):
        if not tf.executing_eagerly() and tf.distribute.has_strategy():
            traces.append(tf.distribute.get_replica_context())
        return tf.reduce_sum((y_true - y_pred) ** 2) * tf.reduce_sum(y_true**2)

    def build():
        model = dense()
        model.compile("sgd", product_of_sums)
        return model

    with pytest.raises(TfdistError, match="depends on which examples are together"):
        _train(build)
    assert len(list(filter(None, traces))) == 2  # one trace of two replicas


def test_a_count_that_is_alike_in_all_parts_is_refused():
    """Scaled, each part's count is almost that of the batch, and the gradient almost right."""

    def divided_by_a_count(y_true, y_pred):
        return tf.reduce_sum((y_true - y_pred) ** 2, 1) / tf.reduce_sum(y_true)

    def build():
        model = dense()
        model.compile("sgd", divided_by_a_count)
        return model

    y = 1 + 5e-4 * np.random.default_rng(0).normal(size=Y.shape).astype("float32")
    with pytest.raises(TfdistError, match="depends on which examples are together"):
        _train(build, X, y)


@pytest.mark.parametrize("is_known", [True, False])
def test_sums_over_examples_are_not_confused_with_others(is_known):
    """Over a length that is unknown in the step only, a sum would look like one over examples."""
    x = 0.1 * X.reshape(32, 6, 1)
    time = 6 if is_known else None
    data = tf.data.Dataset.from_generator(
        lambda: ((x[i : i + 8], x[i : i + 8]) for i in range(0, 32, 8)),
        output_signature=(tf.TensorSpec((None, time, 1)),) * 2,
    ).apply(tf.data.experimental.assert_cardinality(4))
    trainer = zoo.make_trainer(build_summing_over_time, strategy=zoo.STRATEGIES["mirrored-2"]())
    if not is_known:
        with pytest.raises(TfdistError, match="which sums of SumOverTime are over the examples"):
            trainer.fit(data, shuffle=False, verbose=0)
        return
    trainer.fit(data, shuffle=False, verbose=0)
    model = build_summing_over_time()
    model.fit(data, shuffle=False, verbose=0)
    assert zoo.largest_difference(trainer.model.get_weights(), model.get_weights()) < 1e-6


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize("strategy_name", ["one_device", "mirrored-2"])
@pytest.mark.parametrize(
    "name", ["Dice", "a contrast", "a nested mean", "pairs", "an added maximum"]
)
def test_what_micro_batches_cannot_divide_is_refused(name, strategy_name):
    program = INDIVISIBLE[name]
    strategy = zoo.STRATEGIES[strategy_name]()
    trainer = zoo.make_trainer(program.build, strategy=strategy, micro_batches=2)
    with pytest.raises(TfdistError, match="into 2 micro-batches: .* leave out `micro_batches`"):
        trainer.fit(*program.data, **FIT)


@pytest.mark.parametrize(
    "build", [PROGRAMS["a plain compute_loss"].build, lambda: dense(between=L.Dropout(0.3, seed=1))]
)
def test_what_micro_batches_can_divide_passes(build):
    strategy = zoo.STRATEGIES["one_device"]()
    trainer = zoo.make_trainer(build, strategy=strategy, micro_batches=3, check="on")
    trainer.fit(X, Y, **FIT)
    assert trainer.engine.check_s > 0


def test_what_it_costs_is_known_after_a_refusal():
    trainer = zoo.make_trainer(
        INDIVISIBLE["a centered batch"].build, strategy=zoo.STRATEGIES["mirrored-2"]()
    )
    with pytest.raises(TfdistError, match="Cannot divide"):
        trainer.fit(X, Y, **FIT)
    assert trainer.engine.check_s > 0


def test_what_is_known_is_guarded_under_untested_versions(monkeypatch):
    monkeypatch.setattr("tfdist.training.fit.engine.find_untested", lambda: "")
    assert _train(dense).engine.check_s == 0
    monkeypatch.setattr("tfdist.training.fit.engine.find_untested", lambda: "Keras 4: newer")
    assert _train(dense).engine.check_s > 0
    assert _train(dense, check="off").engine.check_s == 0


def test_a_prediction_that_depends_on_the_batch_is_refused():
    build = INDIVISIBLE["a centered batch"].build
    trainer = tfdist.Trainer(build, strategy=zoo.STRATEGIES["mirrored-2"]())
    with pytest.raises(TfdistError, match="the output depends on which examples are together"):
        trainer.predict(X, batch_size=8)
    trainer = zoo.make_trainer(build, strategy=zoo.STRATEGIES["mirrored-2"](), check="off")
    assert trainer.predict(X, batch_size=8).shape == (32, 2)


@pytest.mark.parametrize("predicts", [True, False])
def test_a_prediction_within_an_epoch_leaves_its_metrics(predicts):
    trainer = zoo.make_trainer(dense, strategy=zoo.STRATEGIES["mirrored-2"](), check="on")

    class Predicts(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 1 and predicts:
                trainer.predict(X, batch_size=8, verbose=0)

    history = trainer.fit(X, Y, **FIT, callbacks=[Predicts()]).history
    expected = zoo.trace_once(dense()).fit(X, Y, **FIT).history
    np.testing.assert_allclose(history["loss"], expected["loss"], rtol=1e-5)


def test_batches_smaller_than_the_replicas_do_not_hide_the_others():
    def make_batches():
        yield X[:1], Y[:1]
        yield X[1:9], Y[1:9]

    trainer = tfdist.Trainer(
        INDIVISIBLE["a centered batch"].build, strategy=zoo.STRATEGIES["mirrored-2"]()
    )
    with pytest.raises(TfdistError, match="Cannot divide a batch over 2 replicas"):
        trainer.fit(make_batches(), verbose=0)
    assert trainer.step == 1  # the first batch, which each replica has whole


class LastMean(L.Layer):
    """Keeps the mean of its examples, to which each replica's part counts by its size."""

    def build(self, shape):
        self.mean = self.add_weight(shape=(shape[-1],), initializer="zeros", trainable=False)

    def call(self, x, training=None):
        if training:
            self.mean.assign(keras.ops.mean(x, axis=0))
        return x


def test_a_mean_over_uneven_parts_is_that_of_the_batch():
    """Over three replicas batches of 8 are of 3, 3 and 2 rows."""

    def build():
        return dense(between=LastMean(name="last"))

    model = build()
    model.fit(X, Y, **FIT)
    trainer = zoo.make_trainer(build, strategy=zoo.STRATEGIES["mirrored-3"](), check="on")
    trainer.fit(X, Y, **FIT)
    np.testing.assert_allclose(
        trainer.model.get_layer("last").mean.numpy(), model.get_layer("last").mean, atol=1e-6
    )


class AddMean(L.Layer):
    """Adds a part of the mean of the batch."""

    def __init__(self, share=0.03, **options):
        super().__init__(**options)
        self.share = share

    def call(self, x):
        return x + self.share * keras.ops.mean(x, axis=0)

    def compute_output_shape(self, shape):
        return shape


def _steepen(x):
    return keras.ops.sin(3e4 * L.BatchNormalization()(x))


class StepsInFloat32(keras.Model):
    def train_step(self, data):
        x, y = (tf.cast(t, tf.float32) for t in data)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(y - tf.identity(self(x, training=True))))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


@pytest.mark.parametrize("cls", [keras.Model, StepsInFloat32])
def test_a_network_that_amplifies_rounding_is_not_refused(cls):
    _train(lambda: dense(between=_steepen, cls=cls), check="on")


@pytest.mark.parametrize("between", [lambda x: AddMean()(_steepen(x)), lambda x: AddMean()(x)])
def test_a_network_that_amplifies_rounding_hides_nothing(between):
    with pytest.raises(TfdistError, match="Cannot divide a batch .* 'add_mean.* combines"):
        _train(lambda: dense(between=between))


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_a_small_difference_that_is_not_rounding_is_refused(policy):
    """A ratio of two means of the batch is almost the mean of the parts' ratios."""

    def ratio(y_true, y_pred):
        return keras.ops.mean((y_true - y_pred) ** 2) / (1 + 0.1 * keras.ops.mean(y_true))

    def build():
        keras.config.set_dtype_policy(policy)
        try:
            model = dense()
        finally:
            keras.config.set_dtype_policy("float32")
        model.compile("sgd", ratio)
        return model

    with pytest.raises(TfdistError, match="depends on which examples are together"):
        _train(build)


@pytest.mark.parametrize("gap", [2e-5, 1e-4, 5e-4])
def test_a_loss_that_is_wrong_by_little_is_refused_by_name(gap):
    """A product of two means of the batch. The guard takes 7 of its examples, in parts of 4."""

    def measure(rows):
        return np.mean((y[rows] - outputs[rows]) ** 2), np.mean(y[rows])

    x, y = (leaf.numpy() for leaf in choose_rows((tf.constant(X[:8]), tf.constant(Y[:8])), 7))
    outputs = dense().predict(x, verbose=0)
    error, size = measure(slice(7))
    parts = [(4 / 7, measure(slice(4))), (3 / 7, measure(slice(4, 7)))]
    share = gap * error / abs(error * size - sum(part * e * s for part, (e, s) in parts))

    def product(y_true, y_pred):
        return keras.ops.mean((y_true - y_pred) ** 2) * (1 + share * keras.ops.mean(y_true))

    with pytest.raises(TfdistError, match="the loss 'product' is not a mean"):
        _train(lambda: dense(loss=product))


def test_weights_in_float32_of_a_model_in_float64_are_rounded(float64):
    def build():
        model = dense(cls=keras.Model)
        model.get_layer("a").enable_lora(2)
        model.compile("sgd", "mse")
        return model

    _train(build, X.astype("float64"), Y.astype("float64"), check="on")


@pytest.mark.parametrize("share", [1e-3, 1e-2])
def test_a_layer_that_is_wrong_by_little_is_refused_by_name(share):
    with pytest.raises(TfdistError, match=r"'mean_of_all' \(AddMean\) combines the examples"):
        _train(lambda: dense(between=AddMean(share, name="mean_of_all")))


def test_a_clear_difference_needs_no_float64(monkeypatch):
    """Computing it again traces a large network twice as often."""
    traced = []
    original = Guard._trace
    monkeypatch.setattr(Guard, "_trace", lambda guard: traced.append(1) or original(guard))
    with pytest.raises(TfdistError, match="Cannot divide"):
        _train(INDIVISIBLE["a contrast"].build)
    assert len(traced) == 1


def _deepen(x, depth):
    for number in range(depth):
        start = keras.initializers.GlorotUniform(number)
        x = L.Dense(8, kernel_initializer=start)(x)
        x = keras.activations.relu(L.BatchNormalization()(x))
    return x


def test_gradients_that_amplify_rounding_need_no_float64(monkeypatch):
    traced, moved = [], []
    trace, compute = Guard._trace, Guard._compute

    def record(guard, rows, **options):
        moved.extend(options)
        return compute(guard, rows, **options)

    monkeypatch.setattr(Guard, "_trace", lambda guard: traced.append(1) or trace(guard))
    monkeypatch.setattr(Guard, "_compute", record)
    _train(lambda: dense(between=lambda x: _deepen(x, 12)), check="on")
    assert moved == ["moved_by"]  # the plain comparison has found a difference
    assert len(traced) == 1


class Standardize(L.Layer):
    """Divides by the moving size of what it has seen, with a variable of its own."""

    def build(self, shape):
        self.size = self.add_weight(name="size", initializer="ones", trainable=False)

    def call(self, x):
        self.size.assign(0.5 * self.size + 0.5 * keras.ops.max(keras.ops.abs(x)))
        return x / self.size


class OwnForward(keras.Model):
    """Has layers, but no `call`."""

    def __init__(self):
        super().__init__()
        self.standardize, self.dense = Standardize(name="standardize"), L.Dense(1)
        self.standardize.build((None, 4))
        self.dense.build((None, 4))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(y - self.dense(self.standardize(x))))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


def test_the_layer_whose_state_differs_is_named_rather_than_the_step():
    def build():
        model = OwnForward()
        model.compile("sgd")
        return model

    with pytest.raises(
        TfdistError, match=r"the layer 'standardize' \(Standardize\) updates 'size'"
    ):
        _train(build, np.arange(128.0).reshape(32, 4).astype("float32"), Y[:, :1])


class NoisySGD(keras.optimizers.SGD):
    def update_step(self, gradient, variable, learning_rate):
        noise = tf.random.normal(tf.shape(gradient))
        super().update_step(gradient + noise, variable, learning_rate)


class Noise:
    """A part of a model that Keras knows, apart from its numbers."""

    def __call__(self, value=0.0):
        return tf.reduce_sum(tf.cast(value, "float32")) * 0.0 + tf.random.normal([])


class NoisyRegularizer(Noise, keras.regularizers.Regularizer):
    pass


class NoisyConstraint(Noise, keras.constraints.Constraint):
    def __call__(self, value):
        return value * super().__call__()


class NoisyRate(Noise, keras.optimizers.schedules.LearningRateSchedule):
    pass


def _with_part(**parts):
    return lambda: dense(between=keras.layers.Dense(4, **parts))


@pytest.mark.parametrize(
    ("name", "build"),
    [
        (r"The layer 'draws(_\d+)?' \(Draws\)", lambda: dense(between=Draws())),
        ("Functional", lambda: dense(NoisySGD(0.1))),
        ("Functional", _with_part(kernel_regularizer=NoisyRegularizer())),
        ("Functional", _with_part(kernel_constraint=NoisyConstraint())),
        ("Functional", lambda: dense(keras.optimizers.SGD(NoisyRate()))),
    ],
    ids=["layer", "update", "regularizer", "constraint", "schedule"],
)
def test_draws_of_tensorflow_are_refused(name, build):
    with pytest.raises(TfdistError, match=f"^{name} draws with TensorFlow's RandomStandardNormal"):
        _train(build)


@pytest.mark.parametrize("method", ["evaluate", "test_on_batch"])
def test_draws_of_tensorflow_in_evaluations_are_refused(method):
    build = _with_part(kernel_regularizer=NoisyRegularizer())
    trainer = zoo.make_trainer(build, strategy=zoo.STRATEGIES["mirrored-2"]())
    with pytest.raises(TfdistError, match="draws with TensorFlow's RandomStandardNormal"):
        getattr(trainer, method)(X, Y)


class WeightedAverage(OwnSteps):
    """Weights losses as TensorFlow's tutorials do: TensorFlow then computes in float32."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            losses = keras.losses.mean_squared_error(y, self(x, training=True))
            loss = tf.nn.compute_average_loss(losses, sample_weight=tf.abs(x[:, 0]))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"distance": loss}


def test_a_weighted_average_of_tensorflow_is_divided_in_float64(float64):
    found, expected = (
        zoo.make_trainer(lambda: dense(cls=WeightedAverage), strategy=zoo.STRATEGIES[name]()).fit(
            X, Y, epochs=3, batch_size=9, shuffle=False, verbose=0
        )
        for name in ("mirrored-2", "one_device")
    )
    assert found.history["distance"] == pytest.approx(expected.history["distance"], rel=1e-12)


class WithinFunction(OwnSteps):
    @tf.function
    def train_step(self, data):
        return super().train_step(data)


class WithinCondition(OwnSteps):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.num_steps = keras.Variable(0, trainable=False, dtype="int32")

    def train_step(self, data):
        logs = super().train_step(data)
        tf.cond(
            logs["distance"] > 0,
            lambda: tf.convert_to_tensor(self.num_steps.assign_add(1)),
            lambda: tf.constant(0),
        )
        return logs


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize("cls", [WithinFunction, WithinCondition])
@pytest.mark.parametrize("check", ["auto", "off"])
def test_where_replicas_cannot_meet_the_error_has_one_line(cls, check):
    with pytest.raises(TfdistError, match=f"cannot run a step of {cls.__name__}") as error:
        _train(lambda: dense(cls=cls), check=check)
    assert "\n" not in str(error.value)


class StartingSGD(keras.optimizers.SGD):
    def build(self, variables):
        super().build(variables)
        self.begun = self.add_variable(shape=(), name="begun")

    def _backend_apply_gradients(self, gradients, variables):
        def begin():
            self.assign(self.begun, keras.ops.ones(()))

        keras.ops.cond(self.iterations == 0, begin, lambda: None)
        super()._backend_apply_gradients(gradients, variables)


class WithinLoop(OwnSteps):
    @tf.function  # which AutoGraph converts: the code that runs is in a file of its own
    def train_step(self, data):
        for _ in tf.range(2):
            OwnSteps.train_step(self, data)
        return {"loss": tf.constant(0.0)}


@pytest.mark.parametrize(
    ("name", "build"),
    {
        "begin": lambda: dense(StartingSGD(0.1)),
        "train_step": lambda: dense(cls=WithinLoop),
    }.items(),
    ids=["function", "loop"],
)
def test_the_place_where_replicas_cannot_meet_is_named(name, build):
    place = rf"or a loop \(in {name}, .*(test_guard|programs).py:\d+\)\. Move"
    with pytest.raises(TfdistError, match=place):
        _train(build)


def test_a_loss_of_the_whole_batch_is_refused_where_its_parts_agree():
    y = np.tile(np.array([[1, 0], [0, 1]], "f4"), (16, 1))
    with pytest.raises(TfdistError, match="the loss 'dice' is not a mean .* gather_outputs=True"):
        _train(INDIVISIBLE["Dice"].build, X * 0.01, y)


def _own_activation(x):
    return x


def _nest(between):
    inputs = keras.Input((4,))
    return keras.Model(inputs, between(inputs))


def _embed(x):
    return L.Reshape((2, 2))(x)


UNKNOWN = {
    "softmax of the batch": lambda x: L.Softmax(axis=0)(x),
    "softmax of the batch from the end": lambda x: L.Softmax(axis=-2)(x),
    "norm of the batch": lambda x: L.UnitNormalization(axis=0)(x),
    "own activation": lambda x: L.Dense(4, _own_activation)(x),
    "own activation of a cell": lambda x: L.SimpleRNN(4, _own_activation)(_embed(x)),
    "a function": lambda x: L.Lambda(lambda y: y)(x),
    "attention over the batch": lambda x: L.Flatten()(
        L.MultiHeadAttention(1, 2, attention_axes=0)(_embed(x), _embed(x))
    ),
    "mixed pictures": lambda x: L.Flatten()(L.MixUp()(L.Reshape((2, 2, 1))(x))),
    "a nested mean": lambda x: _nest(lambda y: y - keras.ops.mean(y, axis=0))(x),
    "a nested softmax": lambda x: _nest(lambda y: L.Softmax(axis=0)(y))(x),
    "a wrapped softmax": lambda x: L.Flatten()(L.TimeDistributed(L.Softmax(axis=0))(_embed(x))),
    "a table of examples": lambda x: x + np.ones((8, 4), "f4"),
    "the first example": lambda x: x - x[0],
    "some examples": lambda x: L.Add()([x[::-1, :], x]),
    "an example from the end": lambda x: x - x[-1, ...],
    "stacked examples": lambda x: keras.ops.sum(keras.ops.stack([x, x], axis=0), axis=0),
    "a number of each example": lambda x: keras.ops.expand_dims(x[:, 0] * np.ones(8, "f4"), 1),
}
KNOWN = {
    "a sum": lambda x: x + L.Dense(4)(x),
    "a mask": lambda x: L.LSTM(4)(L.Masking(0.0)(_embed(x))),
    "operations": lambda x: keras.ops.relu(x) * keras.ops.sigmoid(x) - 0.5,
    "a product": lambda x: x * 0.5,
    "a vector": lambda x: x + keras.ops.arange(4, dtype="float32"),
    "columns": lambda x: x[:, ::-1] + x[..., 1:2] * 2,
    "other columns": lambda x: keras.ops.stack([x[..., i] for i in (3, 1, 2, 0)], axis=-1),
    "a norm": lambda x: L.LayerNormalization()(x),
    "a batch norm": lambda x: L.BatchNormalization()(x),
    "attention": lambda x: L.Flatten()(L.MultiHeadAttention(1, 2)(_embed(x), _embed(x))),
    "a cell": lambda x: L.LSTM(4)(_embed(x)),
    "a nested network": lambda x: _nest(lambda y: L.Dense(4, "relu")(y))(x),
    "a product of examples": lambda x: L.EinsumDense("ab,bc->ac", (4, 4))(x),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_may_combine_examples_is_not_taken_for_known(name):
    model = dense(between=UNKNOWN[name])
    model._symbolic_build(data_batch=(tf.zeros((8, 6)), tf.zeros((8, 2))))
    assert not is_known(model)
    assert not predicts_by_known_layers(model)


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize("name", KNOWN)
def test_keras_s_layers_are_known_and_the_guard_agrees(name):
    trainer = _train(lambda: dense(between=KNOWN[name]), check="on")
    assert is_known(trainer.model)


@pytest.mark.parametrize(
    "loss",
    [
        "dice",
        "tversky",
        keras.losses.Dice(),
        keras.losses.CosineSimilarity(axis=0),
        keras.losses.CategoricalCrossentropy(axis=0),
        keras.losses.MeanSquaredError(reduction="none"),
        keras.losses.MeanSquaredError(reduction=None),
        lambda y_true, y_pred: keras.ops.mean((y_true - y_pred) ** 2, -1),
    ],
)
def test_losses_of_batches_and_of_strangers_are_not_taken_for_known(loss):
    model = dense(loss=loss)
    model._symbolic_build(data_batch=(tf.zeros((8, 6)), tf.zeros((8, 2))))
    assert not is_known(model)


def test_a_network_of_keras_applications_is_known():
    model = keras.applications.ConvNeXtTiny(
        weights=None, input_shape=(32, 32, 3), include_preprocessing=False, classes=2
    )
    assert predicts_by_known_layers(model)


@pytest.mark.parametrize("network", ["densenet", "mobilenet_v2", "resnet"])
def test_the_preprocessing_of_keras_applications_is_known(network):
    given = keras.Input((8, 8, 3))
    x = getattr(keras.applications, network).preprocess_input(given)
    assert predicts_by_known_layers(keras.Model(given, L.Flatten()(x)))


def test_a_metric_of_the_whole_batch_gets_the_whole_batch():
    def build():
        return dense(last="sigmoid", loss="binary_crossentropy", metrics=[keras.losses.dice])

    expected = build().fit(X, KINDS, **FIT).history
    found = _train(build, X, KINDS).history.history
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-5, err_msg=name)


def test_a_first_batch_without_weight_hides_nothing():
    def dice(y, found):
        return keras.losses.dice(tf.abs(y), tf.sigmoid(found))

    trainer = zoo.make_trainer(lambda: dense(loss=dice), strategy=zoo.STRATEGIES["mirrored-2"]())
    weights = np.repeat([0.0, 1.0], 16)
    with pytest.raises(TfdistError, match="the loss 'dice' is not a mean over examples"):
        trainer.fit(X, Y, sample_weight=weights, batch_size=16, shuffle=False, verbose=0)
