"""How a step is computed changes its speed, and what cannot be done is refused."""

import keras
import numpy as np
import pytest

import tfdist
from tests import zoo
from tfdist.errors import TfdistError

SGD = lambda: keras.optimizers.SGD(0.05, momentum=0.9, global_clipnorm=0.5)  # noqa: E731


def _train(model_name, strategy_name, jit_compile):
    return _train_example(zoo.EXAMPLES[model_name], strategy_name, jit_compile)


def _train_example(example, strategy_name, jit_compile):
    strategy = zoo.STRATEGIES[strategy_name]()
    trainer = tfdist.Trainer(
        lambda: example.build(SGD()), strategy=strategy, jit_compile=jit_compile
    )
    history = trainer.fit(
        *example.data,
        sample_weight=example.sample_weight,
        global_batch_size=15,
        max_steps=4,
        verbose=0,
    )
    functions = trainer._steps._train._list_all_concrete_functions()
    nodes = [n for f in functions for n in f.graph.as_graph_def().library.function]
    is_compiled = any(n.attr["_XlaMustCompile"].b for n in nodes)
    return [weight.numpy() for weight in trainer.model.weights], history.history, is_compiled


@pytest.mark.parametrize(
    ("model_name", "strategy_name"),
    [
        ("dense", "one_device"),
        ("unet", "one_device"),
        ("two_inputs", "mirrored-2"),
    ],
)
def test_xla_ends_where_tensorflow_ends(model_name, strategy_name):
    expected, expected_history, is_compiled = _train(model_name, strategy_name, jit_compile=False)
    assert not is_compiled
    found, history, is_compiled = _train(model_name, strategy_name, jit_compile=True)
    assert is_compiled
    assert zoo.largest_difference(found, expected) < 1e-4
    for name, values in expected_history.items():
        assert history[name] == pytest.approx(values, rel=1e-3), name


def test_weighted_metrics_know_the_mask_of_what_xla_computed():
    def build(optimizer):
        model = keras.Sequential(
            [
                keras.layers.Input((10,), dtype="int32"),
                keras.layers.Embedding(20, 20, mask_zero=True, embeddings_initializer="identity"),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        accuracy = keras.metrics.SparseCategoricalAccuracy(name="accuracy")
        model.compile(optimizer, loss, weighted_metrics=[accuracy])
        return model

    tokens, _ = zoo.EXAMPLES["transformer"].data
    labels = np.where(tokens == 0, 1, tokens)  # only what is masked is mistaken
    example = zoo.Example(build, (tokens, labels), np.ones(tokens.shape, "f4"))
    for jit_compile in (False, True):
        _, history, is_compiled = _train_example(example, "one_device", jit_compile)
        assert is_compiled == jit_compile
        assert history["accuracy"] == [1.0, 1.0]


@pytest.mark.parametrize(
    ("model_name", "strategy_name", "message"),
    [
        ("convolutional", "mirrored-2", "the layer 'fused_batch.* updates what it has in common"),
        ("random", "one_device", "the layer 'gaussian_noise.* .GaussianNoise. draws"),
        ("dense", "central_storage-2", "CentralStorageStrategy.* does not take --jit_compile=on"),
    ],
)
def test_refuses_what_xla_cannot_compile(model_name, strategy_name, message):
    with pytest.raises(TfdistError, match=message):
        _train(model_name, strategy_name, jit_compile=True)


def test_refuses_to_compress_what_crosses_no_network():
    with pytest.raises(TfdistError, match="MirroredStrategy does not take --compress_gradients"):
        tfdist.Trainer(
            lambda: zoo.EXAMPLES["dense"].build(SGD()),
            strategy=zoo.STRATEGIES["mirrored-2"](),
            compress_gradients=True,
        )
