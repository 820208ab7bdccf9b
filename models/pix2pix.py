"""The U-Net of TensorFlow's segmentation tutorial: MobileNetV2, and the decoder of pix2pix."""

import keras

from tfdist.models.backbones import DOWNLOAD_TIMEOUT_S, Encoder, make_encoder, to_unit_range
from tfdist.models.layers import make_norm
from tfdist.models.stages import check_positive, layer_seed
from tfdist.models.unet import drop_features, wide_dtype

_NAME = "pix2pix_unet"
_ENDPOINTS = (
    "block_1_expand_relu",
    "block_3_expand_relu",
    "block_6_expand_relu",
    "block_13_expand_relu",
    "block_16_project",
)


def pix2pix_unet(
    *,
    image_size: tuple[int | None, int | None],
    num_classes: int,
    channels: int = 3,
    base_filters: int = 64,
    depth: int = 5,
    norm: str = "sync_batch",
    dropout: float = 0.0,
    pretrained: bool = False,
    seed: int = 0,
    download_timeout_s: float = DOWNLOAD_TIMEOUT_S,
) -> keras.Model:
    """Returns a new U-Net with the encoder MobileNetV2 and one transposed convolution per level.

    With the defaults, the decoder has 512, 256, 128 and 64 filters, and the last transposed
    convolution returns the logits. The tutorial's encoder has ImageNet weights and is frozen; see
    `tfdist.models.stages.freeze_encoder`. Unlike the tutorial, which gives the encoder images in
    [0, 1], this model scales them to [-1, 1], as the ImageNet weights require. For the arguments,
    see `tfdist.models.backbones.make_backbone_unet`.

    Args:
      base_filters: the filters of the decoder's last level before the logits.
      dropout: the fraction of the encoder's features to drop in training.

    Raises:
      ValueError: see `make_backbone_unet`.

    Source: https://www.tensorflow.org/tutorials/images/segmentation; Isola et al. 2017
    (arXiv:1611.07004), appendix 6.1, for the initial weights.
    """
    check_positive(_NAME, num_classes=num_classes, base_filters=base_filters)
    body = make_encoder(
        _NAME,
        Encoder(keras.applications.MobileNetV2, _ENDPOINTS, to_unit_range),
        image_size=image_size,
        channels=channels,
        depth=depth,
        norm=norm,
        pretrained=pretrained,
        seed=seed,
        download_timeout_s=download_timeout_s,
    )
    *skips, x = body.outputs
    x = drop_features(x, dropout, seed=seed)
    for level in reversed(range(1, depth)):
        stage, filters = f"decoder_{level}", base_filters << level - 1
        x = _upsample(x, filters, norm=norm, name=f"{stage}_up", seed=seed)
        if norm != "none":
            x = make_norm(norm, channels=filters, name=f"{stage}_norm")(x)
        x = keras.layers.ReLU(name=f"{stage}_relu")(x)
        x = keras.layers.Concatenate(name=f"{stage}_concat")([x, skips[level - 1]])
    logits = keras.layers.Conv2DTranspose(
        num_classes,
        3,
        strides=2,
        padding="same",
        kernel_initializer=keras.initializers.GlorotUniform(layer_seed(seed, "head_logits")),
        dtype=wide_dtype(),
        name="head_logits",
    )(x)
    return keras.Model(body.inputs[0], logits, name=_NAME)


def _upsample(x, filters, *, norm, name, seed):
    """Returns x [batch, 2h, 2w, filters] for [batch, h, w, c]."""
    return keras.layers.Conv2DTranspose(
        filters,
        3,
        strides=2,
        padding="same",
        use_bias=norm == "none",
        kernel_initializer=keras.initializers.RandomNormal(0.0, 0.02, layer_seed(seed, name)),
        name=name,
    )(x)
