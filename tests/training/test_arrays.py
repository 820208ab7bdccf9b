"""What arrays may be: lists of inputs, dictionaries, sparse, ragged, data frames."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests import zoo
from tests.training.programs import KINDS, X, Y, dense
from tfdist.data.pipeline import make_train_dataset, make_train_reader
from tfdist.data.source import ArraySource
from tfdist.errors import TfdistError

FIT = {"batch_size": 8, "epochs": 2, "verbose": 0}


def _build_two():
    inputs = [keras.Input((6,), name=name) for name in ("a", "b")]
    last = keras.layers.Dense(2, kernel_initializer=zoo.seeded(1))
    model = keras.Model(inputs, last(keras.layers.Concatenate()(inputs)))
    model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
    return model


def _build_embedding():
    model = keras.Sequential(
        [
            keras.layers.Embedding(10, 4, embeddings_initializer=zoo.seeded(1)),
            keras.layers.GlobalAveragePooling1D(),
            keras.layers.Dense(2, kernel_initializer=zoo.seeded(2)),
        ]
    )
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def _build_sparse():
    inputs = keras.Input((6,), sparse=True)
    last = keras.layers.Dense(2, kernel_initializer=zoo.seeded(1))
    model = keras.Model(inputs, last(inputs))
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def _use(model, x, y, x_of_batch=None):
    x_of_batch = x if x_of_batch is None else x_of_batch
    return (
        model.fit(x, y, validation_data=(x, y), shuffle=False, **FIT).history,
        model.evaluate(x, y, batch_size=5, verbose=0),
        model.predict(x, batch_size=5, verbose=0),
        model.train_on_batch(x_of_batch, y),
        model.test_on_batch(x_of_batch, y),
    )


def _compare(found, expected, **options):
    options = options or {"rtol": 1e-5, "atol": 1e-6}
    keras.tree.map_structure(
        lambda ours, theirs: np.testing.assert_allclose(ours, theirs, **options), found, expected
    )


INPUTS = {
    "list": lambda: [X, X * 2],
    "tuple": lambda: (X, X * 2),
    "dictionary": lambda: {"b": X * 2, "a": X},
}


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("strategy_name", ["mirrored-2", "one_device"])
@pytest.mark.parametrize("name", INPUTS)
def test_a_model_may_have_two_inputs(name, strategy_name):
    def use(model):
        x = INPUTS[name]()
        return (*_use(model, x, Y), model.predict_on_batch(x))

    trainer = tfdist.Trainer(_build_two, strategy=zoo.STRATEGIES[strategy_name]())
    _compare(use(trainer), use(zoo.trace_once(_build_two())))


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("kind", [list, tuple])
def test_a_list_without_labels_is_one_of_inputs(kind):
    def build():
        class Summed(keras.Model):
            def call(self, x):
                return self.last(x[0] + x[1])

            def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
                return tf.reduce_mean(y_pred**2)

        model = Summed()
        model.last = keras.layers.Dense(2, kernel_initializer=zoo.seeded(1))
        model.compile(keras.optimizers.SGD(0.1))
        return model

    def use(model):
        x = kind([X, X * 2])
        return model.evaluate(x, batch_size=8, verbose=0), model.predict(x, verbose=0)

    _compare(use(tfdist.Trainer(build)), use(build()))


def test_refuses_in_one_line_what_cannot_be_validated_on():
    with pytest.raises(TfdistError, match="Cannot validate on a tuple of 4") as found:
        tfdist.Trainer(dense).fit(X, Y, validation_data=(X, Y, Y, Y), **FIT)
    assert "\n" not in str(found.value)


def _make_sparse():
    return tf.sparse.from_dense(np.where(X > 0, X, 0))


def _make_scipy():
    scipy = pytest.importorskip("scipy.sparse")
    return scipy.csr_matrix(np.where(X > 0, X, 0))


def _make_ragged():
    return tf.ragged.constant([[1, 2, 3], [4], [5, 6], [7, 8, 9, 1]] * 8, dtype=tf.int32)


SPARSE = {
    "sparse": (_build_sparse, _make_sparse),
    "sparse in a dense model": (dense, _make_sparse),
    "scipy": (_build_sparse, _make_scipy),
    "ragged": (_build_embedding, _make_ragged),
}


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize("name", SPARSE)
def test_sparse_and_ragged_arrays_are_read_as_in_keras(name):
    build, make = SPARSE[name]
    # Keras reads SciPy's matrices in fit, evaluate and predict alone.
    x_of_batch = _make_sparse() if name == "scipy" else make()
    _compare(_use(tfdist.Trainer(build), make(), Y), _use(build(), make(), Y, x_of_batch))


def _generate_scipy():
    for row in range(0, 32, 8):
        yield _make_scipy()[row : row + 8], Y[row : row + 8]


def test_a_generator_of_scipy_is_read_as_in_keras():
    model, trainer = _build_sparse(), tfdist.Trainer(_build_sparse)
    options = {"steps_per_epoch": 4, "shuffle": False, "verbose": 0}
    expected = model.fit(_generate_scipy(), **options).history
    _compare(trainer.fit(_generate_scipy(), **options).history, expected)
    expected = model.predict(_generate_scipy(), steps=4, verbose=0)
    _compare(trainer.predict(_generate_scipy(), steps=4), expected)


@pytest.mark.parametrize("name", SPARSE)
def test_sparse_and_ragged_arrays_are_refused_on_replicas(name):
    build, make = SPARSE[name]
    x = make()
    trainer = tfdist.Trainer(build, strategy=zoo.STRATEGIES["mirrored-2"]())
    with pytest.raises(TfdistError, match="Cannot split sparse or ragged arrays") as found:
        trainer.fit(x, Y, **FIT)
    assert "\n" not in str(found.value)


def test_ragged_outputs_are_ragged():
    def predict(model):
        return model.predict(_make_ragged(), batch_size=12, verbose=0).to_list()

    def build():
        model = keras.Sequential([_build_embedding().layers[0]])
        model.compile("sgd", "mse")
        return model

    assert predict(tfdist.Trainer(build)) == predict(build())


def test_sparse_arrays_have_the_order_of_dense_ones(tmp_path):
    def fit(x, directory=None, **options):
        directory = directory and str(tmp_path / directory)
        trainer = tfdist.Trainer(_build_sparse, seed=4, checkpoint_dir=directory)
        return trainer.fit(x, Y, **FIT, **options).history["loss"]

    expected = fit(np.where(X > 0, X, 0))
    _compare(fit(_make_sparse()), expected)
    fit(_make_sparse(), "parts", max_steps=6)
    _compare(fit(_make_sparse(), "parts"), expected)
    with pytest.raises(TfdistError, match="the contents changed"):
        fit(tf.sparse.from_dense(X), "parts")


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("missing", ["weights", "labels and weights"])
def test_a_generator_may_leave_out_labels_and_weights(missing):
    def generate():
        for start in range(0, 32, 8):
            rest = (Y[start : start + 8],) if missing == "weights" else (None,)
            yield X[start : start + 8], *rest, None

    name = "evaluate" if missing == "weights" else "predict"
    found, expected = (
        getattr(model, name)(generate(), steps=4, verbose=0)
        for model in (tfdist.Trainer(dense), dense())
    )
    _compare(found, expected)


def test_rows_are_shuffled_within_batches():
    """Batches of 4, 4 and 2 rows."""
    source = ArraySource.from_arrays(np.arange(10))
    options = {"global_batch_size": 4, "seed": 2, "shuffle": "batch", "ends_epochs": True}
    batches = [batch.numpy() for batch in make_train_dataset(source, **options).take(12)]
    for index, batch in enumerate(batches):
        first = index % 3 * 4
        assert sorted(batch) == list(range(first, min(first + 4, 10)))
    assert len({tuple(batch) for batch in batches[::3]}) > 1
    read = make_train_reader(source, **options)
    for step, batch in enumerate(batches):
        np.testing.assert_array_equal(read(tf.constant(step, tf.int64)), batch)
    halves = make_train_dataset(source, num_replicas=2, **options).take(24)
    parts = [part.numpy() for part in halves]
    for batch, *pair in zip(batches, parts[::2], parts[1::2], strict=True):
        np.testing.assert_array_equal(np.concatenate(pair), batch)


def test_fit_shuffles_within_batches():
    seen = []

    class Seeing(keras.layers.Layer):
        def call(self, x):
            tf.py_function(lambda rows: seen.append(np.array(rows).ravel()), [x], [])
            return x

    def build():
        inputs = keras.Input((1,))
        model = keras.Model(inputs, keras.layers.Dense(1)(Seeing()(inputs)))
        model.compile("sgd", "mse")
        return model

    x = np.arange(12, dtype=np.float32)[:, None]
    tfdist.Trainer(build).fit(x, x, batch_size=4, shuffle="batch", epochs=2, verbose=0)
    assert len(seen) == 6
    for index, rows in enumerate(seen):
        assert sorted(rows) == list(range(index % 3 * 4, index % 3 * 4 + 4))
    assert any(list(rows) != sorted(rows) for rows in seen)
    source = ArraySource.from_arrays((x, x))
    with pytest.raises(TfdistError, match="Give shuffle=True, or arrays"):
        tfdist.Trainer(build).fit(source, shuffle="batch", verbose=0)


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("strategy_name", ["mirrored-2", "one_device"])
def test_data_frames_are_arrays(strategy_name):
    pandas = pytest.importorskip("pandas")
    trainer = tfdist.Trainer(dense, strategy=zoo.STRATEGIES[strategy_name]())
    _compare(
        _use(trainer, pandas.DataFrame(X), pandas.DataFrame(Y)),
        _use(zoo.trace_once(dense()), pandas.DataFrame(X), pandas.DataFrame(Y)),
    )


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("strategy_name", ["mirrored-2", "one_device"])
def test_a_loader_of_torch_is_read(strategy_name):
    torch = pytest.importorskip("torch.utils.data")
    tensors = [pytest.importorskip("torch").from_numpy(part) for part in (X, Y)]

    def fit(model):
        loader = torch.DataLoader(torch.TensorDataset(*tensors), batch_size=8)
        return model.fit(loader, epochs=2, verbose=0, shuffle=False).history

    _compare(
        fit(tfdist.Trainer(dense, strategy=zoo.STRATEGIES[strategy_name]())),
        fit(zoo.trace_once(dense())),
    )


@pytest.mark.thorough(keep=1)
@pytest.mark.filterwarnings("ignore:.*the data `x` was provided as a tf.data.Dataset")
@pytest.mark.parametrize("strategy_name", ["mirrored-2", "one_device"])
def test_classes_of_a_dataset_are_weighted(strategy_name):
    data = tf.data.Dataset.from_tensor_slices((X, KINDS)).batch(8)

    def fit(model):
        return model.fit(data, class_weight={0: 1.0, 1: 3.0}, epochs=2, verbose=0).history

    found = fit(tfdist.Trainer(dense, strategy=zoo.STRATEGIES[strategy_name]()))
    _compare(found, fit(zoo.trace_once(dense())))
    assert found != dense().fit(data, epochs=2, verbose=0).history


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("strategy_name", ["mirrored-2", "one_device"])
def test_validation_may_be_in_given_epochs(strategy_name):
    def fit(model):
        options = {**FIT, "epochs": 4, "shuffle": False, "validation_freq": [2, 3]}
        return model.fit(X, Y, validation_data=(X, Y), **options).history

    found = fit(tfdist.Trainer(dense, strategy=zoo.STRATEGIES[strategy_name]()))
    _compare(found, fit(zoo.trace_once(dense())))
    assert len(found["val_loss"]) == 2


def test_single_batches_of_replicas_are_keras_s():
    def use(model):
        return (
            model.train_on_batch(X[:7], Y[:7], return_dict=True),
            model.train_on_batch(X[:7], Y[:7], sample_weight=np.arange(7.0)),
            model.test_on_batch(X[:7], Y[:7], return_dict=True),
            model.predict_on_batch(X[:7]),
        )

    build = functools.partial(dense, metrics=["mae"])
    trainer = tfdist.Trainer(build, strategy=zoo.STRATEGIES["mirrored-2"]())
    _compare(use(trainer), use(zoo.trace_once(build())))


@pytest.mark.parametrize("strategy_name", ["mirrored-2", "one_device"])
def test_logs_are_in_keras_s_order(strategy_name):
    def use(model):
        train = model.train_on_batch(X[:8], Y[:8], return_dict=True)
        test = model.test_on_batch(X[:8], Y[:8], return_dict=True)
        whole = model.evaluate(X, Y, verbose=0, return_dict=True)
        return [list(logs) for logs in (train, test, whole)]

    build = functools.partial(dense, metrics=["mae", "cosine_similarity"])
    trainer = tfdist.Trainer(build, strategy=zoo.STRATEGIES[strategy_name]())
    assert use(trainer) == use(zoo.trace_once(build()))


def test_single_batches_of_a_layer_that_is_not_known_are_keras_s():
    """The first batches are looked at before they are trained on."""
    build = functools.partial(dense, between=keras.layers.Lambda(lambda x: 2.0 * x))
    trainer = zoo.make_trainer(build, micro_batches=2)
    model = build()
    for rows in (7, 3, 32):
        found, expected = (of.train_on_batch(X[:rows], Y[:rows]) for of in (trainer, model))
        assert found == pytest.approx(expected, rel=1e-5)
    with pytest.raises(TfdistError, match="^Cannot split a replica's batch of 1 examples into 2"):
        trainer.train_on_batch(X[:1], Y[:1])


def test_weights_and_exports_of_replicas_are_keras_s(tmp_path):
    trainer = tfdist.Trainer(dense, strategy=zoo.STRATEGIES["mirrored-2"]())
    trainer.fit(X, Y, **FIT)
    expected = trainer.predict(X, batch_size=8)
    trainer.save_weights(str(tmp_path / "w.weights.h5"))
    model = dense()
    model.load_weights(str(tmp_path / "w.weights.h5"))
    _compare(model.predict(X, verbose=0), expected)
    other = tfdist.Trainer(dense, strategy=zoo.STRATEGIES["mirrored-2"]())
    other.load_weights(str(tmp_path / "w.weights.h5"))
    _compare(other.predict(X, batch_size=8), expected)
    trainer.export(str(tmp_path / "served"))
    served = tf.saved_model.load(str(tmp_path / "served"))
    _compare(served.serve(tf.constant(X)).numpy(), expected)


def _build_sequences():
    last = keras.layers.Dense(1, kernel_initializer=zoo.seeded(1))
    model = keras.Sequential([keras.Input((2, 3)), keras.layers.TimeDistributed(last)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def test_weights_that_keras_would_align_with_another_axis_are_refused_on_replicas():
    """With as many examples as steps, Keras weights the steps by them, and a replica others."""
    x, y, weight = X.reshape(-1, 2, 3), Y[..., None], np.arange(32.0)
    options = {"verbose": 0, "shuffle": False, "batch_size": 4}
    trainer = tfdist.Trainer(_build_sequences, strategy=zoo.STRATEGIES["mirrored-2"]())
    with pytest.raises(TfdistError, match=r"losses of shape \[batch, 2\] by weights .*\[batch\]"):
        trainer.fit(x, y, sample_weight=weight, **options)
    trainer = tfdist.Trainer(_build_sequences, strategy=zoo.STRATEGIES["mirrored-2"]())
    found = trainer.fit(x, y, sample_weight=weight[:, None], **options).history
    expected = _build_sequences().fit(x, y, sample_weight=weight[:, None], **options).history
    _compare(found, expected)
