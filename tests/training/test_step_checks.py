"""How a step is computed changes its speed, and what cannot be done is refused."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests import zoo
from tfdist import models
from tfdist.cli.command import run_command
from tfdist.errors import TfdistError
from tfdist.runs.options import TrainOptions
from tfdist.train import run_training

SGD = lambda: keras.optimizers.SGD(0.05, momentum=0.9, global_clipnorm=0.5)  # noqa: E731


def _train(model_name, strategy_name, jit_compile):
    return _train_example(zoo.EXAMPLES[model_name], strategy_name, jit_compile)


def _train_example(example, strategy_name, jit_compile):
    strategy = zoo.STRATEGIES[strategy_name]()
    trainer = zoo.make_trainer(
        lambda: example.build(SGD()), strategy=strategy, jit_compile=jit_compile
    )
    history = trainer.fit(
        *example.data,
        sample_weight=example.sample_weight,
        global_batch_size=15,
        max_steps=4,
        verbose=0,
    )
    functions = trainer.engine._steps.steps.train._list_all_concrete_functions()
    nodes = [n for f in functions for n in f.graph.as_graph_def().library.function]
    is_compiled = any(n.attr["_XlaMustCompile"].b for n in nodes)
    return [weight.numpy() for weight in trainer.model.weights], history.history, is_compiled


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize(
    ("model_name", "strategy_name"),
    [
        ("dense", "one_device"),
        ("unet", "one_device"),
        ("two_inputs", "mirrored-2"),
        ("random", "one_device"),
        ("random", "mirrored-2"),
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
        ("convolutional", "mirrored-2", "the layer 'fused_batch.* updates variables that replicas"),
        ("dense", "central_storage-2", "CentralStorageStrategy.* does not support `jit_compile`"),
    ],
)
def test_refuses_what_xla_cannot_compile(model_name, strategy_name, message):
    with pytest.raises(TfdistError, match=message):
        _train(model_name, strategy_name, jit_compile=True)


def test_refuses_truncated_normal_numbers():
    class Cut(keras.layers.Layer):
        def call(self, x):
            return x + keras.random.truncated_normal(keras.ops.shape(x), seed=3)

    with pytest.raises(TfdistError, match="draws truncated normal numbers, and XLA would"):
        _train_with(Cut())


def _double_in_python(x):
    y = tf.py_function(lambda t: 2 * t, [x], x.dtype)
    return tf.ensure_shape(y, x.shape)


@keras.saving.register_keras_serializable(package="tests")
class InPython(keras.layers.Layer):
    """What XLA cannot compile."""

    def call(self, inputs):
        return _double_in_python(inputs)

    def compute_output_shape(self, input_shape):
        return input_shape


class AsText(keras.layers.Layer):
    """Another, in the middle of the backward pass."""

    def call(self, inputs):
        return inputs * tf.strings.to_number(tf.strings.as_string(inputs))


def _train_with(layer, loss="mse", **options):
    def build():
        inputs = keras.Input((4,))
        x = keras.layers.Dense(4)(inputs)
        model = keras.Model(inputs, keras.layers.Dense(1)(layer(x)))
        model.compile("sgd", loss)
        return model

    trainer = zoo.make_trainer(build, jit_compile=True)
    method = options.pop("method", "fit")
    owner = trainer.engine if method == "prepare" else trainer
    return getattr(owner, method)(np.ones((8, 4)), np.ones((8, 1)))


@pytest.mark.thorough(keep=3)
@pytest.mark.parametrize("method", ["prepare", "fit"])
@pytest.mark.parametrize(
    ("layer", "operation"), [(InPython, "EagerPyFunc"), (AsText, "[A-Z][A-Za-z]*")]
)
def test_names_the_operation_that_xla_does_not_know(layer, operation, method):
    said = (
        f"^Cannot compile the step with XLA: it does not support the operation {operation} in the "
        rf"layer 'mine' \({layer.__name__}\)\. Leave out `jit_compile`\.$"
    )
    with pytest.raises(TfdistError, match=said):
        _train_with(layer(name="mine"), method=method)


def make_model_in_python(*, image_size, num_classes, **_):
    image = keras.Input((*image_size, 3))
    logits = keras.layers.Conv2D(num_classes, 1)(InPython(name="mine")(image))
    return keras.Model(image, logits)


def test_the_command_says_so_in_one_line_and_writes_nothing(tmp_path, monkeypatch, capfd):
    monkeypatch.setitem(models.MODELS, "unet", f"{__name__}:make_model_in_python")
    flags = ["--dataset=shapes", "--image_size=16,16", "--train_examples=8", "--val_examples=8"]
    flags += ["--jit_compile", "--strategy=one_device", f"--run_dir={tmp_path}/run", "--quiet"]
    assert run_command("tfdist.train", run_training, flags, options_class=TrainOptions) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert "the operation EagerPyFunc in the layer 'mine' (InPython)" in line
    assert not (tmp_path / "run").exists()


def test_names_the_operation_of_a_loss_when_it_comes_to_it():
    class Loss(keras.losses.Loss):
        def call(self, y_true, y_pred):
            return tf.reduce_mean(tf.square(_double_in_python(y_pred) - y_true), -1)

    with pytest.raises(
        TfdistError, match="^Cannot .* operation EagerPyFunc [^\n]* `jit_compile`.$"
    ):
        _train_with(keras.layers.Identity(), Loss())


def test_refuses_to_compress_what_crosses_no_network():
    with pytest.raises(TfdistError, match="MirroredStrategy does not support `compress_gradients`"):
        zoo.make_trainer(
            lambda: zoo.EXAMPLES["dense"].build(SGD()),
            strategy=zoo.STRATEGIES["mirrored-2"](),
            compress_gradients=True,
        )
