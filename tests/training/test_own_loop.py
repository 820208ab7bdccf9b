"""Training loops of one's own: on one device as in Keras, on replicas as on one device."""

import contextlib
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests import zoo
from tfdist.errors import TfdistError
from tfdist.launch import run_local_cluster

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(22, 4)), RNG.normal(size=(22, 1))
STRATEGIES = ["mirrored-2", "mirrored-3", "central_storage-2"]

pytestmark = pytest.mark.usefixtures("float64")


class Plain:
    """The loop that TensorFlow's and Keras's guides teach."""

    scope = staticmethod(contextlib.nullcontext)
    distribute = staticmethod(tf.function)

    def batches(self, *arrays, batch_size, shuffle):
        return tf.data.Dataset.from_tensor_slices(arrays).batch(batch_size)


def make_model(*layers, units=1):
    return keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(units)])


class Trained:
    """The class of the field's guides: `train_step` with a tape, and `train` over the data."""

    def __init__(self, loop):
        self.loop = loop
        with loop.scope():
            self.model = make_model(
                keras.layers.Dense(6, "relu"), keras.layers.Dropout(0.2, seed=1)
            )
            self.optimizer = keras.optimizers.Adam(1e-2)
        self.loss = keras.losses.MeanSquaredError()
        self.step = loop.distribute(self.train_step)

    def train_step(self, x, y):
        with tf.GradientTape() as tape:
            loss = self.loss(y, self.model(x, training=True))
        gradients = tape.gradient(loss, self.model.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.model.trainable_variables, strict=True))
        return loss

    def train(self):
        batches = self.loop.batches(X, Y, batch_size=8, shuffle=False)
        return [self.step(x, y) for x, y in batches], [self.model]


def guide_s_class(loop):
    return Trained(loop).train()


def keras_s_guide(loop):
    """A metric that is reset by hand, clipping, and an evaluation step."""
    with loop.scope():
        model = make_model(keras.layers.BatchNormalization())
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.5)
        metric = keras.metrics.MeanAbsoluteError()
    loss_fn = keras.losses.Huber()

    @loop.distribute
    def train_step(x, y):
        with tf.GradientTape() as tape:
            outputs = model(x, training=True)
            loss = loss_fn(y, outputs)
        gradients = tape.gradient(loss, model.trainable_weights)
        optimizer.apply(gradients, model.trainable_weights)
        metric.update_state(y, outputs)
        return {"loss": loss, "mae": metric.result()}

    @loop.distribute
    def test_step(x, y):
        metric.update_state(y, model(x, training=False))

    found = []
    for _ in range(2):
        for x, y in loop.batches(X, Y, batch_size=8, shuffle=False):
            logs = train_step(x, y)
            found += [logs["loss"], logs["mae"]]
        metric.reset_state()
        for x, y in loop.batches(X, Y, batch_size=8, shuffle=False):
            assert test_step(x, y) is None
        found.append(metric.result())
        metric.reset_state()
    return found, [model]


def tensorflow_s_tutorial(loop):
    """A loss of each example, averaged over the global batch."""
    with loop.scope():
        model = make_model(keras.layers.Dense(5, "tanh"))
        optimizer = keras.optimizers.RMSprop(1e-2)
    loss_fn = keras.losses.MeanSquaredError(reduction=None)

    @loop.distribute
    def train_step(x, y):
        with tf.GradientTape() as tape:
            losses = loss_fn(y, model(x, training=True))
            loss = tf.nn.compute_average_loss(losses)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    batches = loop.batches(X, Y, batch_size=8, shuffle=False)
    return [train_step(x, y) for x, y in batches], [model]


def gan(loop):
    """Two models and two optimizers in one step, whose noise is that of the examples."""
    with loop.scope():
        noise = keras.random.SeedGenerator(3)
        generator = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4)])
        discriminator = make_model(keras.layers.Dense(5, "relu"))
        of_generator = keras.optimizers.Adam(1e-2)
        of_discriminator = keras.optimizers.Adam(2e-2)
    entropy = keras.losses.BinaryCrossentropy(from_logits=True)

    @loop.distribute
    def train_step(real):
        z = keras.random.normal((tf.shape(real)[0], 3), seed=noise)
        with tf.GradientTape(persistent=True) as tape:
            fake = generator(z, training=True)
            on_real = discriminator(real, training=True)
            on_fake = discriminator(fake, training=True)
            loss_g = entropy(tf.ones_like(on_fake), on_fake)
            loss_d = entropy(tf.ones_like(on_real), on_real)
            loss_d += entropy(tf.zeros_like(on_fake), on_fake)
        for model, optimizer, loss in (
            (generator, of_generator, loss_g),
            (discriminator, of_discriminator, loss_d),
        ):
            weights = model.trainable_variables
            optimizer.apply(tape.gradient(loss, weights), weights)
        return loss_g, loss_d

    found = []
    for (x,) in [(x,) for x, _ in loop.batches(X, Y, batch_size=8, shuffle=False)]:
        found += train_step(x)
    return found, [generator, discriminator]


def vae(loop):
    with loop.scope():
        noise = keras.random.SeedGenerator(5)
        encoder, decoder = (
            make_model(units=4),
            keras.Sequential([keras.Input((2,)), keras.layers.Dense(4)]),
        )
        optimizer = keras.optimizers.Adam(1e-2)
        total = keras.metrics.Mean()

    @loop.distribute
    @tf.function
    def train_step(x):
        with tf.GradientTape() as tape:
            mean, log_variance = tf.split(encoder(x, training=True), 2, axis=1)
            epsilon = keras.random.normal(tf.shape(mean), seed=noise)
            decoded = decoder(mean + tf.exp(0.5 * log_variance) * epsilon, training=True)
            error = tf.reduce_mean(tf.reduce_sum((x - decoded) ** 2, 1))
            kl = -0.5 * (1 + log_variance - mean**2 - tf.exp(log_variance))
            loss = error + tf.reduce_mean(tf.reduce_sum(kl, 1))
        weights = encoder.trainable_variables + decoder.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        total.update_state(loss)
        return total.result()

    batches = loop.batches(X, Y, batch_size=8, shuffle=False)
    return [train_step(x) for x, _ in batches], [encoder, decoder]


def accumulated_gradients(loop):
    """A step without a batch applies what the steps before it have added up."""
    with loop.scope():
        model = make_model()
        optimizer = keras.optimizers.SGD(0.1)
        sums = [tf.Variable(tf.zeros_like(v)) for v in model.trainable_variables]

    @loop.distribute
    def add(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((y - model(x, training=True)) ** 2)
        for total, gradient in zip(
            sums, tape.gradient(loss, model.trainable_variables), strict=True
        ):
            total.assign_add(gradient / 3)
        return loss

    @loop.distribute
    def apply():
        optimizer.apply([tf.identity(s) for s in sums], model.trainable_variables)
        for total in sums:
            total.assign(tf.zeros_like(total))

    found = []
    for _ in range(2):
        for x, y in loop.batches(X, Y, batch_size=8, shuffle=False):
            found.append(add(x, y))
        apply()
    return found, [model]


def learning_rate_finder(loop):
    """The learning rate is set between the steps, and another number given to each."""
    with loop.scope():
        model = make_model(keras.layers.Dense(5, "relu"))
        optimizer = keras.optimizers.SGD(1e-4)

    @loop.distribute
    def train_step(x, y, *, smooth):
        with tf.GradientTape() as tape:
            error = tf.reduce_mean((y - model(x, training=True)) ** 2)
            loss = error * (1 - smooth)
        weights = model.trainable_variables
        optimizer.apply(tape.gradient(loss, weights), weights)
        return loss

    found = []
    for x, y in loop.batches(X, Y, batch_size=8, shuffle=False):
        found.append(train_step(x, y, smooth=0.1))
        optimizer.learning_rate = float(optimizer.learning_rate) * 10
    return found, [model]


def control_flow(loop):
    """A `tf.function` with Python's `if` and `for`, which calls another step."""
    with loop.scope():
        model = make_model()
        optimizer = keras.optimizers.SGD(0.1)

    @loop.distribute
    def compute_loss(x, y):
        return tf.reduce_mean((y - model(x, training=True)) ** 2)

    @loop.distribute
    @tf.function
    def train_step(x, y, factor):
        scale = tf.constant(0.0, tf.float64)
        for _ in tf.range(3):
            if factor > 1.0:
                scale += tf.cast(factor, tf.float64)
        with tf.GradientTape() as tape:
            loss = scale * compute_loss(x, y)
        weights = model.trainable_variables
        optimizer.apply(tape.gradient(loss, weights), weights)
        return loss

    batches = loop.batches(X, Y, batch_size=8, shuffle=False)
    return [train_step(x, y, tf.constant(1.5)) for x, y in batches], [model]


LOOPS = [
    guide_s_class,
    keras_s_guide,
    tensorflow_s_tutorial,
    gan,
    vae,
    accumulated_gradients,
    learning_rate_finder,
    control_flow,
]


def run(program, loop):
    keras.utils.set_random_seed(1)
    found, models = program(loop)
    weights = [weight.numpy().ravel() for model in models for weight in model.weights]
    return np.array([float(value) for value in found]), np.concatenate(weights)


@pytest.mark.parametrize("program", LOOPS)
def test_a_loop_ends_as_without_tfdist(program):
    expected = run(program, Plain())
    on_one_device = run(program, tfdist.Loop(strategy="one_device"))
    for found, right in zip(on_one_device, expected, strict=True):
        np.testing.assert_array_equal(found, right)
    # Each strategy has its turn.
    name = STRATEGIES[LOOPS.index(program) % len(STRATEGIES)]
    on_replicas = run(program, tfdist.Loop(strategy=zoo.STRATEGIES[name]()))
    for found, right in zip(on_replicas, expected, strict=True):
        np.testing.assert_allclose(found, right, rtol=0, atol=1e-10)


def test_a_method_is_distributed_in_its_class():
    loop = tfdist.Loop(strategy=zoo.STRATEGIES["mirrored-2"]())

    class Fitted:
        def __init__(self):
            with loop.scope():
                self.model, self.optimizer = make_model(), keras.optimizers.SGD(0.1)

        @loop.distribute
        def step(self, x, y):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((y - self.model(x)) ** 2)
            weights = self.model.trainable_variables
            self.optimizer.apply(tape.gradient(loss, weights), weights)
            return loss

    first, second = Fitted(), Fitted()
    before = second.model.get_weights()
    losses = [first.step(X[:8], Y[:8]) for _ in range(3)]
    assert losses[0] > losses[2]
    np.testing.assert_array_equal(second.model.get_weights()[0], before[0])


def test_an_argument_may_be_a_number_or_one_for_each_example():
    loop = tfdist.Loop(strategy=zoo.STRATEGIES["mirrored-2"]())
    with loop.scope():
        model = make_model()

    @loop.distribute
    def mean(x, scale):
        result = tf.reduce_mean(model(x)[:, 0] * tf.cast(scale, tf.float64))
        return {"mean": result} if len(getattr(scale, "shape", ())) else result

    plain = model(X)[:, 0].numpy()
    for _ in range(2):
        np.testing.assert_allclose(mean(X, 2.0), 2 * plain.mean())
        np.testing.assert_allclose(mean(X, tf.constant(3.0)), 3 * plain.mean())
        np.testing.assert_allclose(mean(X, Y[:, 0])["mean"], np.mean(plain * Y[:, 0]))


def test_batches_come_in_the_order_of_fit():
    class Seen(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.losses = []

        def on_train_batch_end(self, batch, logs=None):
            self.losses.append(logs["loss"])

    def build():
        model = keras.Sequential(
            [keras.Input((4,)), keras.layers.Dense(1, kernel_initializer="ones")]
        )
        model.compile(keras.optimizers.SGD(0.0), "mse")
        return model

    seen, trainer = Seen(), tfdist.Trainer(build, strategy="one_device", seed=4)
    trainer.fit(X, Y, batch_size=8, epochs=2, callbacks=[seen], verbose=0)
    loop = tfdist.Loop(strategy="one_device", seed=4)
    squares = [
        tf.reduce_sum((y - tf.reduce_sum(x, 1, keepdims=True)) ** 2)
        for _ in range(2)
        for x, y in loop.batches(X, Y, batch_size=8)
    ]
    counts = [8, 8, 6] * 2
    ends = [np.cumsum(squares[k : k + 3]) / np.cumsum(counts[:3]) for k in (0, 3)]
    np.testing.assert_allclose(np.concatenate(ends), seen.losses, rtol=1e-12)


def _make_step(loop, compute):
    with loop.scope():
        model, optimizer = make_model(), keras.optimizers.SGD(0.1)

    def step(x, y):
        with tf.GradientTape() as tape:
            loss, found = compute(y, model(x, training=True))
        weights = model.trainable_variables
        optimizer.apply(tape.gradient(loss, weights), weights)
        return found

    return loop.distribute(step)


def test_a_step_that_replicas_cannot_divide_is_refused():
    loop = tfdist.Loop(strategy=zoo.STRATEGIES["mirrored-2"]())

    def compute(y, outputs):
        loss = tf.reduce_max(tf.abs(y - outputs))
        return loss, loss

    with pytest.raises(TfdistError, match="step"):
        _make_step(loop, compute)(X[:8], Y[:8])


def test_what_a_step_cannot_return_or_be_is_said_in_one_line():
    loop = tfdist.Loop(strategy=zoo.STRATEGIES["mirrored-2"]())
    step = _make_step(loop, lambda y, outputs: (tf.reduce_mean((y - outputs) ** 2), outputs))
    with pytest.raises(TfdistError, match="step returns a tensor of shape .* Return numbers"):
        step(X[:8], Y[:8])
    with pytest.raises(Exception, match="called in a tf.function. Call it in a Python loop"):
        tf.function(lambda: step(X[:8], Y[:8]))()
    with pytest.raises(TfdistError, match="no Keras model or optimizer was found in it"):
        loop.distribute(lambda x: tf.reduce_mean(x))(X)
    with pytest.raises(TfdistError, match="batch_size"):
        next(loop.batches(X, Y, batch_size=0))


SCRIPT = """
import sys, keras, numpy as np, tensorflow as tf, tfdist
from tests.training import test_own_loop as loops
keras.config.set_floatx("float64")
for place, program in enumerate((loops.guide_s_class, loops.keras_s_guide, loops.gan)):
    loop = tfdist.Loop(strategy="multi_worker_mirrored") if not place else loop
    found, weights = loops.run(program, loop)
    if loop.is_chief:
        np.savez(f"{sys.argv[1]}/{program.__name__}.npz", found=found, weights=weights)
"""


@pytest.mark.cluster
@pytest.mark.timeout(600)
def test_two_workers_end_as_one_device(tmp_path):
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    result = run_local_cluster(
        workers=2, command=command, run_dir=str(tmp_path), timeout_s=500, stream=False
    )
    assert result.status == 0, [task.log.read_text()[-2000:] for task in result.tasks]
    for program in (guide_s_class, keras_s_guide, gan):
        with np.load(tmp_path / f"{program.__name__}.npz") as workers:
            found, weights = run(program, Plain())
            np.testing.assert_allclose(workers["found"], found, rtol=0, atol=1e-10)
            np.testing.assert_allclose(workers["weights"], weights, rtol=0, atol=1e-10)


def test_micro_batches_are_refused():
    strategy = zoo.STRATEGIES["mirrored-2"]()
    options = tfdist.StepOptions(micro_batches=2)
    step = _make_step(tfdist.Loop(strategy=strategy, step_options=options), _mean_square)
    with pytest.raises(TfdistError, match="step"):
        step(X[:8], Y[:8])


def _mean_square(y, outputs):
    loss = tf.reduce_mean((y - outputs) ** 2)
    return loss, loss
