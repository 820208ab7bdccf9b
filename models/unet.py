"""The U-Net, built from named stages."""

from collections.abc import Sequence
from typing import Any

import keras

from tfdist.models.layers import NORMS, make_norm
from tfdist.models.stages import (
    StageScope,
    any_device,
    check_image_size,
    check_positive,
    layer_seed,
    stage_names,
)


def unet(
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
    mean: float | Sequence[float] = 127.5,
    std: float | Sequence[float] = 127.5,
    stage_scope: StageScope = any_device,
) -> keras.Model:
    """Returns a new U-Net.

    It follows the paper with three common changes: the convolutions are padded, so the logits have
    the image's size; they are normalized before the ReLU; and there is no dropout by default. With
    the norm `none`, the convolutions have biases instead. For the arguments that all models have,
    see `tfdist.models.make_model`.

    Args:
      image_size: height and width, each divisible by 2**depth, or both None for any such size.
      pretrained: must be False: there are no pretrained weights.
      mean: what to subtract from the images, for all channels or for each.
      std: what to divide the result by, for all channels or for each.
      stage_scope: returns the context to build a stage in.

    Returns:
      A `keras.Model` that maps float [batch, height, width, channels], in [0, 255], to logits:
      float32 (float64 under that policy) [batch, height, width, num_classes]. Its stages are those
      of `tfdist.models.stages.stage_names(depth)`.

    Raises:
      ValueError: the image size cannot be halved `depth` times, a count is below 1, the norm is
        unknown, `dropout` is not in [0, 1), or `pretrained` is set.

    Source: Ronneberger, Fischer and Brox 2015 (arXiv:1505.04597), section 2; He et al. 2015
    (arXiv:1502.01852), equation 10, for the initial weights.
    """
    size = check_image_size(image_size, depth=depth, model="unet")
    check_positive("unet", num_classes=num_classes, channels=channels, base_filters=base_filters)
    check_positive("unet", depth=depth)
    check_norm(norm, model="unet")
    if pretrained:
        raise ValueError(
            "Cannot build unet: it has no pretrained weights. Leave out `pretrained`, or use a "
            "model with a pretrained encoder, such as resnet50_unet."
        )
    options: dict[str, Any] = {"norm": norm, "seed": seed}
    with stage_scope("encoder_0"):
        image = keras.Input((*size, channels), name="image", dtype=wide_dtype())
        x = make_rescaling(mean, std, name="encoder_0_rescale")(image)

    skips = []
    for level, stage in enumerate(stage_names(depth)[:depth]):
        with stage_scope(stage):
            skip, x = encoder_stage(x, stage=stage, filters=base_filters << level, **options)
        skips.append(skip)
    with stage_scope("bottleneck"):
        x = conv_block(x, stage="bottleneck", filters=base_filters << depth, **options)
        x = drop_features(x, dropout, seed=seed)
    for level, skip in reversed(list(enumerate(skips))):
        stage = f"decoder_{level}"
        with stage_scope(stage):
            x = decoder_stage(x, skip, stage=stage, filters=base_filters << level, **options)
    with stage_scope("head"):
        logits = head_stage(x, num_classes=num_classes, seed=seed)
    return keras.Model(image, logits, name="unet")


def encoder_stage(x, *, stage: str, filters: int, norm: str, seed: int):
    """Returns the skip [batch, h, w, filters] for x [batch, h, w, c], and the pooled skip."""
    skip = conv_block(x, stage=stage, filters=filters, norm=norm, seed=seed)
    return skip, keras.layers.MaxPooling2D(name=f"{stage}_pool")(skip)


def decoder_stage(x, skip, *, stage: str, filters: int, norm: str, seed: int):
    """Returns [batch, h, w, filters] for x [batch, h/2, w/2, c]; skip is [batch, h, w, s] or None.

    A transposed convolution upsamples x, which is then joined to the skip and convolved twice.
    """
    name = f"{stage}_up"
    x = keras.layers.Conv2DTranspose(
        filters, 2, strides=2, kernel_initializer=_he_normal(seed, name), name=name
    )(x)
    if skip is not None:
        x = keras.layers.Concatenate(name=f"{stage}_concat")([skip, x])
    return conv_block(x, stage=stage, filters=filters, norm=norm, seed=seed)


def conv_block(x, *, stage: str, filters: int, norm: str, seed: int):
    """Returns [batch, h, w, filters] for [batch, h, w, c]: convolution, norm and ReLU, twice."""
    for i in (1, 2):
        name = f"{stage}_conv_{i}"
        x = keras.layers.Conv2D(
            filters,
            3,
            padding="same",
            use_bias=norm == "none",
            kernel_initializer=_he_normal(seed, name),
            name=name,
        )(x)
        if norm != "none":
            x = make_norm(norm, channels=filters, name=f"{stage}_norm_{i}")(x)
        x = keras.layers.ReLU(name=f"{stage}_relu_{i}")(x)
    return x


def drop_features(x, rate: float, *, seed: int):
    """Returns x, of which a fraction of the features is dropped in training."""
    if not 0 <= rate < 1:
        raise ValueError(f"Cannot drop a fraction of {rate} of the features: give one in [0, 1).")
    if not rate:
        return x
    name = "bottleneck_dropout"
    return keras.layers.Dropout(rate, seed=layer_seed(seed, name), name=name)(x)


def head_stage(x, *, num_classes: int, seed: int):
    """Returns the logits [batch, h, w, num_classes] for [batch, h, w, c], at least in float32."""
    name = "head_logits"
    return keras.layers.Conv2D(
        num_classes, 1, kernel_initializer=_he_normal(seed, name), dtype=wide_dtype(), name=name
    )(x)


def make_rescaling(
    mean: float | Sequence[float], std: float | Sequence[float], *, name: str
) -> keras.layers.Rescaling:
    """Returns a layer that maps images to (images - mean) / std, at least in float32."""
    if isinstance(mean, Sequence):
        stds = list(std) if isinstance(std, Sequence) else [std] * len(mean)
        scale = [1 / s for s in stds]
        offset = [-m / s for m, s in zip(mean, stds, strict=True)]
        return keras.layers.Rescaling(scale, offset, dtype=wide_dtype(), name=name)
    if isinstance(std, Sequence):
        return make_rescaling([mean] * len(std), std, name=name)
    return keras.layers.Rescaling(1 / std, -mean / std, dtype=wide_dtype(), name=name)


def check_norm(norm: str, *, model: str) -> None:
    """Checks that `norm` is one of `tfdist.models.layers.NORMS`."""
    if norm not in NORMS:
        raise ValueError(f"Cannot build {model}: unknown norm {norm!r}. Valid: {', '.join(NORMS)}.")


def _he_normal(seed, name):
    return keras.initializers.HeNormal(seed=layer_seed(seed, name))


def wide_dtype():
    """Returns the dtype of images and logits; half precision would lose some of their digits."""
    return "float64" if keras.config.dtype_policy().compute_dtype == "float64" else "float32"
