"""Encoders of keras.applications as U-Nets: what is rebuilt, and what stays the application's."""

import inspect
import socket

import keras
import numpy as np
import pytest

import tfdist.models.backbones
from tests.models.named_stages import stage_layers
from tfdist.models import MODELS, make_model
from tfdist.models.backbones import (
    efficientnet_v2_b0_unet,
    make_backbone_unet,
    mobilenet_v2_unet,
    resnet50_unet,
)
from tfdist.models.layers import FusedBatchNormalization
from tfdist.models.portable import to_fused_layers, to_keras_layers
from tfdist.models.stages import stage_names

BACKBONES = {
    "mobilenet_v2_unet": (mobilenet_v2_unet, "MobileNetV2", "mobilenet_v2"),
    "resnet50_unet": (resnet50_unet, "ResNet50", "resnet"),
    "efficientnet_v2_b0_unet": (efficientnet_v2_b0_unet, "EfficientNetV2B0", "efficientnet_v2"),
}
SMALL = {"image_size": (64, 64), "num_classes": 3, "base_filters": 4}


def make_images(shape=(2, 64, 64, 3)):
    return np.random.default_rng(0).uniform(0, 255, shape).astype("float32")


@pytest.fixture
def imagenet(monkeypatch):
    """Stands in for the download: the application, with weights that are easily told apart."""
    loaded = {}

    def load(name, encoder, timeout_s):
        model = encoder.build(weights=None, include_top=False, input_shape=(64, 64, 3))
        rng = np.random.default_rng(5)
        kernels = [np.array(w.numpy()) for w in model.weights]
        model.set_weights([k if k.ndim > 1 else rng.uniform(0.5, 1.5, k.shape) for k in kernels])
        loaded[name] = model
        return model

    monkeypatch.setattr(tfdist.models.backbones, "_load_imagenet", load)
    return loaded


def test_every_backbone_is_in_the_table():
    assert set(BACKBONES) | {"unet", "pix2pix_unet"} == set(MODELS)
    common = set(inspect.signature(make_model).parameters) - {"name"}
    assert common <= set(inspect.signature(make_backbone_unet).parameters)


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("name", BACKBONES)
def test_whole_encoder_is_rebuilt(name):
    model = make_model(name, **SMALL, depth=5)
    assert tuple(stage_layers(model)) == stage_names(5)
    assert not any(isinstance(x, keras.layers.BatchNormalization) for x in model.layers)
    norms = [layer for layer in model.layers if isinstance(layer, FusedBatchNormalization)]
    assert len(norms) > 45
    assert all(layer.synchronized for layer in norms)


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("name", BACKBONES)
def test_one_step_changes_every_trainable_weight(name):
    model = make_model(name, **SMALL, depth=3)
    before = [v.numpy() for v in model.trainable_variables]
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(1.0), loss, run_eagerly=True)
    labels = np.arange(2 * 64 * 64).reshape(2, 64, 64) % 3
    model.fit(make_images(), labels, verbose=0)
    unchanged = [
        a.path
        for a, b in zip(model.trainable_variables, before, strict=True)
        if np.array_equal(a.numpy(), b)
    ]
    assert unchanged == []


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("name", BACKBONES)
def test_initial_weights_are_a_function_of_the_seed(name):
    model, again = (make_model(name, **SMALL, depth=3, seed=7) for _ in range(2))
    for a, b in zip(model.weights, again.weights, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy(), err_msg=a.path)


def test_seeds_differ():
    model, other = (mobilenet_v2_unet(**SMALL, depth=3, seed=s) for s in (7, 8))
    for a, b in zip(model.weights, other.weights, strict=True):
        if "kernel" in a.path:
            assert not np.array_equal(a.numpy(), b.numpy()), a.path


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("name", BACKBONES)
def test_pretrained_encoder_is_the_application(name, imagenet):
    build, _, module = BACKBONES[name]
    model = build(**SMALL, depth=5, pretrained=True, norm="batch")
    application = imagenet[name]
    images = make_images()
    raw = images.copy()
    if module == "efficientnet_v2":
        # This one's preprocessing is a part of the application, which was built without.
        raw = (raw / 255 - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]
        raw = raw.astype("float32")
    else:
        raw = getattr(keras.applications, module).preprocess_input(raw)
    last = application.layers[-1].name
    features = keras.Model(model.input, model.get_layer(f"encoder_4_{last}").output)
    expected = application(raw)
    assert np.ptp(expected) > 0
    # A hundred layers of float32, in another order of operations, with weights of any size.
    assert np.abs(features(images) - expected).max() < 1e-3 * np.ptp(expected)


def test_norm_none_gives_biases_and_no_statistics():
    model = mobilenet_v2_unet(**SMALL, depth=2, norm="none")
    assert model.non_trainable_variables == []
    convolutions = [x for x in model.layers if isinstance(x, keras.layers.Conv2D)]
    assert all(layer.use_bias for layer in convolutions)


def test_norm_group_replaces_every_batch_normalization():
    model = mobilenet_v2_unet(**SMALL, depth=3, norm="group")
    names = {type(layer).__name__ for layer in model.layers}
    assert "GroupNormalization" in names
    assert not any("BatchNormalization" in name for name in names)


def test_batch_normalization_keeps_the_applications_constants():
    layer = mobilenet_v2_unet(**SMALL, depth=2).get_layer("encoder_0_bn_Conv1")
    assert (layer.momentum, layer.epsilon) == (0.999, 1e-3)


def test_one_channel_and_any_size():
    options = {**SMALL, "image_size": (None, None)}
    model = resnet50_unet(**options, channels=1, depth=3)
    assert model(make_images((1, 32, 48, 1))).shape == (1, 32, 48, 3)


def test_images_are_preprocessed_in_float32():
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        model = resnet50_unet(**SMALL, depth=2)
    finally:
        keras.config.set_dtype_policy(before)
    assert model.get_layer("encoder_0_blue_first").output.dtype == "float32"
    assert model.get_layer("encoder_0_conv1_relu").output.dtype == "bfloat16"
    assert model.get_layer("encoder_0_conv1_bn").compute_dtype == "bfloat16"
    assert model.output.dtype == "float32"


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("name", BACKBONES)
def test_saved_model_loads_the_same(name, path_with_spaces):
    model = make_model(name, **SMALL, depth=3)
    model.save(path_with_spaces / "model.keras")
    loaded = keras.saving.load_model(path_with_spaces / "model.keras")
    np.testing.assert_array_equal(loaded(make_images()), model(make_images()))


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
@pytest.mark.parametrize("name", BACKBONES)
def test_keras_s_own_layers_compute_the_same(name, policy):
    keras.utils.set_random_seed(1)
    keras.config.set_dtype_policy(policy)
    try:
        model = make_model(name, **SMALL, depth=3)
    finally:
        keras.config.set_dtype_policy("float32")
    plain = to_keras_layers(model)
    assert all(type(layer).__module__.startswith("keras.") for layer in plain.layers)
    found, expected = plain(make_images()).numpy(), model(make_images()).numpy()
    tolerance = 1e-5 * np.abs(expected).max() if policy == "float32" else 0.1
    np.testing.assert_allclose(found, expected, atol=tolerance)
    np.testing.assert_array_equal(to_fused_layers(plain)(make_images()), expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"depth": 1}, "depth is 1. Give 2 to 5"),
        ({"depth": 6}, "depth is 6. Give 2 to 5"),
        ({"image_size": (64, 65)}, "64x65 cannot be halved 4 times. Use a multiple of 16"),
        ({"num_classes": 0}, "num_classes is 0"),
        ({"norm": "btch"}, "unknown norm 'btch'"),
        ({"pretrained": True, "channels": 1}, "for 3 channels, but channels is 1. Give 3"),
        ({"pretrained": True, "norm": "group"}, "norm is group. Give sync_batch or batch"),
    ],
)
def test_bad_arguments_are_refused(options, message):
    with pytest.raises(ValueError, match=f"^Cannot build resnet50_unet: .*{message}"):
        resnet50_unet(**{**SMALL, **options})


@pytest.fixture
def silent_server(monkeypatch, tmp_path):
    """A server that accepts and says nothing, in place of every host; an empty cache of Keras."""
    server = socket.create_server(("127.0.0.1", 0))
    here = server.getsockname()
    connect = socket.create_connection

    def create_connection(address, *args, **kwargs):
        return connect(here, *args, **kwargs)

    monkeypatch.setattr(socket, "create_connection", create_connection)
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    yield server
    server.close()


def test_download_that_stands_still_is_given_up(silent_server):
    with pytest.raises(
        ValueError, match=r"weights could not be downloaded \(.*\)\. Leave out `pre"
    ):
        mobilenet_v2_unet(**SMALL, pretrained=True, download_timeout_s=0.5)
    assert socket.getdefaulttimeout() is None
