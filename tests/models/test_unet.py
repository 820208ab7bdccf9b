"""The U-Net's shape, its stages, and its initial weights as a function of the seed."""

import contextlib
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist.models.unet
from tests.models.named_stages import stage_layers
from tfdist.models import make_model
from tfdist.models.layers import NORMS
from tfdist.models.stages import layer_seed, stage_names
from tfdist.models.unet import unet

SMALL = {"image_size": (16, 16), "num_classes": 3, "base_filters": 4, "depth": 2}


def make_images(shape=(2, 16, 16, 3), seed=0):
    return np.random.default_rng(seed).uniform(0, 255, shape).astype("float32")


def assert_same_weights(model, other):
    for a, b in zip(model.weights, other.weights, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy(), err_msg=a.path)


@pytest.fixture
def dtype_policy(request):
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(request.param)
    yield request.param
    keras.config.set_dtype_policy(before)


def test_importing_models_imports_no_tensorflow():
    code = (
        "import tfdist.models, sys; sys.exit('tensorflow' in sys.modules or 'keras' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_parameter_count_of_the_usual_size():
    model = unet(image_size=(64, 64), num_classes=3, base_filters=32)
    convolutions = 0
    for filters, inputs in [(32, 3), (64, 32), (128, 64), (256, 128), (512, 256)]:
        convolutions += 9 * inputs * filters + 9 * filters * filters
    for filters in (256, 128, 64, 32):
        convolutions += 4 * 2 * filters * filters + filters
        convolutions += 9 * 2 * filters * filters + 9 * filters * filters
    normalized = 2 * (2 * (32 + 64 + 128 + 256) + 512)
    assert model.count_params() == convolutions + 4 * normalized + 32 * 3 + 3
    assert 7.7e6 < model.count_params() < 7.8e6


def test_paper_size_by_default():
    names = [layer.name for layer in unet(image_size=(None, None), num_classes=2).layers]
    assert "encoder_3_pool" in names
    assert "encoder_4_pool" not in names


@pytest.mark.parametrize("norm", NORMS)
def test_one_step_changes_every_trainable_weight(norm):
    model = unet(**SMALL, norm=norm)
    before = [v.numpy() for v in model.trainable_variables]
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    labels = np.arange(2 * 16 * 16).reshape(2, 16, 16) % 3
    model.fit(make_images(), labels, verbose=0)
    for a, b in zip(model.trainable_variables, before, strict=True):
        assert not np.array_equal(a.numpy(), b), a.path


@pytest.mark.parametrize(
    ("dtype_policy", "logits"),
    [
        ("float32", "float32"),
        ("mixed_bfloat16", "float32"),
        ("mixed_float16", "float32"),
        ("float64", "float64"),
    ],
    indirect=["dtype_policy"],
)
def test_logits_are_at_least_float32(dtype_policy, logits):
    model = unet(**SMALL)
    output = model(make_images())
    assert output.shape == (2, 16, 16, 3)
    assert output.dtype == logits
    compute = keras.DTypePolicy(dtype_policy).compute_dtype
    assert model.get_layer("encoder_0_relu_1").output.dtype == compute


def test_images_are_normalized_inside():
    images = make_images()
    raw, normalized = (unet(**SMALL, mean=m, std=s) for m, s in [(10.0, [5.0, 4.0, 2.0]), (0, 1)])
    expected = normalized((images - 10.0) / np.array([5, 4, 2], "float32"))
    np.testing.assert_allclose(raw(images), expected, atol=1e-3)
    default = unet(**SMALL).get_layer("encoder_0_rescale")
    np.testing.assert_allclose(default(np.array([0.0, 255.0], "float32")), [-1, 1])


def test_any_size_that_halves_when_none_is_given():
    options = {**SMALL, "image_size": (None, None)}
    model = unet(**options)
    assert model.output_shape == (None, None, None, 3)
    images = make_images((1, 24, 16, 3))
    fixed = unet(**{**SMALL, "image_size": (24, 16)})
    np.testing.assert_array_equal(model(images), fixed(images))


def test_padding_keeps_a_translation():
    # Shifted by the coarsest stride, the inside of the logits shifts with the image.
    model = unet(**{**SMALL, "image_size": (None, None)})
    images = make_images((1, 64, 64, 3))
    shifted = np.roll(images, 4, axis=(1, 2))
    inside = slice(28, 36)
    expected = model(images)[:, 24:32, 24:32]
    np.testing.assert_allclose(model(shifted)[:, inside, inside], expected, atol=1e-4)


@pytest.mark.parametrize("norm", NORMS)
def test_initial_weights_are_a_function_of_the_seed(norm):
    model = unet(**SMALL, norm=norm, seed=7)
    keras.utils.set_random_seed(99)
    keras.layers.Dense(3)
    strategy = tf.distribute.OneDeviceStrategy("CPU:1")
    with strategy.scope():
        again = unet(**SMALL, norm=norm, seed=7)
    assert_same_weights(model, again)
    other = unet(**SMALL, norm=norm, seed=8)
    for a, b in zip(model.weights, other.weights, strict=True):
        if "kernel" in a.path:
            assert not np.array_equal(a.numpy(), b.numpy()), a.path


def test_layers_draw_different_weights():
    model = unet(**SMALL)
    a, b = (model.get_layer(f"decoder_{i}_up").kernel.numpy().ravel()[:8] for i in (0, 1))
    assert np.abs(a / a.std() - b / b.std()).max() > 0.1


def test_initial_weights_are_he_normal():
    kernel = unet(**{**SMALL, "base_filters": 32}).get_layer("bottleneck_conv_2").kernel.numpy()
    assert kernel.std() == pytest.approx(np.sqrt(2 / (9 * 128)), rel=0.01)


def test_known_seed():
    # Runs that are resumed or compared count on it never to change.
    assert layer_seed(0, "encoder_0_conv_1") == 71143705


@pytest.mark.parametrize("dtype_policy", ["float64"], indirect=True)
def test_mean_gradient_of_replicas_equals_that_of_one_device(dtype_policy):
    sizes = (3, 2)
    images = make_images((sum(sizes), 16, 16, 3)).astype(dtype_policy)

    def gradients(model, images):
        # A mean over the replica's own images, as Keras's `fit` computes it.
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(images, training=True)))
        return tape.gradient(loss, [v.value for v in model.trainable_variables])

    alone = unet(**SMALL)
    expected = tf.function(gradients)(alone, images)
    # Central storage, as its replicas reduce without collectives, whose keys a process shares.
    strategy = tf.distribute.experimental.CentralStorageStrategy(
        compute_devices=["CPU:0", "CPU:1"], parameter_device="CPU:0"
    )
    with strategy.scope():
        model = unet(**SMALL)
    parts = np.split(images, [sizes[0]])
    parts = strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(parts[context.replica_id_in_sync_group])
    )
    actual = tf.function(lambda images: strategy.run(gradients, (model, images)))(parts)
    for a, b in zip(actual, expected, strict=True):
        parts = strategy.experimental_local_results(a)
        mean = sum(size / sum(sizes) * part for size, part in zip(sizes, parts, strict=True))
        assert np.abs(mean - b).max() < 1e-11 * np.abs(b).max()
    for a, b in zip(model.non_trainable_variables, alone.non_trainable_variables, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-11, atol=1e-14)


def test_stages_hold_every_layer_once():
    model = unet(**SMALL)
    stages = stage_layers(model)
    assert tuple(stages) == stage_names(2)
    layers = [layer for stage in stages.values() for layer in stage]
    assert sorted(map(id, layers)) == sorted(map(id, model.layers[1:]))
    for name, held in stages.items():
        assert all(layer.name.startswith(f"{name}_") for layer in held)


def test_stages_are_built_in_their_scopes():
    entered = []

    @contextlib.contextmanager
    def scope(stage):
        entered.append(stage)
        with tf.device("CPU:1" if stage.startswith("decoder") else "CPU:0"):
            yield

    model = unet(**SMALL, stage_scope=scope)
    assert list(dict.fromkeys(entered)) == list(stage_names(2))
    for name, layers in stage_layers(model).items():
        for variable in (v for layer in layers for v in layer.weights):
            device = variable.value.device
            assert device.endswith("CPU:1" if name.startswith("decoder") else "CPU:0")


def test_saved_model_loads_the_same(path_with_spaces):
    model = unet(**SMALL)
    images = make_images()
    model(images, training=True)
    model.save(path_with_spaces / "model.keras")
    loaded = keras.saving.load_model(path_with_spaces / "model.keras")
    np.testing.assert_array_equal(loaded(images), model(images))
    assert tuple(stage_layers(loaded)) == stage_names(2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"image_size": (100, 70)}, r"100x70 cannot be halved 2 times\. .*: 100x68 or 100x72\."),
        ({"image_size": (None, 3)}, r"Nonex3 cannot be halved .*: Nonex4\."),
        ({"image_size": (16,)}, r"image size is \(16,\)\. Give height and width"),
        ({"image_size": (16, 0)}, "positive or None"),
        ({"num_classes": 0}, "num_classes is 0. Give at least 1"),
        ({"channels": 0}, "channels is 0"),
        ({"base_filters": -1}, "base_filters is -1"),
        ({"depth": 0}, "depth is 0"),
        ({"norm": "btch"}, "unknown norm 'btch'. Valid: sync_batch, batch"),
        ({"pretrained": True}, "no pretrained weights. Leave out `pretrained`"),
    ],
)
def test_bad_arguments_are_refused(options, message):
    with pytest.raises(ValueError, match=f"^Cannot build unet: .*{message}"):
        unet(**{**SMALL, **options})


def test_make_model_passes_its_arguments_on(monkeypatch):
    given = {}
    monkeypatch.setattr(tfdist.models.unet, "unet", lambda **options: given.update(options))
    options = {
        "image_size": (32, 48),
        "num_classes": 5,
        "channels": 1,
        "base_filters": 7,
        "depth": 3,
        "norm": "group",
        "dropout": 0.5,
        "pretrained": True,
        "seed": 11,
    }
    make_model("unet", **options)
    assert given == options


@pytest.mark.parametrize("name", ["unet", "mobilenet_v2_unet", "pix2pix_unet"])
def test_dropout_changes_nothing_but_training(name):
    options = {"image_size": (32, 32), "num_classes": 3, "base_filters": 4, "depth": 2}
    images = make_images((2, 32, 32, 3))
    dropping, plain = (make_model(name, **options, dropout=rate) for rate in (0.5, 0.0))
    assert_same_weights(dropping, plain)
    np.testing.assert_array_equal(dropping(images), plain(images))
    first, second = (dropping(images, training=True).numpy() for _ in range(2))
    assert np.abs(first - second).max() > 0
    with pytest.raises(ValueError, match=r"Cannot drop a fraction of 1\.0 of the features"):
        make_model(name, **options, dropout=1.0)


def test_unknown_model_lists_the_closest_first():
    with pytest.raises(ValueError, match=r"Unknown model 'resnet_unet'\. Valid: resnet50_unet, "):
        make_model("resnet_unet", image_size=(32, 32), num_classes=2)
