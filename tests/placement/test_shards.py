"""A model whose layers' units are divided over devices is trained to the weights of one device."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests import zoo
from tests.placement.training import find_devices, find_graph, train, train_whole
from tfdist.devices import shorten
from tfdist.errors import TfdistError
from tfdist.placement import Shards
from tfdist.placement.shards.divided import find_divided

WITHOUT_BATCH_NORM = ("two_inputs", "transformer", "dense", "random")


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("name", WITHOUT_BATCH_NORM)
def test_a_mirrored_replica_with_three_devices(float64, name):
    _, expected, weights = train_whole(name)
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    _, history, found = train(name, strategy=strategy, placement=Shards(devices=3))
    assert zoo.largest_difference(found, weights) < 1e-12
    for key, values in expected.items():
        np.testing.assert_allclose(history[key], values, rtol=1e-12, err_msg=key)


def test_each_device_has_its_part_of_weights_and_slots():
    trainer, _, _ = train("transformer", placement=Shards(devices=2))
    divided = [v for v in trainer.model.trainable_variables if find_divided(v)]
    assert {type(layer).__name__ for layer in trainer.model._flatten_layers()} > {"EinsumDense"}
    assert len(divided) == 13  # all but those of the layer normalization
    optimizer = trainer.model.optimizer
    for slots in (divided, [v for v in optimizer.variables if v.shape.rank and find_divided(v)]):
        sizes = {"CPU:0": 0, "CPU:1": 0}
        for variable in slots:
            for part in find_divided(variable).parts:
                sizes[shorten(part.device)] += int(np.prod(part.shape))
        assert sizes["CPU:0"] == sizes["CPU:1"] == sum(int(np.prod(v.shape)) for v in slots) / 2
    assert len(slots) == 2 * len(divided)


@functools.cache
def train_unet(**options):
    make_optimizer = functools.partial(keras.optimizers.Adam, **options)
    return train("unet", optimizer=make_optimizer, placement=Shards(devices=2))[0]


def test_layers_gradients_and_updates_are_computed_where_the_weights_are():
    kinds = find_devices(train_unet())
    for kind in (
        "Conv2D",
        "Conv2DBackpropFilter",
        "Conv2DBackpropInput",
        "AssignSubVariableOp",
    ):
        assert kinds[kind] == {"CPU:0", "CPU:1"}, kind


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("options", [{}, {"global_clipnorm": 1.0}, {"clipvalue": 0.1}])
def test_no_gradient_is_put_together_where_parts_are_enough(options):
    trainer = train_unet(**options)
    shapes = [tuple(v.shape) for v in trainer.model.trainable_variables if find_divided(v)]
    joined = [
        operation
        for operation in find_graph(trainer).get_operations()
        if operation.type == "ConcatV2"
        and operation.outputs[0].shape.rank == 4
        and tuple(operation.outputs[0].shape) in shapes
    ]
    assert joined
    assert not any(operation.outputs[0].consumers() for operation in joined)


def test_weights_are_saved_and_set_whole_and_not_exported(tmp_path):
    trainer, _, weights = train("convolutional", placement=Shards())
    trainer.model.save_weights(f"{tmp_path}/model.weights.h5")
    trainer.model.load_weights(f"{tmp_path}/model.weights.h5")
    trainer.model.set_weights(trainer.model.get_weights())
    for ours, theirs in zip(trainer.model.variables, weights, strict=True):
        np.testing.assert_array_equal(ours.numpy(), theirs)
    with pytest.raises(TfdistError, match="^Cannot export a model whose weights are divided"):
        trainer.model.export(f"{tmp_path}/servable", verbose=False)


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("name", ["Lion", "RMSprop", "Ftrl", "Nadam", "ScheduleFreeAdamW"])
def test_optimizers_that_update_each_element_alone(float64, name):
    kind = getattr(keras.optimizers, name, None)
    if kind is None:
        pytest.skip(f"Keras {keras.__version__} has no {name}")
    for options in ({}, {"use_ema": True, "ema_overwrite_frequency": 3, "weight_decay": 0.01}):
        built = {}

        def make(options=options, **placed):
            def build(optimizer):
                model = zoo.EXAMPLES["dense"].build(optimizer)
                model.optimizer.build(model.trainable_variables)
                return model

            trainer = zoo.make_trainer(
                lambda: build(kind(0.01, **options)),
                strategy=zoo.STRATEGIES["one_device"](),
                **placed,
            )
            trainer.fit(*zoo.EXAMPLES["dense"].data, batch_size=8, epochs=1, verbose=0)
            return [v.numpy() for v in trainer.model.variables]

        assert zoo.largest_difference(make(placement=Shards()), make()) < 1e-12, built


@pytest.mark.parametrize("name", ["Lamb", "Muon", "Adafactor"])
def test_optimizers_that_need_a_whole_weight_are_refused(name):
    kind = getattr(keras.optimizers, name)
    with pytest.raises(TfdistError, match=f"does not support {name}"):
        train("dense", optimizer=lambda: kind(0.01), placement=Shards())


def _build_tokens(optimizer):
    tokens = keras.Input((10,), dtype="int32")
    table = keras.layers.Embedding(23, 6, name="table", embeddings_initializer=zoo.seeded(1))
    x = keras.layers.GlobalAveragePooling1D()(table(tokens))
    x = keras.layers.Dense(8, "tanh", name="hidden", kernel_initializer=zoo.seeded(2))(x)
    outputs = keras.layers.Dense(4, name="out", kernel_initializer=zoo.seeded(3))(x)
    model = keras.Model(tokens, outputs)
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def _train_tokens(optimizer="adam", **options):
    trainer = zoo.make_trainer(
        lambda: _build_tokens(optimizer() if callable(optimizer) else optimizer),
        strategy=zoo.STRATEGIES["one_device"](),
        **options,
    )
    rng = np.random.default_rng(0)
    trainer.fit(rng.integers(-2, 23, (40, 10)), rng.integers(0, 4, 40), batch_size=8, verbose=0)
    return trainer.model, [v.numpy() for v in trainer.model.variables]


LAYOUTS = {
    "rows": ("table/embeddings:0",),
    "columns": ("table/embeddings:-1",),
    "a kernel": (".*hidden/kernel:1",),
    "several": ("table/.*:0", "(hidden|out)/kernel:-1"),
}


OPTIMIZERS = {
    "adam": lambda: keras.optimizers.Adam(0.01),
    "global_clipnorm": lambda: keras.optimizers.RMSprop(0.01, momentum=0.9, global_clipnorm=0.1),
    "sgd": "sgd",
}


@functools.cache
def _train_tokens_whole(optimizer):
    return _train_tokens(OPTIMIZERS[optimizer])[1]


@pytest.mark.thorough(keep=4)
@pytest.mark.parametrize(("layout", "optimizer"), zoo.take_turns(LAYOUTS, OPTIMIZERS))
def test_layouts(float64, layout, optimizer):
    expected = _train_tokens_whole(optimizer)
    placement = Shards(layout=LAYOUTS[layout])
    model, found = _train_tokens(OPTIMIZERS[optimizer], placement=placement)
    assert zoo.largest_difference(found, expected) < 1e-13
    table = find_divided(model.get_layer("table").embeddings)
    assert (table and table.axis) == {"rows": 0, "columns": 1, "several": 0}.get(layout)
    hidden = model.get_layer("hidden")
    is_hidden = layout in ("a kernel", "several")
    assert [find_divided(v) is not None for v in hidden.variables] == [is_hidden] * 2


def test_the_words_of_keras():
    mesh = keras.distribution.DeviceMesh((1, 3), ("batch", "model"), ["a", "b", "c"])
    layout = keras.distribution.LayoutMap(mesh)
    layout[".*hidden.*kernel"] = (None, "model")
    layout[".*out.*kernel"] = (None, None)
    placement = Shards(layout=layout)
    assert placement.parse_layout() == {".*hidden.*kernel": 1}
    model, _ = _train_tokens(placement=placement)
    assert find_divided(model.get_layer("hidden").kernel).sizes == [3, 3, 2]
    assert find_divided(model.get_layer("out").kernel) is None
    layout[".*table.*"] = ("batch", "model")
    with pytest.raises(TfdistError, match=r"names 2 axes"):
        Shards(layout=layout)


class OwnDense(keras.layers.Dense):
    def call(self, inputs, training=None):
        return super().call(inputs) * 2


def _build_others(optimizer):
    model = keras.Sequential(
        [
            keras.Input((6, 5)),
            keras.layers.LSTM(4, name="recurrent"),
            OwnDense(4, name="own"),
            keras.layers.Dense(2, name="two"),
            keras.layers.Dense(6, name="six"),
            keras.layers.BatchNormalization(name="norm"),
        ]
    )
    model.compile(optimizer, "mse")
    return model


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"layout": ("nothing:0",)},
            "`layout=nothing` fits no whole path of a weight of .*recurrent",
        ),
        ({"layout": (".*lstm_cell/kernel:1",)}, r"\(LSTMCell\) has no rule for it"),
        ({"layout": ("norm/moving_mean:0",)}, "`layout=norm/moving_mean` fits no whole path"),
        ({"layout": (".*own/kernel:1",)}, r"the layer '.*own' \(OwnDense\) has no rule"),
        ({"layout": (".*six/kernel:0",)}, "along the axis 0: .* can be divided along 1 only"),
        ({"layout": (".*six/kernel:7",)}, "along the axis 7"),
        ({"layout": (".*two/kernel:1",)}, r"'.*two' \(Dense\) has 2 units"),
        ({"devices": 4}, "needs 4 devices"),
    ],
)
def test_what_cannot_be_divided_costs_one_line(options, message):
    trainer = tfdist.Trainer(lambda: _build_others("sgd"), placement=Shards(**options))
    with pytest.raises(TfdistError, match=message) as caught:
        trainer.fit(np.zeros((8, 6, 5)), np.zeros((8, 6)), verbose=0)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layout": ("a",)}, "is not a regular expression and an axis"),
        ({"layout": ("(:0",)}, "is not a regular expression and an axis"),
    ],
)
def test_a_wrong_layout_costs_one_line(options, message):
    with pytest.raises(TfdistError, match=message):
        Shards(**options)


def test_a_divided_optimizer_does_not_combine():
    strategy = zoo.STRATEGIES["mirrored-2"]()
    with pytest.raises(TfdistError, match="cannot be combined with `shard_optimizer`"):
        train("dense", strategy=strategy, placement=Shards(devices=1), shard_optimizer=True)


LAYERS = {
    "Conv2D": ((7, 7, 3), lambda k: k.Conv2D(5, 3, dilation_rate=2, activation="gelu")),
    "DepthwiseConv2D": ((7, 7, 6), lambda k: k.DepthwiseConv2D(3, padding="same")),
    "attention": (
        (5, 8),
        lambda k: lambda x: k.MultiHeadAttention(3, 4, dropout=0.1, seed=4)(x, x),
    ),
    "EinsumDense": ((4, 3), lambda k: k.EinsumDense("...x,xyz->...yz", (5, 2), bias_axes="yz")),
    "Conv2DTranspose": (
        (5, 5, 3),
        lambda k: k.Conv2DTranspose(5, 3, strides=2, padding="same", output_padding=1),
    ),
    "Conv1D": ((7, 5), lambda k: k.Conv1D(6, 3, strides=2, activation="softmax")),
    "Conv3D": ((5, 5, 5, 2), lambda k: k.Conv3D(4, 2)),
    "SeparableConv2D": ((7, 7, 3), lambda k: k.SeparableConv2D(5, 3, depth_multiplier=2)),
    "causal": ((7, 5), lambda k: k.Conv1D(6, 3, dilation_rate=2, padding="causal")),
    "Conv1DTranspose": ((7, 3), lambda k: k.Conv1DTranspose(5, 3, strides=2)),
    "one bias for all": ((4, 3), lambda k: k.EinsumDense("abc,cd->abd", (4, 6), bias_axes="d")),
    "grouped attention": ((5, 8), lambda k: lambda x: k.GroupQueryAttention(4, 6, 3)(x, x)),
}


@pytest.mark.thorough(keep=4)
@pytest.mark.parametrize("name", LAYERS)
def test_each_rule(float64, name):
    shape, make = LAYERS[name]

    def fit(**options):
        def build():
            keras.utils.set_random_seed(5)
            given = keras.Input(shape)
            x = make(keras.layers)(given)
            model = keras.Model(given, keras.layers.Flatten()(x))
            model.compile(keras.optimizers.Adam(0.01), "mse")
            return model

        trainer = zoo.make_trainer(build, strategy=zoo.STRATEGIES["one_device"](), **options)
        x = np.random.default_rng(0).normal(size=(12, *shape))
        trainer.fit(x, np.ones((12, *trainer.model.output_shape[1:])), batch_size=4, verbose=0)
        return trainer, [v.numpy() for v in trainer.model.variables]

    (_, expected), (trainer, found) = fit(), fit(placement=Shards(devices=2))
    divided = sum(find_divided(v) is not None for v in trainer.model.trainable_variables)
    assert divided >= len(trainer.model.trainable_variables) - 1
    assert zoo.largest_difference(found, expected) < 1e-12


def test_a_convolution_of_ones_own_stays_whole():
    class Standardized(keras.layers.Conv2D):
        def convolution_op(self, inputs, kernel):
            return super().convolution_op(inputs, kernel - keras.ops.mean(kernel))

    def build():
        layers = [keras.Input((5, 5, 2)), Standardized(4, 3), keras.layers.Flatten()]
        model = keras.Sequential([*layers, keras.layers.Dense(6)])
        model.compile("sgd", "mse")
        return model

    trainer = tfdist.Trainer(build, placement=Shards(devices=2))
    trainer.fit(np.ones((8, 5, 5, 2)), np.ones((8, 6)), verbose=0)
    convolution, dense = trainer.model.layers[0], trainer.model.layers[-1]
    assert find_divided(convolution.kernel) is None
    assert find_divided(dense.kernel) is not None


def test_ten_nodes_as_five_and_five():
    """The field's guides divide a hidden layer of ten nodes over two devices."""

    def build():
        keras.utils.set_random_seed(5)
        hidden = keras.layers.Dense(10, "relu", name="hidden")
        model = keras.Sequential([keras.Input((4,)), hidden, keras.layers.Dense(1)])
        model.compile("adam", "mse")
        return model

    trainer = tfdist.Trainer(build, placement=Shards(devices=2, layout=(".*hidden/kernel:1",)))
    trainer.fit(np.ones((8, 4)), np.ones(8), verbose=0)
    kernel = find_divided(trainer.model.get_layer("hidden").kernel)
    assert [part.shape.as_list() for part in kernel.parts] == [[4, 5], [4, 5]]
    assert [shorten(part.device) for part in kernel.parts] == ["CPU:0", "CPU:1"]
    sizes = trainer.engine.summarize_placement()["placement"]
    assert [place["weight_bytes"] for place in sizes] == [4 * (25 + 11), 4 * 25]
