"""The U-Net of TensorFlow's tutorial, whose layers are compared with those of the tutorial."""

import keras
import numpy as np
import pytest

from tests.models.named_stages import stage_layers
from tfdist.models.pix2pix import pix2pix_unet
from tfdist.models.portable import to_keras_layers
from tfdist.models.stages import freeze_encoder


def build_tutorials_model(num_classes):
    """The model as the tutorial describes it, in Keras's own layers."""
    names = [f"block_{i}_expand_relu" for i in (1, 3, 6, 13)] + ["block_16_project"]
    base = keras.applications.MobileNetV2(
        input_shape=(128, 128, 3), include_top=False, weights=None
    )
    down = keras.Model(base.input, [base.get_layer(name).output for name in names])
    down.trainable = False
    image = keras.Input((128, 128, 3))
    *skips, x = down(image)
    for filters, skip in zip((512, 256, 128, 64), reversed(skips), strict=True):
        x = keras.layers.Conv2DTranspose(filters, 3, 2, padding="same", use_bias=False)(x)
        x = keras.layers.ReLU()(keras.layers.BatchNormalization()(x))
        x = keras.layers.Concatenate()([x, skip])
    logits = keras.layers.Conv2DTranspose(num_classes, 3, 2, padding="same")(x)
    return keras.Model(image, logits)


def test_has_the_weights_and_the_outputs_of_the_tutorials_model():
    theirs, ours = build_tutorials_model(3), pix2pix_unet(image_size=(128, 128), num_classes=3)
    freeze_encoder(ours)
    for kind in ("trainable_weights", "non_trainable_weights"):
        shapes = [[tuple(w.shape) for w in getattr(model, kind)] for model in (theirs, ours)]
        assert sorted(shapes[0]) == sorted(shapes[1])
    rng = np.random.default_rng(0)
    weights = [rng.uniform(0.05, 0.1, w.shape) for w in ours.weights]
    by_name = {}
    for weight, value in zip(ours.weights, weights, strict=True):
        weight.assign(value)
        layer, name = weight.path.split("/")[-2:]
        by_name[layer.split("_", 2)[2] if layer.startswith("encoder") else layer, name] = value
    decoder = iter(["decoder_4", "decoder_3", "decoder_2", "decoder_1", "head"])
    stage = ""
    for layer in theirs._flatten_layers():
        for weight in layer.weights if not hasattr(layer, "layers") else ():
            name = weight.path.split("/")[-1]
            if isinstance(layer, keras.layers.Conv2DTranspose) and name == "kernel":
                stage = next(decoder)
            if (layer.name, name) in by_name:
                weight.assign(by_name[layer.name, name])
            elif isinstance(layer, keras.layers.Conv2DTranspose):
                kind = "head_logits" if stage == "head" else f"{stage}_up"
                weight.assign(by_name[kind, name])
            else:
                weight.assign(by_name[f"{stage}_norm", name])
    images = rng.uniform(0, 255, (1, 128, 128, 3)).astype("float32")
    expected = theirs(images / 127.5 - 1)
    assert np.ptp(expected) > 0
    np.testing.assert_allclose(ours(images), expected, rtol=1e-3)


def test_stages_and_depths():
    model = pix2pix_unet(image_size=(32, 32), num_classes=2, base_filters=4, depth=3)
    assert list(stage_layers(model))[:3] == ["encoder_0", "encoder_1", "encoder_2"]
    assert list(stage_layers(model))[3:] == ["decoder_2", "decoder_1", "head"]
    assert model.output_shape == (None, 32, 32, 2)
    plain = to_keras_layers(model)
    images = np.random.default_rng(0).uniform(0, 255, (1, 32, 32, 3)).astype("float32")
    np.testing.assert_allclose(plain(images), model(images), atol=1e-5)


def test_refuses_an_unknown_depth():
    with pytest.raises(ValueError, match=r"^Cannot build pix2pix_unet: depth is 6\. Give 2 to 5"):
        pix2pix_unet(image_size=(64, 64), num_classes=2, depth=6)
