"""What scripts do with models and variables around `fit`: prints a value for each, as JSON.

Run by `test_ordinary.py`: by itself, and under strategies.
"""

import copy
import functools
import json
import pickle
import sys
import tempfile
import threading

import keras
import numpy as np
import tensorflow as tf

DIRECTORY = tempfile.mkdtemp()
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(16, 3)).astype("f4"), RNG.normal(size=(16, 2)).astype("f4")
snippets = {}


def snippet(function):
    snippets[function.__name__] = function
    return function


def make(*layers, optimizer=None, **options):
    """Returns a compiled model whose weights are known."""
    layers = layers or (keras.layers.Dense(4, "tanh"), keras.layers.Dense(2))
    model = keras.Sequential([keras.Input((3,)), *layers])
    for number, weight in enumerate(model.trainable_weights):
        shape = tuple(weight.shape)
        weight.assign(np.sin(np.arange(np.prod(shape)) + number).reshape(shape))
    model.compile(optimizer or keras.optimizers.SGD(0.1, momentum=0.9), "mse", **options)
    return model


def train(model, epochs=1, **options):
    model.fit(X, Y, batch_size=8, epochs=epochs, shuffle=False, verbose=0, **options)
    return model


def weigh(model):
    """Returns a number for all weights, which all copies must share."""
    check_copies(model.variables)
    return [float(np.sum(np.abs(weight.numpy()))) for weight in model.weights]


def check_copies(variables):
    for variable in variables:
        variable = getattr(variable, "value", variable)
        values = getattr(variable, "values", [variable])
        if "SyncOnRead" not in type(variable).__name__:
            for value in values[1:]:
                np.testing.assert_array_equal(value.numpy(), values[0].numpy())


@snippet
def losses_by_hand():
    """Keras divides a loss by the number of replicas, even where none of them computes it."""
    model = train(make())
    losses = [keras.losses.MeanSquaredError(), keras.losses.Huber(reduction="sum")]
    return [float(loss(Y, model(X))) for loss in losses]


@snippet
def own_training_loop():
    model, optimizer = make(), keras.optimizers.SGD(0.1, momentum=0.9)
    loss_fn = keras.losses.MeanSquaredError()

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_fn(y, model(x, training=True))
        weights = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return loss

    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)
    return [float(step(x, y)) for _ in range(2) for x, y in data] + weigh(model)


@snippet
def updates_of_what_a_tape_watched():
    model = train(make())
    module = tf.Module()
    module.scale = tf.Variable(2.0)
    module.multiply = tf.function(lambda x: x * module.scale, input_signature=[tf.TensorSpec([])])
    tf.saved_model.save(module, f"{DIRECTORY}/multiplies")
    loaded = tf.saved_model.load(f"{DIRECTORY}/multiplies")
    found = []
    for compute, check in (
        (lambda: tf.reduce_mean(model(X) ** 2), lambda: weigh(model)),
        (lambda: (loaded.multiply(tf.constant(3.0)) - 9.0) ** 2, lambda: loaded.scale.numpy()),
    ):
        with tf.GradientTape() as tape:
            loss = compute()
        watched = tape.watched_variables()
        gradients = tape.gradient(loss, watched)
        for variable, gradient in zip(watched, gradients, strict=True):
            variable.assign_sub(0.01 * gradient)
        keras.optimizers.SGD(0.01).apply_gradients(zip(gradients, watched, strict=True))
        check_copies(watched)
        found += [len(watched), np.asarray(check()).tolist()]
    return found


@snippet
def numbers_of_variables():
    model = train(make(optimizer=keras.optimizers.Adam(0.01)))
    optimizer = model.optimizer
    flag, count, none = tf.Variable(False), tf.Variable(3), tf.Variable(0.0)
    return [
        float(optimizer.learning_rate),
        int(optimizer.iterations),
        f"{float(optimizer.learning_rate):.3f}",
        bool(flag),
        "yes" if flag else "no",
        not none,
        int(count),
        complex(count).real,
        list(range(int(count))),
        float(count.assign_add(2)),
        np.array(count).item(),
        np.asarray(model.layers[0].kernel.value).shape,
        float(np.float32(none.assign(1.5))),
        json.dumps(float(optimizer.learning_rate)),
        str(optimizer.learning_rate),
        repr(optimizer.learning_rate),
        float(pickle.loads(pickle.dumps(none))),
        float(copy.copy(none)),
        float(copy.deepcopy(none)),
    ]


@snippet
def writes_reach_all_copies():
    v = tf.Variable(np.arange(12.0).reshape(4, 3))
    slices = tf.IndexedSlices(np.ones((1, 3)), [1])
    v.assign_add(np.ones((4, 3)))
    v.assign_sub(2 * np.ones((4, 3)))
    v.scatter_add(slices)
    v.scatter_sub(slices)
    v.scatter_mul(tf.IndexedSlices(3 * np.ones((1, 3)), [2]))
    v.scatter_div(tf.IndexedSlices(2 * np.ones((1, 3)), [3]))
    v.scatter_max(tf.IndexedSlices(5 * np.ones((1, 3)), [0]))
    v.scatter_min(tf.IndexedSlices(-np.ones((1, 3)), [1]))
    v.scatter_update(tf.IndexedSlices(7 * np.ones((1, 3)), [3]))
    v.scatter_nd_add([[0]], np.ones((1, 3)))
    v.scatter_nd_sub([[1]], np.ones((1, 3)))
    v.scatter_nd_update([[2]], np.ones((1, 3)))
    v.batch_scatter_update(tf.IndexedSlices(np.ones((4, 1)), [[0], [1], [2], [0]]))
    v[1].assign([5.0, 5.0, 6.0])
    v[2:, 1].assign([8.0, 9.0])
    check_copies([v])
    return [v.numpy(), tf.gather(v, [1, 3]), tf.gather_nd(v, [[1, 2]]), v[0], v.sparse_read([0])]


@snippet
def writes_within_a_function():
    v = tf.Variable([1.0, 2.0])
    count = tf.Variable(0, dtype=tf.int64)

    @tf.function
    def step(x):
        count.assign_add(1)
        v.assign(v * x)
        v[0].assign(3.0)
        if count > 1:
            v.assign_add([1.0, 1.0])
        return tf.reduce_sum(v)

    found = [step(tf.constant(2.0)), step(tf.constant(2.0)), v.numpy(), int(count)]
    check_copies([v, count])
    return found


@snippet
def gradients_of_a_trained_model():
    model = train(make())
    x = tf.Variable(X[:2])
    with tf.GradientTape(persistent=True) as tape:
        watched = tf.constant(X[:2])
        tape.watch(watched)
        loss = tf.reduce_sum(model(watched) ** 2)
        own = tf.reduce_sum(model(x) ** 2)
    return [
        *tape.gradient(loss, model.trainable_weights),
        tape.gradient(loss, watched),
        tape.gradient(own, x),
        len(tape.watched_variables()) > 0,
    ]


@snippet
def gradients_of_gradients():
    model = train(make())
    with tf.GradientTape() as outer:
        with tf.GradientTape() as tape:
            x = tf.constant(X[:4])
            tape.watch(x)
            y = model(x)
        penalty = tf.reduce_mean(tape.gradient(y, x) ** 2)
    with tf.GradientTape() as tape:
        outputs = model(X[:2])
    first = model.layers[0]
    return [outer.gradient(penalty, first.kernel), tape.jacobian(outputs, first.bias)]


@snippet
def saliency_within_a_function():
    model = train(make())

    @tf.function
    def explain(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = model(x, training=False)[:, 0]
        return tape.gradient(y, x)

    first = explain(tf.constant(X[:2]))
    train(model)
    return [first, explain(tf.constant(X[:2]))]


@snippet
def class_activation():
    model = keras.Sequential(
        [
            keras.Input((6, 6, 1)),
            keras.layers.Conv2D(2, 3, activation="relu", kernel_initializer="ones", name="conv"),
            keras.layers.GlobalAveragePooling2D(),
            keras.layers.Dense(2, kernel_initializer="ones"),
        ]
    )
    model.compile("sgd", "mse")
    images = np.linspace(0, 1, 4 * 36).reshape(4, 6, 6, 1).astype("f4")
    model.fit(images, Y[:4], batch_size=4, shuffle=False, verbose=0)
    both = keras.Model(model.inputs, [model.layers[0].output, model.layers[-1].output])
    with tf.GradientTape() as tape:
        maps, scores = both(images[:1])
        top = scores[:, 0]
    weights = tf.reduce_mean(tape.gradient(top, maps), (0, 1, 2))
    return [tf.reduce_sum(maps * weights, -1), both.predict(images[:1], verbose=0)[1]]


def _apply(model, how):
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(X, training=True) - Y) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        if how == "pairs":
            model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        else:
            model.optimizer.apply(gradients, model.trainable_variables)
        return loss

    return step


def _loop(optimizer, how="apply", compiled=False):
    model = make(optimizer=optimizer)
    step = _apply(model, how)
    if compiled:
        model.optimizer.build(model.trainable_variables)
        step = tf.function(step)
    losses = [float(step()) for _ in range(3)]
    train(model)
    losses.append(float(step()))
    check_copies(model.optimizer.variables)
    return [losses, weigh(model), int(model.optimizer.iterations)]


OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: keras.optimizers.Adam(0.01, weight_decay=0.1, clipnorm=0.5),
    "ema": lambda: keras.optimizers.Adam(0.01, use_ema=True, ema_overwrite_frequency=2),
    "schedule": lambda: keras.optimizers.RMSprop(keras.optimizers.schedules.CosineDecay(0.1, 9)),
    "lamb": lambda: keras.optimizers.Lamb(0.01, global_clipnorm=0.5),
    "accumulating": lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)),
}
for _name, _make in OPTIMIZERS.items():
    if _name != "accumulating":
        snippets[f"apply_{_name}"] = lambda make=_make: _loop(make())
        snippets[f"apply_{_name}_in_a_function"] = lambda make=_make: _loop(make(), "pairs", True)


@snippet
def apply_accumulated():
    model = make(optimizer=OPTIMIZERS["accumulating"]())
    step = _apply(model, "apply")
    return [[float(step()) for _ in range(4)], weigh(model)]


@snippet
def apply_to_an_embedding():
    model = keras.Sequential([keras.Input((2,), dtype="int32"), keras.layers.Embedding(5, 3)])
    model.layers[0].embeddings.assign(np.sin(np.arange(15.0)).reshape(5, 3))
    found = []
    for optimizer in (keras.optimizers.SGD(0.1), keras.optimizers.Adagrad(0.1)):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(np.array([[1, 1], [3, 1]])) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        found.append(type(gradients[0]).__name__)
        optimizer.apply(gradients, model.trainable_variables)
    return [found, weigh(model)]


@snippet
def averages_by_hand():
    model = train(make())
    average = [tf.Variable(w) for w in model.weights]
    other = keras.models.clone_model(model)
    other.set_weights(model.get_weights())
    for _ in range(2):
        train(model)
        for a, w in zip(average, model.weights, strict=True):
            a.assign(0.9 * a + 0.1 * w)
        for mine, theirs in zip(other.weights, model.weights, strict=True):
            mine.assign(0.5 * mine + 0.5 * theirs)
    check_copies(average)
    return [weigh(model), weigh(other), [float(tf.norm(a)) for a in average]]


@snippet
def pruned():
    model = train(make())
    masks = [keras.ops.cast(keras.ops.abs(w) > 0.3, "float32") for w in model.trainable_weights]

    class Prune(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            for weight, mask in zip(self.model.trainable_weights, masks, strict=True):
                weight.assign(weight * mask)

    train(model, callbacks=[Prune()])
    return [weigh(model), [int(keras.ops.count_nonzero(w)) for w in model.trainable_weights]]


@snippet
def learning_rates_in_a_callback():
    seen = []

    class Find(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            rate = self.model.optimizer.learning_rate
            rate.assign(float(rate) * 0.5)
            seen.append([float(rate), int(self.model.optimizer.iterations)])

        def on_epoch_end(self, epoch, logs=None):
            self.model.optimizer.learning_rate = float(self.model.optimizer.learning_rate) + 0.1
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(self.model(X[:2]) ** 2)
            seen.append([float(tf.norm(g)) for g in tape.gradient(loss, self.model.weights)])
            seen.append(float(self.model.metrics[0].result()))

    model = train(make(), epochs=2, callbacks=[Find()])
    return [seen, weigh(model)]


@snippet
def variables_in_a_generator():
    model = make()
    seen = []

    def generate():
        for start in range(0, 16, 8):
            seen.append(float(model.optimizer.learning_rate))
            model.optimizer.learning_rate.assign(0.05)
            yield X[start : start + 8], Y[start : start + 8]

    model.fit(generate(), verbose=0)
    check_copies(model.optimizer.variables)
    return sorted(set(seen))


METRICS = {
    "MeanIoU": lambda: keras.metrics.MeanIoU(3),
    "AUC": lambda: keras.metrics.AUC(),
    "Precision": lambda: keras.metrics.Precision(),
    "F1": lambda: keras.metrics.F1Score(),
    "R2": lambda: keras.metrics.R2Score(),
    "Mean": lambda: keras.metrics.Mean(),
}


@snippet
def metrics_by_hand():
    found = {}
    for name, build in METRICS.items():
        metric = build()
        for batch in range(3):
            rows = RNG_OF_METRICS[name][batch]
            metric.update_state(*rows)
        found[name] = [np.asarray(metric.result()), [np.sum(v.numpy()) for v in metric.variables]]
        saved = [v.numpy() for v in metric.variables]
        metric.reset_state()
        for variable, value in zip(metric.variables, saved, strict=True):
            variable.assign(value)
        found[name].append(np.asarray(metric.result()))
    return found


def _make_rows():
    rng = np.random.default_rng(1)
    labels, scores = rng.integers(0, 2, (3, 5, 2)).astype("f4"), rng.random((3, 5, 2)).astype("f4")
    classes = rng.integers(0, 3, (2, 3, 25))
    rows = {name: list(zip(labels, scores, strict=True)) for name in METRICS}
    return rows | {
        "MeanIoU": list(zip(*classes, strict=True)),
        "Mean": [(row,) for row in scores],
    }


RNG_OF_METRICS = _make_rows()


class Largest(keras.metrics.Metric):
    """Starts from a number that is not zero, and keeps one that is no sum."""

    def __init__(self, name="largest"):
        super().__init__(name=name)
        self.largest = self.add_variable((), keras.initializers.Constant(-5.0), name="largest")
        self.seen = self.add_variable((), "zeros", dtype="int32", name="seen")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.largest.assign(keras.ops.maximum(self.largest, keras.ops.max(y_pred)))
        self.seen.assign_add(1)

    def result(self):
        return self.largest + keras.ops.cast(self.seen, "float32")

    def reset_state(self):
        self.largest.assign(-5.0)
        self.seen.assign(0)


@snippet
def own_metrics_by_hand():
    metric = Largest()
    found = [float(metric.largest)]
    for _ in range(3):
        metric.update_state(Y, Y)
        found.append(float(metric.result()))
    metric.reset_state()
    found.append(float(metric.result()))
    metric.seen.assign_add(3)
    metric.seen.assign_sub(1)
    return [*found, int(metric.seen)]


@snippet
def own_metrics_read_in_a_callback():
    seen = []

    class Read(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            results = self.model.get_metrics_result()
            seen.append([{k: float(v) for k, v in results.items()}, logs])

    model = train(make(metrics=[Largest(), "mae"]), callbacks=[Read()])
    model.evaluate(X, Y, verbose=0)
    return [seen, {k: float(v) for k, v in model.get_metrics_result().items()}]


@snippet
def metrics_of_the_chief():
    resolver = getattr(tf.distribute.get_strategy(), "cluster_resolver", None)
    if resolver is None or not resolver.task_id:
        metric = keras.metrics.MeanSquaredError()
        metric.update_state(Y, Y + 1)
        return [float(metric.result()), float(metric.total)]
    return [1.0, 16.0]


@snippet
def metrics_within_a_function():
    metric = keras.metrics.SparseCategoricalAccuracy()
    matrix = tf.Variable(tf.zeros([3, 3], tf.int32), trainable=False)

    @tf.function
    def update(labels, scores):
        metric.update_state(labels, scores)
        matrix.assign_add(tf.math.confusion_matrix(labels, tf.argmax(scores, -1), 3))
        return metric.result()

    labels, scores = np.array([0, 1, 2, 1]), np.eye(4, 3, dtype="f4")
    update(labels, scores)
    return [update(labels[:3], scores[:3]), metric.result(), matrix.numpy()]


@snippet
def restored_sums():
    options = {
        "trainable": False,
        "synchronization": tf.VariableSynchronization.ON_READ,
        "aggregation": tf.VariableAggregation.SUM,
    }
    total = tf.Variable([3, 5], **options)
    path = tf.train.Checkpoint(total=total).write(f"{DIRECTORY}/total")
    total.assign_add([1, 1])
    total.scatter_add(tf.IndexedSlices([2], [0]))
    found = [total.numpy(), int(tf.reduce_sum(total)), total[0]]
    tf.train.Checkpoint(total=total).restore(path)
    return [*found, total.numpy()]


@snippet
def quantized():
    found = []
    for step in (lambda m: m.predict(X, verbose=0), lambda m: m.evaluate(X, Y, verbose=0)):
        model = train(make())
        before = step(model)
        model.quantize("int8")
        found += [np.asarray(before), np.asarray(step(model))]
    return found


@snippet
def lora():
    model = train(make())
    before = model.predict(X, verbose=0)
    keras.utils.set_random_seed(1)
    model.layers[0].enable_lora(2)
    model.layers[0].lora_kernel_b.assign(np.ones((2, 4)))
    after = model.predict(X, verbose=0)
    model.make_predict_function(force=True)
    forced = model.predict(X, verbose=0)
    model.compile("sgd", "mse")
    return [before, after, forced, train(model).predict(X, verbose=0)]


@snippet
def functions_are_remade():
    class Scaled(keras.layers.Layer):
        scale = 1.0

        def call(self, x):
            return x * self.scale

    layer = Scaled()
    model = make(keras.layers.Dense(2), layer)
    found = []

    def look():
        found.append(model.predict(X, verbose=0))
        found.append(model.evaluate(X, Y, verbose=0))
        found.append(train(model).history.history["loss"])

    look()
    layer.scale = 2.0
    look()
    model.predict_function = None
    found.append(model.predict(X, verbose=0))
    model.make_test_function(force=True)
    found.append(model.evaluate(X, Y, verbose=0))
    model.train_function = None
    look()
    layer.scale = 3.0
    model.compile("sgd", "mse")
    look()
    layer.scale = 4.0
    model.run_eagerly = True
    look()
    model.compile("sgd", "mse", run_eagerly=True)
    look()
    return found


@snippet
def toggled():
    model = train(make())
    model.layers[0].trainable = False
    train(model)
    found = [weigh(model)]
    model.compile(keras.optimizers.SGD(0.1), "mse")
    train(model)
    model.layers[0].trainable = True
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return [*found, weigh(train(model)), len(model.trainable_weights)]


@snippet
def schedule_after_fit():
    model = train(make())
    model.optimizer.learning_rate = keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)
    train(model)
    return [weigh(model), float(model.optimizer.learning_rate)]


@snippet
def adversarial():
    generator = make(keras.layers.Dense(3))
    judge = make(keras.layers.Dense(4, "tanh"), keras.layers.Dense(2))
    judge.trainable = False
    both = keras.Sequential([keras.Input((3,)), generator, judge])
    both.compile("sgd", "mse")
    judge.trainable = True
    judge.compile(keras.optimizers.SGD(0.1), "mse")
    losses = []
    for _ in range(3):
        judge.trainable = True
        losses.append(judge.train_on_batch(generator.predict(X, verbose=0), Y))
        judge.trainable = False
        losses.append(both.train_on_batch(X, Y))
    return [losses, weigh(judge), weigh(generator)]


@snippet
def copies_and_files():
    model = train(make())
    model.save(f"{DIRECTORY}/model.keras")
    model.save_weights(f"{DIRECTORY}/model.weights.h5")
    again = keras.saving.load_model(f"{DIRECTORY}/model.keras")
    pickled, copied = pickle.loads(pickle.dumps(model)), copy.deepcopy(model)
    other = make()
    other.load_weights(f"{DIRECTORY}/model.weights.h5")
    path = tf.train.Checkpoint(model=model).write(f"{DIRECTORY}/checkpoint")
    restored = make()
    tf.train.Checkpoint(model=restored).restore(path)
    trained = [weigh(train(m)) for m in (model, again, pickled, copied)]
    return [trained, weigh(other), weigh(restored)]


@snippet
def exported():
    model = train(make())
    model.export(f"{DIRECTORY}/exported", verbose=False)
    tf.saved_model.save(model, f"{DIRECTORY}/saved")
    loaded = tf.saved_model.load(f"{DIRECTORY}/exported")
    layer = keras.layers.TFSMLayer(f"{DIRECTORY}/exported", call_endpoint="serve")
    named = loaded.signatures["serving_default"](tf.constant(X[:2]))

    class Counter(tf.Module):
        def __init__(self):
            super().__init__()
            self.count = tf.Variable(0)

        @tf.function(input_signature=[])
        def add(self):
            return self.count.assign_add(1)

    tf.saved_model.save(Counter(), f"{DIRECTORY}/counter")
    counter = tf.saved_model.load(f"{DIRECTORY}/counter")
    counter.add()
    counts = [counter.add(), counter.count.numpy()]
    check_copies([counter.count])
    inputs = keras.Input((3,))
    around = keras.Model(inputs, layer(inputs) * 2)
    return [
        counts,
        loaded.serve(X[:2]),
        *named.values(),
        layer(X[:2]),
        around.predict(X[:3], verbose=0),
        model.predict(X[:2], verbose=0),
        tf.function(loaded.serve)(tf.constant(X[:2])),
    ]


@snippet
def module_of_tensorflow():
    class Line(tf.Module):
        def __init__(self):
            super().__init__()
            self.w = tf.Variable([[1.0], [2.0], [3.0]])

        @tf.function(input_signature=[tf.TensorSpec([None, 3])])
        def __call__(self, x):
            return x @ self.w

    line = Line()
    optimizer = keras.optimizers.Adam(0.1)
    for _ in range(2):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(line(X) ** 2)
        optimizer.apply_gradients([(tape.gradient(loss, line.w), line.w)])
    tf.saved_model.save(line, f"{DIRECTORY}/line")
    check_copies([line.w])
    return [line.w.numpy(), tf.saved_model.load(f"{DIRECTORY}/line")(tf.constant(X[:2]))]


@snippet
def shared_layers():
    body = keras.layers.Dense(4, "tanh", kernel_initializer="ones")
    first, second = make(body, keras.layers.Dense(2)), make(body, keras.layers.Dense(2))
    train(first), train(second), train(first)
    part = keras.Model(first.inputs, first.layers[0].output)
    return [weigh(first), weigh(second), part.predict(X[:2], verbose=0), part(X[:2])]


@snippet
def threads():
    found = {}

    def work(number):
        model = make()
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(X) ** 2)
        weights = model.trainable_weights
        model.optimizer.apply(tape.gradient(loss, weights), weights)
        found[number] = weigh(model)

    for number in range(2):
        thread = threading.Thread(target=functools.partial(work, number))
        thread.start()
        thread.join()
    model = None

    def build():
        nonlocal model
        model = make()

    thread = threading.Thread(target=build)
    thread.start()
    thread.join()
    return [found[0], found[1], weigh(train(model))]


@snippet
def trials():
    found = []
    for rate in (0.1, 0.01):
        keras.backend.clear_session()
        import tensorflow.compat.v1

        tensorflow.compat.v1.reset_default_graph()
        tf.compat.v1.reset_default_graph()
        board = keras.callbacks.TensorBoard(f"{DIRECTORY}/board", histogram_freq=1)
        model = train(make(optimizer=keras.optimizers.SGD(rate)), callbacks=[board])
        found.append([model.evaluate(X, Y, verbose=0), model.name])
    return found


@snippet
def own_loop_with_a_strategy():
    strategy = tf.distribute.MirroredStrategy()
    with strategy.scope():
        model = make(optimizer=keras.optimizers.SGD(0.1))
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)

    @tf.function
    def step(x, y):
        def of_replica(x, y):
            with tf.GradientTape() as tape:
                each = tf.reduce_mean((model(x, training=True) - y) ** 2, -1)
                loss = tf.nn.compute_average_loss(each, global_batch_size=8)
            gradients = tape.gradient(loss, model.trainable_variables)
            model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            return loss

        losses = strategy.run(of_replica, args=(x, y))
        return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)

    losses = [float(step(*batch)) for batch in strategy.experimental_distribute_dataset(data)]
    with strategy.scope():
        second = make()
    return [losses, weigh(model), weigh(train(second))]


def plain(value):
    """Returns a result as lists of numbers and texts."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, tf.IndexedSlices):
        value = tf.convert_to_tensor(value)
    if isinstance(value, (str, bool, int, float, type(None))):
        return value
    return np.asarray(value).tolist()


if __name__ == "__main__":
    results = {}
    for name in sys.argv[1:] or snippets:
        try:
            results[name] = plain(snippets[name]())
        except Exception as error:
            if "--debug" in sys.argv:
                raise
            results[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    print(json.dumps(results))
