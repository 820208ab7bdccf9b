"""A model whose images are divided into strips is trained to the weights of one device."""

import functools

import keras
import numpy as np
import pytest

from tests import zoo
from tests.placement.training import find_devices, find_graph, train
from tfdist.errors import TfdistError
from tfdist.models.layers import FusedBatchNormalization
from tfdist.placement import Strips


@functools.cache
def train_over_three():
    return train("unet", placement=Strips(devices=3))[0]


def test_layers_and_gradients_are_computed_where_the_rows_are():
    kinds = find_devices(train_over_three())
    for kind in ("Conv2D", "Conv2DBackpropFilter", "Conv2DBackpropInput", "MaxPoolGrad"):
        assert kinds[kind] == {"CPU:0", "CPU:1", "CPU:2"}, kind


def _list_sizes(trainer):
    """Returns the height and width of what is computed for images."""
    sizes = set()
    for operation in find_graph(trainer).get_operations():
        if operation.type in ("Conv2D", "MaxPool", "Conv2DBackpropInput", "Relu", "AddN"):
            shape = operation.outputs[0].shape
            if shape.rank == 4 and shape[0] is None and operation.outputs[0].consumers():
                sizes.add(tuple(shape[1:3]))
    assert sizes
    return sizes


def test_no_device_has_the_activations_of_all_rows():
    for height, width in _list_sizes(train_over_three()):
        assert height <= -(-width // 3) + 2, (height, width)  # and its neighbors' rows


def test_no_device_has_the_activations_of_all_columns():
    trainer, _, _ = train("unet", placement=Strips(grid=(1, 3)))
    for height, width in _list_sizes(trainer):
        assert width <= -(-height // 3) + 2, (height, width)
    kinds = find_devices(trainer)
    for kind in ("Conv2D", "Conv2DBackpropFilter", "Conv2DBackpropInput", "MaxPoolGrad"):
        assert kinds[kind] == {"CPU:0", "CPU:1", "CPU:2"}, kind


PICTURES = (13, 11, 6)
LAYERS = {
    "a convolution": lambda k: k.Conv2D(5, 3, padding="same"),
    "strides": lambda k: k.Conv2D(5, 3, strides=2, padding="same"),
    "strides, valid": lambda k: k.Conv2D(5, 4, strides=(2, 3), activation="softmax"),
    "a large window": lambda k: k.Conv2D(5, (9, 5), padding="same"),
    "dilation": lambda k: k.Conv2D(5, 3, dilation_rate=2, padding="same"),
    "dilation, valid": lambda k: k.Conv2D(5, 3, dilation_rate=(3, 1)),
    "groups": lambda k: k.Conv2D(6, 2, groups=3),
    "depthwise": lambda k: k.DepthwiseConv2D(3, padding="same", depth_multiplier=2),
    "separable": lambda k: k.SeparableConv2D(5, 3, strides=2, padding="same"),
    "maximum": lambda k: k.MaxPooling2D(3, strides=2, padding="same"),
    "maximum, valid": lambda k: k.MaxPooling2D((2, 3)),
    "average": lambda k: k.AveragePooling2D(3, strides=1, padding="same"),
    "average, strides": lambda k: k.AveragePooling2D((4, 2), strides=(2, 1), padding="same"),
    "average, valid": lambda k: k.AveragePooling2D(2),
    "transposed": lambda k: k.Conv2DTranspose(5, 3, strides=2, padding="same"),
    "transposed, valid": lambda k: k.Conv2DTranspose(5, (5, 3), strides=(2, 1)),
    "transposed, wide strides": lambda k: k.Conv2DTranspose(5, 2, strides=3),
    "transposed, wide strides, same": lambda k: k.Conv2DTranspose(5, 2, strides=3, padding="same"),
    "transposed, large": lambda k: k.Conv2DTranspose(5, 7, padding="same"),
    "padding": lambda k: k.ZeroPadding2D(((3, 1), (0, 2))),
    "cropping": lambda k: k.Cropping2D(((2, 5), (1, 0))),
    "up, nearest": lambda k: k.UpSampling2D((3, 2)),
    "up, bilinear": lambda k: k.UpSampling2D(2, interpolation="bilinear"),
    "up, bilinear, three times": lambda k: k.UpSampling2D((3, 2), interpolation="bilinear"),
    "up, bicubic": lambda k: k.UpSampling2D(2, interpolation="bicubic"),
    "dropout": lambda k: k.Dropout(0.4, seed=1),
    "dropout of channels": lambda k: k.SpatialDropout2D(0.4, seed=1),
    "noise": lambda k: k.GaussianNoise(0.4, seed=1),
    "multiplied noise": lambda k: k.GaussianDropout(0.4, seed=1),
    "batch normalization": lambda k: k.BatchNormalization(),
    "without a scale": lambda k: k.BatchNormalization(scale=False, center=False),
    "our batch normalization": lambda k: FusedBatchNormalization(synchronized=True),
    "group normalization": lambda k: k.GroupNormalization(3),
    "instance normalization": lambda k: k.GroupNormalization(-1, scale=False),
    "layer normalization": lambda k: k.LayerNormalization(),
    "over all pixels": lambda k: k.LayerNormalization([1, 2, 3]),
    "dense": lambda k: k.Dense(4, "gelu"),
    "slopes of pixels": lambda k: k.PReLU(alpha_initializer="ones"),
    "an activity": lambda k: k.Conv2D(4, 3, activity_regularizer="l2"),
    "a gate": lambda k: (
        lambda x: x * k.Dense(6, "sigmoid")(k.GlobalAveragePooling2D(keepdims=True)(x))
    ),
    "largest": lambda k: lambda x: k.Multiply()([x, k.GlobalMaxPooling2D(keepdims=True)(x)]),
    "joined": lambda k: (
        lambda x: k.Concatenate()(
            [x, k.Conv2D(2, 1)(x), k.ZeroPadding2D(((1, 0), 0))(k.Cropping2D(((0, 1), 0))(x))]
        )
    ),
    "joined, other rows": lambda k: (
        lambda x: keras.ops.relu(k.Cropping2D(((2, 0), 0))(x) + k.Cropping2D(((0, 2), 0))(x))
    ),
    "rows joined": lambda k: lambda x: k.Concatenate(axis=1)([x, x]),
    "other channels first": lambda k: (
        lambda x: keras.ops.stack([x[..., i] for i in (2, 1, 0, 3, 5, 4)], axis=-1)
    ),
    "pixels in sequence": lambda k: (
        lambda x: k.Reshape((13, 11, 6))(k.Dense(6)(k.Reshape((-1, 6))(x)))
    ),
    "a nested model": lambda k: (
        lambda x: keras.Sequential([keras.Input(PICTURES), k.Conv2D(4, 3), k.BatchNormalization()])(
            x
        )
    ),
    "frozen": lambda k: k.BatchNormalization(trainable=False),
    "as in prediction": lambda k: lambda x: k.BatchNormalization()(x, training=False),
}


def _train_layer(make, *, optimizer=None, **options):
    def build():
        keras.utils.set_random_seed(5)
        given = keras.Input(PICTURES)
        x = keras.layers.Conv2D(6, 3, padding="same", activation="tanh")(given)
        x = make(keras.layers)(x)
        x = keras.layers.Conv2D(3, 2, padding="same", activation="tanh")(x)
        x = keras.layers.Flatten()(keras.layers.MaxPooling2D(2)(x))
        model = keras.Model(given, keras.layers.Dense(2)(x))
        model.compile(optimizer or keras.optimizers.SGD(0.01), "mse")
        return model

    options.setdefault("strategy", zoo.STRATEGIES["one_device"]())
    trainer = zoo.make_trainer(build, **options)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(12, *PICTURES)), rng.normal(size=(12, 2))
    history = trainer.fit(x, y, validation_data=(x, y), batch_size=4, epochs=2, verbose=0)
    weights = [v.numpy() for v in trainer.model.variables]
    return trainer, weights, list(history.history.values())


PLACEMENTS = {
    "2 rows": Strips(devices=2),
    "3 columns": Strips(grid=(1, 3)),
    "3 rows": Strips(devices=3),
    "2 columns": Strips(grid=(1, 2)),
}
# What differs most from one another comes first.
SPREAD = ["strides", "transposed", "maximum", "batch normalization", "joined", "dropout"]
SPREAD += [name for name in LAYERS if name not in SPREAD]


@functools.cache
def _train_layer_whole(name):
    return _train_layer(LAYERS[name])[1:]


@pytest.mark.thorough(keep=4)
@pytest.mark.parametrize(("name", "placement"), zoo.take_turns(SPREAD, PLACEMENTS))
def test_each_rule(float64, name, placement):
    expected, values = _train_layer_whole(name)
    _, found, ours = _train_layer(LAYERS[name], placement=PLACEMENTS[placement])
    assert zoo.largest_difference(found, expected) < 1e-12
    np.testing.assert_allclose(ours, values, rtol=1e-11)


def test_a_normalization_in_float32_of_images_in_bfloat16():
    def normalize(layers):
        def call(x):
            x = layers.Activation("linear", dtype="bfloat16")(x)
            return layers.BatchNormalization(dtype="float32")(x)

        return call

    _, expected, _ = _train_layer(normalize)
    _, found, _ = _train_layer(normalize, placement=Strips(devices=2))
    assert zoo.largest_difference(found, expected) < 1e-5


def test_what_follows_an_operation_without_a_rule_is_divided():
    trainer, _, _ = _train_layer(LAYERS["other channels first"], placement=Strips(devices=2))
    convolutions = [o for o in find_graph(trainer).get_operations() if o.type == "Conv2D"]
    heights = {operation.outputs[0].shape[1] for operation in convolutions}
    assert max(heights) <= 7, heights


def test_the_summary_names_layers_that_are_computed_whole():
    trainer, _, _ = _train_layer(LAYERS["up, bicubic"], placement=Strips(devices=2))
    found = trainer.engine.summarize_placement()
    assert found["placement"] == [{"device": "CPU:0"}, {"device": "CPU:1"}]
    assert [name.rstrip("_0123456789") for name in found["whole_layers"]] == [
        "up_sampling2d",
        "flatten",
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"grid": (4,)}, "`grid=4` is not a grid. "),
        ({"grid": (1, 1)}, "`grid=1,1` is not a grid. "),
        (
            {"grid": (2, 2), "devices": 3},
            "`grid=2,2` has 4 parts, but each replica has 3 devices. ",
        ),
    ],
)
def test_a_grid_that_does_not_fit_costs_one_line(options, message):
    with pytest.raises(TfdistError, match=f"^{message}"):
        Strips(**options)


def test_a_model_without_pictures_costs_one_line():
    with pytest.raises(TfdistError, match="^`placement=strips` has nothing to divide: 'sequential"):
        train("dense", placement=Strips())
