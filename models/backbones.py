"""U-Nets with encoders from keras.applications."""

import contextlib
import socket
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras

from tfdist.models.layers import FusedBatchNormalization, ReverseChannels, make_norm
from tfdist.models.stages import check_image_size, check_positive, layer_seed
from tfdist.models.unet import (
    check_norm,
    conv_block,
    decoder_stage,
    drop_features,
    head_stage,
    make_rescaling,
    wide_dtype,
)

DOWNLOAD_TIMEOUT_S = 20.0
"""How long the download of pretrained weights may stall."""

_IMAGENET_MEAN = (123.675, 116.28, 103.53)
_IMAGENET_STD = (58.395, 57.12, 57.375)


class Encoder(NamedTuple):
    """An application, the layers at each halving of the image, and its preprocessing."""

    build: Callable[..., keras.Model]
    endpoints: tuple[str, ...]
    preprocess: Callable[[Any, int], Any]


def mobilenet_v2_unet(**options) -> keras.Model:
    """Returns a new U-Net with the encoder MobileNetV2; see `make_backbone_unet`.

    Source: Sandler et al. 2018 (arXiv:1801.04381), table 2.
    """
    endpoints = (
        "block_1_expand_relu",
        "block_3_expand_relu",
        "block_6_expand_relu",
        "block_13_expand_relu",
        "out_relu",
    )
    encoder = Encoder(keras.applications.MobileNetV2, endpoints, to_unit_range)
    return make_backbone_unet("mobilenet_v2_unet", encoder, **options)


def resnet50_unet(**options) -> keras.Model:
    """Returns a new U-Net with the encoder ResNet50; see `make_backbone_unet`.

    Source: He et al. 2016 (arXiv:1512.03385), table 1.
    """
    endpoints = (
        "conv1_relu",
        "conv2_block3_out",
        "conv3_block4_out",
        "conv4_block6_out",
        "conv5_block3_out",
    )
    encoder = Encoder(keras.applications.ResNet50, endpoints, _to_caffe)
    return make_backbone_unet("resnet50_unet", encoder, **options)


def efficientnet_v2_b0_unet(**options) -> keras.Model:
    """Returns a new U-Net with the encoder EfficientNetV2-B0; see `make_backbone_unet`.

    Source: Tan and Le 2021 (arXiv:2104.00298), table 4.
    """
    endpoints = (
        "block1a_project_activation",
        "block2b_add",
        "block3b_add",
        "block5e_add",
        "top_activation",
    )

    def build(**arguments):
        return keras.applications.EfficientNetV2B0(include_preprocessing=False, **arguments)

    return make_backbone_unet(
        "efficientnet_v2_b0_unet", Encoder(build, endpoints, _to_unit_variance), **options
    )


def make_backbone_unet(
    name: str,
    encoder: Encoder,
    *,
    image_size: tuple[int | None, int | None],
    num_classes: int,
    channels: int = 3,
    base_filters: int = 64,
    depth: int = 4,
    norm: str = "sync_batch",
    dropout: float = 0.0,
    pretrained: bool = False,
    seed: int = 0,
    download_timeout_s: float = DOWNLOAD_TIMEOUT_S,
) -> keras.Model:
    """Returns a new U-Net whose encoder is one of keras.applications.

    For the arguments that all models have, see `tfdist.models.make_model`.

    Args:
      image_size: height and width, each divisible by 2**depth, or both None for any such size.
      base_filters: the filters of the decoder's last level; each level below has twice as many.
      depth: how many times the encoder halves the image: 2 to 5; 5 uses the whole encoder.
      norm: one of `NORMS` of `layers`, used in the encoder too; with `none`, its convolutions
        have biases instead.

    Returns:
      A `keras.Model` that maps float [batch, height, width, channels], in [0, 255], to logits:
      float32 (float64 under that policy) [batch, height, width, num_classes]. It includes the
      application's own preprocessing. Its stages are those of `stages.stage_names(depth)`.

    Raises:
      ValueError: the image size cannot be halved `depth` times; a count is below 1; the norm is
        unknown; `dropout` is not in [0, 1); the encoder does not have this depth; ImageNet weights
        cannot be downloaded, or are requested for other than 3 channels or a norm other than batch
        normalization.

    Source: Ronneberger, Fischer and Brox 2015 (arXiv:1505.04597), for the decoder.
    """
    check_positive(name, num_classes=num_classes, base_filters=base_filters)
    body = make_encoder(
        name,
        encoder,
        image_size=image_size,
        channels=channels,
        depth=depth,
        norm=norm,
        pretrained=pretrained,
        seed=seed,
        download_timeout_s=download_timeout_s,
    )
    *skips, x = body.outputs
    options: dict[str, Any] = {"norm": norm, "seed": seed}
    x = conv_block(x, stage="bottleneck", filters=base_filters << depth, **options)
    x = drop_features(x, dropout, seed=seed)
    for level, skip in reversed(list(enumerate([None, *skips]))):
        stage = f"decoder_{level}"
        x = decoder_stage(x, skip, stage=stage, filters=base_filters << level, **options)
    logits = head_stage(x, num_classes=num_classes, seed=seed)
    return keras.Model(body.inputs[0], logits, name=name)


def make_encoder(
    name: str,
    encoder: Encoder,
    *,
    image_size: tuple[int | None, int | None],
    channels: int,
    depth: int,
    norm: str,
    pretrained: bool,
    seed: int,
    download_timeout_s: float,
) -> keras.Model:
    """Returns the first stages of an application, from the image to one output per halving.

    For the arguments and errors, see `make_backbone_unet`.
    """
    deepest = len(encoder.endpoints)
    if not 2 <= depth <= deepest:
        raise ValueError(
            f"Cannot build {name}: depth is {depth}. Give 2 to {deepest}, the number of times that "
            "the encoder halves the image."
        )
    size = check_image_size(image_size, depth=depth, model=name)
    check_positive(name, channels=channels)
    check_norm(norm, model=name)
    if pretrained and channels != 3:
        raise ValueError(
            f"Cannot build {name}: the ImageNet weights are for 3 channels, but channels is "
            f"{channels}. Give 3, or leave out pretrained."
        )
    if pretrained and norm not in ("batch", "sync_batch"):
        raise ValueError(
            f"Cannot build {name}: the ImageNet weights are for batch normalization, but norm is "
            f"{norm}. Give sync_batch or batch, or leave out pretrained."
        )
    source = _load_imagenet(name, encoder, download_timeout_s) if pretrained else None
    body = _rebuild(encoder, (*size, channels), depth=depth, norm=norm, seed=seed)
    if source is not None:
        _copy_weights(source, body, depth=depth)
    return body


def _rebuild(encoder, shape, *, depth, norm, seed):
    """Returns the application up to its first `depth` endpoints, rebuilt from new layers.

    The layers are named after their stages, use the normalization `norm`, and draw their initial
    weights from one seed each.
    """
    # The images stay float32 until they are preprocessed, even under mixed precision.
    image = keras.Input(shape, name="image", dtype=wide_dtype())
    application = encoder.build(
        input_tensor=encoder.preprocess(image, shape[-1]), include_top=False, weights=None
    )
    endpoints = [application.get_layer(name) for name in encoder.endpoints[:depth]]
    template = keras.Model(image, [layer.output for layer in endpoints])
    stages = _stages_of_layers(template, [layer.name for layer in endpoints])

    def remake(layer):
        name = f"encoder_{stages[layer.name]}_{layer.name}"
        if isinstance(layer, keras.layers.BatchNormalization):
            return _remake_norm(layer, norm, name)
        config = {**layer.get_config(), "name": name}
        for key in ("kernel_initializer", "depthwise_initializer", "pointwise_initializer"):
            initializer = config.get(key)
            if initializer and "seed" in initializer["config"]:
                seeded = {**initializer["config"], "seed": layer_seed(seed, f"{name}/{key}")}
                config[key] = {**initializer, "config": seeded}
        if norm == "none" and "use_bias" in config:
            config["use_bias"] = True
        return type(layer).from_config(config)

    def call(layer, *inputs, mask=None, **arguments):
        # Keras's batch normalization accepts a mask, but images have none.
        del mask
        return layer(*inputs, **arguments)

    return keras.models.clone_model(template, clone_function=remake, call_function=call)


def _remake_norm(layer, norm, name):
    if norm not in ("batch", "sync_batch"):
        return make_norm(norm, channels=layer.gamma.shape[0], name=name)
    return FusedBatchNormalization(
        synchronized=norm == "sync_batch",
        momentum=layer.momentum,
        epsilon=layer.epsilon,
        center=layer.center,
        scale=layer.scale,
        name=name,
    )


def _stages_of_layers(model, endpoints):
    """Returns the name of every layer -> the first level whose endpoint depends on it."""
    levels: dict[str, int] = {}
    for level, endpoint in enumerate(endpoints):
        for layer in keras.Model(model.inputs, model.get_layer(endpoint).output).layers:
            levels.setdefault(layer.name, level)
    return levels


def _copy_weights(source, body, *, depth):
    targets = {}
    for layer in body.layers:
        stage, _, name = layer.name.removeprefix("encoder_").partition("_")
        if stage.isdigit() and int(stage) < depth:
            targets[name] = layer
    for layer in source.layers:
        if layer.weights and layer.name in targets:
            targets[layer.name].set_weights(layer.get_weights())


def _load_imagenet(name, encoder, timeout_s):
    with _socket_timeout(timeout_s):
        try:
            return encoder.build(weights="imagenet", include_top=False, input_shape=(224, 224, 3))
        # Keras raises a bare Exception for a failed download.
        except Exception as error:
            reason = str(error).strip().splitlines()[-1] if str(error).strip() else repr(error)
            raise ValueError(
                f"Cannot build {name}: its ImageNet weights could not be downloaded ({reason}). "
                "Leave out `pretrained`, or download the weights on a machine with network access "
                "and copy them to Keras's cache, ~/.keras/models."
            ) from error


@contextlib.contextmanager
def _socket_timeout(timeout_s: float) -> Iterator[None]:
    """Sets the sockets' default timeout, as Keras's downloads have no timeout of their own."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(timeout_s)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)


def to_unit_range(image, channels):
    """Scales images to [-1, 1], as MobileNetV2 was trained on ImageNet."""
    del channels
    return make_rescaling(127.5, 127.5, name="rescale")(image)


def _to_caffe(image, channels):
    """Subtracts the mean color and puts blue first, as ResNet50 was trained on ImageNet."""
    if channels != 3:
        return make_rescaling(127.5, 1.0, name="rescale")(image)
    # The values of `keras.applications.imagenet_utils.preprocess_input(mode="caffe")`.
    centered = make_rescaling((123.68, 116.779, 103.939), 1.0, name="rescale")(image)
    return ReverseChannels(dtype=centered.dtype, name="blue_first")(centered)


def _to_unit_variance(image, channels):
    """Scales each channel to mean 0 and variance 1, as EfficientNetV2-B0 was trained."""
    if channels != 3:
        return make_rescaling(127.5, 57.5, name="rescale")(image)
    return make_rescaling(_IMAGENET_MEAN, _IMAGENET_STD, name="rescale")(image)
