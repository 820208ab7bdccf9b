"""Predictions have the rows and types that they have under Keras: ragged, sparse and others."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests import zoo
from tfdist.errors import TfdistError

X = np.arange(1.0, 16).reshape(5, 3).astype("float32")
X[1, 2] = X[3, 1] = 0
STRATEGIES = ["mirrored-2", "one_device", "mirrored-3"]


def to_sparse(x):
    at = tf.where(tf.not_equal(x, 0))
    return tf.SparseTensor(at, tf.gather_nd(x, at), tf.shape(x, out_type="int64"))


class Outputs(keras.Model):
    """Every kind of output, in a structure."""

    def call(self, x):
        return {
            "ragged": tf.RaggedTensor.from_tensor(x, padding=0),
            "texts": tf.RaggedTensor.from_tensor(tf.strings.as_string(x), padding="0.000000"),
            "others": (to_sparse(x), x * 2, tf.strings.as_string(x), tf.complex(x, -x)),
        }


class Scalar(keras.Model):
    """A number for each batch."""

    def call(self, x):
        return x

    def predict_step(self, data):
        return tf.constant(3.0)


class SparseRows(keras.Model):
    """Each row gets the sum of its batch: it depends on which examples are together."""

    def call(self, x):
        return to_sparse(x + tf.reduce_sum(x))


class Trimmed(keras.Model):
    """As wide as the largest example of its batch asks for."""

    def call(self, x):
        return x[:, : tf.cast(tf.reduce_max(x[:, 0]) // 4 + 1, tf.int32)]


def list_values(outputs):
    """Returns outputs as lists, with their types."""

    def convert(leaf):
        if isinstance(leaf, tf.RaggedTensor):
            return "ragged", leaf.dtype, leaf.to_list()
        if isinstance(leaf, tf.SparseTensor):
            parts = (leaf.indices, leaf.values, leaf.dense_shape)
            return "sparse", leaf.dtype, [part.numpy().tolist() for part in parts]
        return type(leaf), leaf.dtype, leaf.tolist()

    return [convert(leaf) for leaf in keras.tree.flatten(outputs)]


def make(build, strategy_name):
    return tfdist.Trainer(build, strategy=zoo.STRATEGIES[strategy_name]())


def compiled(kind):
    def build():
        model = kind()
        model.compile(loss="mse")
        return model

    return build


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize("kind", [Outputs, Scalar])
@pytest.mark.parametrize("strategy_name", STRATEGIES)
def test_no_row_is_lost_or_repeated(strategy_name, kind):
    trainer = make(compiled(kind), strategy_name)
    for rows in (1, 2, 5):
        expected = list_values(kind().predict(X[:rows], batch_size=4, verbose=0))
        assert list_values(trainer.predict(X[:rows], batch_size=4)) == expected
    expected = list_values(kind().predict_on_batch(X[:1]))
    assert list_values(trainer.predict_on_batch(X[:1])) == expected


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize("strategy_name", STRATEGIES)
def test_texts_have_as_many_rows_as_there_are(strategy_name):
    lookup = keras.layers.TextVectorization(ragged=True, output_mode="int")
    lookup.adapt(["a b c"])
    texts = tf.constant([["a b"], ["b"], ["a b c"], ["c"], ["a"]])
    trainer = make(compiled(lambda: keras.Sequential([lookup])), strategy_name)
    found = trainer.predict(texts, batch_size=4)
    assert found.to_list() == [[4, 3], [3], [4, 3, 2], [2], [4]]


@pytest.mark.thorough(keep=3)
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("strategy_name", STRATEGIES)
def test_batches_of_different_sizes_are_ragged(strategy_name, rows):
    def read():
        for size in (2, 3, 4):
            yield np.full((rows, size, 3), size, "float32")

    data = tf.data.Dataset.from_generator(read, output_signature=tf.TensorSpec((None, None, 3)))

    def build():
        model = keras.Sequential([keras.layers.Dense(2, kernel_initializer="ones")])
        model.compile(loss="mse")
        return model

    expected = build().predict(data, verbose=0)
    assert isinstance(expected, tf.RaggedTensor)
    assert list_values(make(build, strategy_name).predict(data)) == list_values(expected)


def test_refuses_sizes_that_depend_on_the_examples_that_are_together():
    trainer = make(compiled(Trimmed), "mirrored-2")
    assert trainer.predict(X[:1]).shape == (1, 1)
    with pytest.raises(TfdistError, match="over 2 replicas: output 0 is what Cast makes"):
        trainer.predict(X[[0, 1, 2, 4]])


def test_refuses_sparse_rows_that_depend_on_the_examples_that_are_together():
    with pytest.raises(TfdistError, match="the output depends on which examples are together"):
        make(compiled(SparseRows), "mirrored-2").predict(X)
