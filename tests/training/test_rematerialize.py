"""Computing activations again changes the memory of a step, never its result."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.distribute.distribute_lib import ReplicaContextBase
from tensorflow.python.eager import context

from tests import zoo
from tfdist import models
from tfdist.errors import TfdistError
from tfdist.tasks.segmentation.losses import make_loss
from tfdist.tasks.segmentation.metrics import SegmentationMetrics

pytestmark = pytest.mark.optimized
ADAM = lambda: keras.optimizers.Adam(1e-2)  # noqa: E731


def _build_unet(norm):
    def build(optimizer):
        model = models.make_model(
            "unet", image_size=(16, 16), num_classes=3, base_filters=4, depth=1, seed=3, norm=norm
        )
        loss = make_loss("cross_entropy", ignore_label=zoo.IGNORE_LABEL)
        model.compile(optimizer, loss, metrics=[SegmentationMetrics(3, ignore_label=3)])
        return model

    return build


def _build_random(optimizer):
    """Draws, penalties and sparse gradients."""
    tokens = keras.Input((10,), dtype="int32")
    seeded = zoo.seeded
    x = keras.layers.Embedding(20, 6, embeddings_initializer=seeded(1), name="encoder_0_embedding")(
        tokens
    )
    x = keras.layers.SpatialDropout1D(0.2, seed=4, name="encoder_0_dropout")(x)
    x = keras.layers.Dense(
        6,
        activity_regularizer="l2",
        kernel_regularizer=keras.regularizers.L1L2(0.01),  # Keras 3.13's L1 is of float32 only
        kernel_initializer=seeded(2),
        name="encoder_1_dense",
    )(x)
    x = keras.layers.Dropout(0.3, seed=5, name="bottleneck_dropout")(x)
    x = keras.layers.GaussianNoise(0.2, seed=6, name="decoder_1_noise")(x)
    x = keras.layers.Dense(5, "tanh", kernel_initializer=seeded(5), name="decoder_0_dense")(x)
    x = keras.layers.Dense(20, kernel_initializer=seeded(6), name="head_logits")(x)
    model = keras.Model(tokens, x)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])
    return model


def _build_dense(optimizer):
    """Through what Keras's own synchronized normalization reduces, the gradient goes as well."""
    inputs = keras.Input((12,))
    x = inputs
    for stage in ("encoder_0", "bottleneck", "decoder_0"):
        make = keras.layers.Dense
        x = make(
            5,
            "tanh",
            kernel_initializer=zoo.seeded(1),
            kernel_constraint=keras.constraints.MaxNorm(0.3),
            name=f"{stage}_dense",
        )(x)
        x = keras.layers.BatchNormalization(synchronized=True, name=f"{stage}_norm")(x)
    outputs = keras.layers.Dense(4, kernel_initializer=zoo.seeded(2), name="head_logits")(x)
    model = keras.Model(inputs, outputs)
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


EXAMPLES = {
    norm: zoo.Example(_build_unet(norm), zoo.EXAMPLES["unet"].data)
    for norm in ("sync_batch", "group")
}
EXAMPLES["dense"] = zoo.Example(_build_dense, zoo.EXAMPLES["dense"].data)
EXAMPLES["random"] = zoo.Example(_build_random, zoo.EXAMPLES["transformer"].data)


def _train(example, strategy_name, **options):
    trainer = zoo.make_trainer(
        lambda: example.build(ADAM()), strategy=zoo.STRATEGIES[strategy_name](), **options
    )
    history = trainer.fit(*example.data, global_batch_size=15, max_steps=4, verbose=0)
    assert trainer.engine.count_traces()["train"] == 1
    values = [variable.numpy() for variable in trainer.model.variables]
    return values, history.history, trainer


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize(
    ("name", "strategy_name", "options"),
    [
        ("random", "mirrored-2", {}),
        ("dense", "mirrored-2", {}),
        ("sync_batch", "one_device", {}),
        ("sync_batch", "mirrored-2", {}),
        ("sync_batch", "central_storage-2", {}),
        ("group", "one_device", {"steps_per_loop": 2}),
        ("group", "mirrored-2", {"micro_batches": 3}),
        ("random", "one_device", {}),
    ],
)
def test_ends_where_it_ends_with_all_activations_kept(float64, name, strategy_name, options):
    expected, expected_history, _ = _train(EXAMPLES[name], strategy_name, **options)
    values, history, _ = _train(EXAMPLES[name], strategy_name, rematerialize=True, **options)
    difference = max(np.abs(a - b).max() for a, b in zip(values, expected, strict=True))
    assert difference < 1e-12
    assert history.keys() == expected_history.keys()
    for key, found in history.items():
        np.testing.assert_allclose(found, expected_history[key], rtol=1e-12, err_msg=key)


def _count_convolutions(**options):
    """Returns how many are executed in a step, of what TensorFlow's optimizer leaves."""
    context.context().enable_graph_collection()
    try:
        _train(EXAMPLES["group"], "one_device", **options)
        graphs = context.context().export_run_metadata().function_graphs
    finally:
        context.context().disable_graph_collection()
    kinds = ["Conv2D", "_FusedConv2D", "_MklNativeConv2D", "_MklNativeFusedConv2D"]
    return max(sum(n.op in kinds for n in g.post_optimization_graph.node) for g in graphs)


def test_tensorflow_does_compute_again():
    """Without being told to wait, it finds that it has computed all this."""
    assert _count_convolutions(rematerialize=True) >= _count_convolutions() + 4


@pytest.mark.thorough
def test_reduces_over_the_replicas_once(monkeypatch):
    counts = []
    all_reduce = ReplicaContextBase.all_reduce

    def count(*args, **kwargs):
        counts[-1] += 1
        return all_reduce(*args, **kwargs)

    monkeypatch.setattr(ReplicaContextBase, "all_reduce", count)
    for rematerialize in (False, True):
        counts.append(0)
        _train(EXAMPLES["sync_batch"], "mirrored-2", rematerialize=rematerialize)
    assert counts[0] == counts[1] > 0


def test_half_precision_too():
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        expected, _, _ = _train(EXAMPLES["group"], "one_device")
        values, _, _ = _train(EXAMPLES["group"], "one_device", rematerialize=True)
    finally:
        keras.config.set_dtype_policy("float32")
    assert zoo.largest_difference(values, expected) < 1e-2


def test_the_model_can_still_be_saved(tmp_path):
    _, _, trainer = _train(EXAMPLES["group"], "one_device", rematerialize=True)
    trainer.save(f"{tmp_path}/model.keras")
    loaded = keras.saving.load_model(f"{tmp_path}/model.keras", compile=False)
    x = EXAMPLES["group"].data[0][:3]
    np.testing.assert_allclose(loaded(x), trainer.model(x), atol=1e-5)


class _Draws(keras.layers.Layer):
    """Draws what no seed of the model's says."""

    def call(self, inputs):
        return inputs + tf.random.normal(tf.shape(inputs))


def _make(*layers, inputs=(12,), **options):
    tensor = keras.Input(inputs, **options)
    x = tensor
    for layer in layers:
        x = layer(x)
    return keras.Model(tensor, x, name="mine")


def _dense(name, size=4, **options):
    return keras.layers.Dense(size, name=name, **options)


class _Subclass(keras.Model):
    def __init__(self, **options):
        super().__init__(**options)
        self.dense = _dense("dense")

    def call(self, inputs):
        return self.dense(inputs)


REFUSED = {
    "operation 'mine.*' .RandomStandardNormal. has a side effect": (
        lambda: _make(_Draws(name="draws"), _dense("logits"))
    ),
    "a layer assigns its own weight norm/": (
        lambda: _make(
            keras.layers.SpectralNormalization(_dense("inner"), name="norm"), _dense("logits")
        )
    ),
    "the model 'mine' ._Subclass.: its layers are known": lambda: _Subclass(name="mine"),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refuses_what_cannot_be_computed_again(message):
    def build():
        model = REFUSED[message]()
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    data = zoo.EXAMPLES["dense"].data
    trainer = zoo.make_trainer(build, rematerialize=True)
    with pytest.raises(TfdistError, match=message) as caught:
        trainer.engine.prepare(*data, global_batch_size=8)
    assert "`rematerialize`" in str(caught.value)
    assert "\n" not in str(caught.value)
