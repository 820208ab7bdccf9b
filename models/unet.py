"""The U-Net, as named stages."""

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
    pretrained: bool = False,
    seed: int = 0,
    mean: float | Sequence[float] = 127.5,
    std: float | Sequence[float] = 127.5,
    stage_scope: StageScope = any_device,
) -> keras.Model:
    """Returns a new U-Net.

    Of the paper, with three differences that are usual since: the convolutions are padded, so that
    the logits have the image's size; they are normalized before the ReLU; and there is no dropout.

    Args:
      image_size: height and width, each divisible by 2**depth, or both None for any such size.
      num_classes: how many logits a pixel has.
      channels: how many an image has.
      base_filters: of the first level; each level below has twice as many. 64 in the paper.
      depth: how many 2x2 poolings there are. 4 in the paper.
      norm: one of `tfdist.models.layers.NORMS`; with `none`, the convolutions have biases instead.
      pretrained: not available: there are no such weights.
      seed: of the initial weights, which are a pure function of it.
      mean: what is subtracted from the images, for all channels or for each.
      std: what they are then divided by.
      stage_scope: from a stage's name to the context that it is built in.

    Returns:
      A `keras.Model` from float [batch, height, width, channels], in [0, 255], to logits: float32
      (float64 under that policy) [batch, height, width, num_classes]. Its stages are those of
      `tfdist.models.stages.stage_names(depth)`.

    Raises:
      ValueError: an image size that does not halve `depth` times; a count below 1; an unknown norm;
        `pretrained`.

    Source: Ronneberger, Fischer and Brox 2015 (arXiv:1505.04597), section 2; He et al. 2015
    (arXiv:1502.01852), equation 10, for the initial weights.
    """
    size = check_image_size(image_size, depth=depth, model="unet")
    check_positive("unet", num_classes=num_classes, channels=channels, base_filters=base_filters)
    check_positive("unet", depth=depth)
    check_norm(norm, model="unet")
    if pretrained:
        raise ValueError(
            "Cannot build unet: it has no pretrained weights. Leave out pretrained, or use a model "
            "with a pretrained encoder, such as resnet50_unet."
        )
    options: dict[str, Any] = {"norm": norm, "seed": seed}
    with stage_scope("encoder_0"):
        image = keras.Input((*size, channels), name="image", dtype=_wide_dtype())
        x = make_rescaling(mean, std, name="encoder_0_rescale")(image)

    skips = []
    for level, stage in enumerate(stage_names(depth)[:depth]):
        with stage_scope(stage):
            skip, x = encoder_stage(x, stage=stage, filters=base_filters << level, **options)
        skips.append(skip)
    with stage_scope("bottleneck"):
        x = conv_block(x, stage="bottleneck", filters=base_filters << depth, **options)
    for level, skip in reversed(list(enumerate(skips))):
        stage = f"decoder_{level}"
        with stage_scope(stage):
            x = decoder_stage(x, skip, stage=stage, filters=base_filters << level, **options)
    with stage_scope("head"):
        logits = head_stage(x, num_classes=num_classes, seed=seed)
    return keras.Model(image, logits, name="unet")


def encoder_stage(x, *, stage: str, filters: int, norm: str, seed: int):
    """Returns the skip [batch, h, w, filters] of x [batch, h, w, c], and it pooled to half."""
    skip = conv_block(x, stage=stage, filters=filters, norm=norm, seed=seed)
    return skip, keras.layers.MaxPooling2D(name=f"{stage}_pool")(skip)


def decoder_stage(x, skip, *, stage: str, filters: int, norm: str, seed: int):
    """Returns [batch, h, w, filters] of x [batch, h/2, w/2, c]; skip is [batch, h, w, s] or None.

    x is brought to the skip's size by a transposed convolution, joined to it, and convolved twice.
    """
    name = f"{stage}_up"
    x = keras.layers.Conv2DTranspose(
        filters, 2, strides=2, kernel_initializer=_he_normal(seed, name), name=name
    )(x)
    if skip is not None:
        x = keras.layers.Concatenate(name=f"{stage}_concat")([skip, x])
    return conv_block(x, stage=stage, filters=filters, norm=norm, seed=seed)


def conv_block(x, *, stage: str, filters: int, norm: str, seed: int):
    """Returns [batch, h, w, filters] of [batch, h, w, c]: twice convolution, norm and ReLU."""
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


def head_stage(x, *, num_classes: int, seed: int):
    """Returns the logits [batch, h, w, num_classes] of [batch, h, w, c], at least in float32."""
    name = "head_logits"
    return keras.layers.Conv2D(
        num_classes,
        1,
        kernel_initializer=_he_normal(seed, name),
        dtype=_wide_dtype(),
        name=name,
    )(x)


def make_rescaling(
    mean: float | Sequence[float], std: float | Sequence[float], *, name: str
) -> keras.layers.Rescaling:
    """Returns the layer from raw images to (images - mean) / std, at least in float32.

    Args:
      mean: for all channels or for each.
      std: for all channels or for each, or one for all.
      name: the layer's name.
    """
    if isinstance(mean, Sequence):
        stds = list(std) if isinstance(std, Sequence) else [std] * len(mean)
        scale = [1 / s for s in stds]
        offset = [-m / s for m, s in zip(mean, stds, strict=True)]
        return keras.layers.Rescaling(scale, offset, dtype=_wide_dtype(), name=name)
    if isinstance(std, Sequence):
        return make_rescaling([mean] * len(std), std, name=name)
    return keras.layers.Rescaling(1 / std, -mean / std, dtype=_wide_dtype(), name=name)


def check_norm(norm: str, *, model: str) -> None:
    """Checks that `norm` is one of `tfdist.models.layers.NORMS`.

    Raises:
      ValueError: it is not.
    """
    if norm not in NORMS:
        raise ValueError(f"Cannot build {model}: unknown norm {norm!r}. Valid: {', '.join(NORMS)}.")


def _he_normal(seed, name):
    return keras.initializers.HeNormal(seed=layer_seed(seed, name))


def _wide_dtype():
    """What images and logits are in: half precision would lose some of their digits."""
    return "float64" if keras.config.dtype_policy().compute_dtype == "float64" else "float32"
