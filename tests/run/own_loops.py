"""A script of training loops as tutorials write them; it prints the numbers that each ends with.

python tests/run/own_loops.py NAME ...
"""

import json
import sys

import keras
import numpy as np
import tensorflow as tf

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(40, 4)), RNG.normal(size=(40, 1))
PROGRAMS = {}


def program(function):
    PROGRAMS[function.__name__] = function
    return function


def read(batch_size=8):
    data = tf.data.Dataset.from_tensor_slices((X, Y))
    return data.shuffle(40, seed=2).batch(batch_size)


def weigh(*models):
    return [
        float(np.sum(w * (1 + np.arange(w.size).reshape(w.shape))))
        for m in models
        for w in m.get_weights()
    ]


def make(*layers):
    return keras.Sequential([keras.layers.Dense(6, "relu"), *layers, keras.layers.Dense(1)])


class Fitted:
    """The class of the guides: a step with a tape, and a loop over epochs and batches."""

    def __init__(self, make_step=tf.function):
        self.model, self.optimizer = make(keras.layers.Dropout(0.3)), keras.optimizers.Adam(1e-2)
        self.loss = keras.losses.MeanSquaredError()
        self.mean = keras.metrics.Mean(name="train_loss")
        self.step = make_step(self.train_step)

    def train_step(self, x, y):
        with tf.GradientTape() as tape:
            loss = self.loss(y, self.model(x, training=True))
        gradients = tape.gradient(loss, self.model.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.model.trainable_variables, strict=True))
        self.mean.update_state(loss)
        return loss

    def train(self):
        found = []
        for _ in range(2):
            self.mean.reset_state()
            found += [self.step(x, y).numpy() for x, y in read()]
            found.append(self.mean.result())
        return found + weigh(self.model)


@program
def guide_s_class():
    return Fitted().train()


@program
def guide_s_class_without_a_function():
    return Fitted(lambda step: step).train()


class Decorated:
    def __init__(self, rate):
        self.model = make(keras.layers.BatchNormalization())
        self.optimizer = keras.optimizers.SGD(rate, momentum=0.9, global_clipnorm=0.5)
        self.metric = keras.metrics.MeanAbsoluteError()

    @tf.function
    def step(self, x, y):
        with tf.GradientTape() as tape:
            outputs = self.model(x, training=True)
            loss = tf.reduce_mean((y - outputs) ** 2)
        weights = self.model.trainable_weights
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        self.metric.update_state(y, outputs)
        return {"loss": loss, "mae": self.metric.result()}

    @tf.function
    def check(self, x, y):
        self.metric.update_state(y, self.model(x, training=False))


@program
def methods_with_the_decorator():
    """Two objects of one class; Keras's guide, with an evaluation."""
    found, fitted = [], [Decorated(0.1), Decorated(0.05)]
    for x, y in read():
        for each in fitted:
            found += [float(value) for value in each.step(x, y).values()]
    for each in fitted:
        each.metric.reset_state()
        for x, y in read(16):
            each.check(x, y)
        found.append(float(each.metric.result()))
    return found + weigh(*(each.model for each in fitted))


@program
def models_as_arguments():
    @tf.function
    def step(model, optimizer, x, y, training=True, scale=1.0):
        with tf.GradientTape() as tape:
            each = keras.losses.MeanSquaredError(reduction=None)(y, model(x, training=training))
            loss = tf.nn.compute_average_loss(each) * scale
        weights = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return loss

    models = [make(), make(keras.layers.Dropout(0.5))]
    optimizers = [keras.optimizers.RMSprop(1e-2) for _ in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        model(X)  # a tf.function creates variables in its first call only
        optimizer.build(model.trainable_variables)
    found = []
    for x, y in read():
        for model, optimizer in zip(models, optimizers, strict=True):
            found.append(step(model, optimizer, x, y, training=True))
            found.append(step(model, optimizer, x, y, training=False, scale=0.5))
    return [float(value) for value in found] + weigh(*models)


@program
def dcgan():
    """The noise has the size of a whole batch, so that a step cannot be divided."""
    generator = keras.Sequential([keras.layers.Dense(4)])
    discriminator = make()
    optimizers = keras.optimizers.Adam(1e-2), keras.optimizers.Adam(2e-2)
    entropy = keras.losses.BinaryCrossentropy(from_logits=True)
    seed = keras.random.SeedGenerator(4)

    @tf.function
    def train_step(images):
        noise = keras.random.normal([8, 3], seed=seed)
        with tf.GradientTape() as of_generator, tf.GradientTape() as of_discriminator:
            fake = generator(noise, training=True)
            real, faked = discriminator(images, training=True), discriminator(fake, training=True)
            loss = entropy(tf.ones_like(faked), faked)
            total = entropy(tf.ones_like(real), real) + entropy(tf.zeros_like(faked), faked)
        for tape, value, model, optimizer in (
            (of_generator, loss, generator, optimizers[0]),
            (of_discriminator, total, discriminator, optimizers[1]),
        ):
            weights = model.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(value, weights), weights, strict=True))
        return loss, total

    found = [float(value) for x, _ in read() for value in train_step(x)]
    return found + weigh(generator, discriminator)


@program
def outputs_of_examples():
    """A step that returns its predictions is computed whole."""
    model, optimizer = make(), keras.optimizers.SGD(0.1)

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            outputs = model(x, training=True)
            loss = tf.reduce_mean((y - outputs) ** 2)
        weights = model.trainable_variables
        optimizer.apply(tape.gradient(loss, weights), weights)
        return loss, outputs

    found = [step(x, y) for x, y in read()]
    return [float(tf.reduce_sum(value)) for pair in found for value in pair] + weigh(model)


@program
def loss_that_cannot_be_divided():
    model, optimizer = make(), keras.optimizers.SGD(0.1)

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_max(tf.abs(y - model(x, training=True)))
        weights = model.trainable_variables
        optimizer.apply(tape.gradient(loss, weights), weights)
        return loss

    return [float(step(x, y)) for x, y in read()] + weigh(model)


@program
def only_tensor_that_is_no_batch():
    model, optimizer = make(), keras.optimizers.SGD(0.1)
    x = tf.constant(X)

    @tf.function
    def step(limits):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.clip_by_value(model(x), limits[0], limits[3]) ** 2)
        weights = model.trainable_variables
        optimizer.apply(tape.gradient(loss, weights), weights)
        return loss

    model(x)
    return [float(step(tf.constant([-0.5, 0.0, 0.0, 2.0], x.dtype))), *weigh(model)]


@program
def function_of_an_epoch():
    model, optimizer = make(), keras.optimizers.SGD(0.1)
    data = read()

    @tf.function
    def step_of_a_batch(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((y - model(x, training=True)) ** 2)
        weights = model.trainable_variables
        optimizer.apply(tape.gradient(loss, weights), weights)
        return loss

    @tf.function
    def train():
        total = tf.zeros([], tf.float64)
        for x, y in data:
            total += step_of_a_batch(x, y)
        return total

    return [float(train()) for _ in range(2)] + weigh(model)


@program
def accumulated_gradients():
    model, optimizer = make(), keras.optimizers.Adam(1e-2)
    model(X)
    sums = [tf.Variable(tf.zeros_like(v)) for v in model.trainable_variables]

    @tf.function
    def add(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((y - model(x, training=True)) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        for total, gradient in zip(sums, gradients, strict=True):
            total.assign_add(gradient)
        return loss

    @tf.function
    def apply():
        optimizer.apply_gradients(
            zip([total / 5 for total in sums], model.trainable_variables, strict=True)
        )
        for total in sums:
            total.assign(tf.zeros_like(total))

    found = []
    for _ in range(2):
        found += [float(add(x, y)) for x, y in read()]
        apply()
    return found + weigh(model)


@program
def learning_rate_finder():
    model, optimizer = make(), keras.optimizers.SGD(1e-3)

    @tf.function(reduce_retracing=True)
    def step(x, y, weight):
        with tf.GradientTape() as tape:
            loss = weight * tf.reduce_mean((y - model(x, training=True)) ** 2)
            if weight > 1.0:
                loss *= 2.0
        weights = model.trainable_variables
        optimizer.apply(tape.gradient(loss, weights), weights)
        return loss

    found = []
    for place, (x, y) in enumerate(read()):
        optimizer.learning_rate = 1e-3 * 2**place
        found.append(float(step(x, y, tf.constant(0.5 + place / 3, tf.float64))))
    return found + weigh(model)


@program
def loop_in_the_open():
    """Keras's guide: the tape is in the loop itself."""
    model, optimizer = make(), keras.optimizers.Adam(1e-2)
    loss_fn, found = keras.losses.Huber(), []
    for x, y in read():
        with tf.GradientTape() as tape:
            loss = loss_fn(y, model(x, training=True))
        gradients = tape.gradient(loss, model.trainable_weights)
        optimizer.apply(gradients, model.trainable_weights)
        found.append(float(loss))
    return found + weigh(model)


@program
def strategy_of_the_script():
    """TensorFlow's tutorial for strategies: the step takes an iterator and divides by itself."""
    strategy = tf.distribute.MirroredStrategy()
    with strategy.scope():
        model, optimizer = make(), keras.optimizers.Adam(1e-2)
        model.build((None, 4))
        optimizer.build(model.trainable_variables)
    loss_fn = keras.losses.MeanSquaredError(reduction=None)

    @tf.function
    def train_step(iterator):
        def step(inputs):
            x, y = inputs
            with tf.GradientTape() as tape:
                losses = loss_fn(y, model(x, training=True))
                loss = tf.nn.compute_average_loss(losses, global_batch_size=8)
            weights = model.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
            return loss

        losses = strategy.run(step, args=(next(iterator),))
        return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)

    batches = iter(strategy.experimental_distribute_dataset(read()))
    return [float(train_step(batches)) for _ in range(5)] + weigh(model)


@program
def parts_of_other_sizes():
    """CycleGAN's tutorial zips two datasets; the last batch of one is smaller."""
    model, optimizer = make(), keras.optimizers.Adam(1e-2)

    @tf.function
    def step(x, others):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x) ** 2) + tf.reduce_mean(model(others) ** 2)
        weights = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return loss

    others = tf.data.Dataset.from_tensor_slices(X[::-1][:20]).batch(8)
    batches = tf.data.Dataset.zip((read().map(lambda x, y: x), others))
    return [float(step(*batch)) for _ in range(2) for batch in batches] + weigh(model)


@program
def after_a_fit():
    """A compiled model is fitted, then trained by hand with its own optimizer, then fitted."""
    model = make(keras.layers.Dropout(0.2))
    model.compile(keras.optimizers.Adam(1e-2), "mse")
    model.fit(read(), epochs=1, verbose=0)

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = model.compute_loss(x, y, model(x, training=True))
        weights = model.trainable_variables
        model.optimizer.apply(tape.gradient(loss, weights), weights)
        return loss

    found = [float(step(x, y)) for x, y in read()]
    found += model.fit(read(), epochs=1, verbose=0).history["loss"]
    return found + weigh(model) + [float(model.evaluate(X, Y, verbose=0))]


def run(names):
    """Returns the numbers of each program, which computes in float64."""
    keras.config.set_floatx("float64")
    results = {}
    for name in names:
        keras.utils.set_random_seed(7)
        results[name] = [float(value) for value in PROGRAMS[name]()]
    return results


if __name__ == "__main__":
    print(json.dumps(run(sys.argv[1:] or PROGRAMS)))
