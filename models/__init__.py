"""Keras models that work with any `tf.distribute` strategy.

Importing this package does not import TensorFlow; making a model does.
"""

import difflib
import importlib
from typing import Any

__all__ = ["MODELS", "make_model"]

MODELS = {
    "efficientnet_v2_b0_unet": "tfdist.models.backbones:efficientnet_v2_b0_unet",
    "mobilenet_v2_unet": "tfdist.models.backbones:mobilenet_v2_unet",
    "pix2pix_unet": "tfdist.models.pix2pix:pix2pix_unet",
    "resnet50_unet": "tfdist.models.backbones:resnet50_unet",
    "unet": "tfdist.models.unet:unet",
}
"""Name -> "module:function" of the function that builds the model."""


def make_model(
    name: str,
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
) -> Any:
    """Returns a new segmentation model, whose initial weights are a pure function of `seed`.

    Args:
      name: one of `MODELS`.
      image_size: height and width; both None for any size that the model accepts.
      num_classes: the number of logits per pixel.
      channels: the number of channels of an image.
      base_filters: the filters of the first level; each level below has twice as many.
      depth: how many times the image is halved.
      norm: one of `tfdist.models.layers.NORMS`.
      dropout: the fraction of the features between encoder and decoder to drop in training.
      pretrained: whether the encoder starts from ImageNet weights.

    Returns:
      A `keras.Model` that maps float [batch, height, width, channels], in [0, 255], to logits:
      float32 (float64 under that policy) [batch, height, width, num_classes].

    Raises:
      ValueError: the name is unknown, or the model does not accept an argument.

    >>> make_model("unett", image_size=(32, 32), num_classes=2)
    Traceback (most recent call last):
      ...
    ValueError: Unknown model 'unett'. Valid: unet, pix2pix_unet, resnet50_unet, \
mobilenet_v2_unet, efficientnet_v2_b0_unet.
    """
    if name not in MODELS:
        close = difflib.get_close_matches(name, MODELS, n=len(MODELS), cutoff=0.0)
        raise ValueError(f"Unknown model {name!r}. Valid: {', '.join(close)}.")
    module_name, _, function = MODELS[name].partition(":")
    return getattr(importlib.import_module(module_name), function)(
        image_size=image_size,
        num_classes=num_classes,
        channels=channels,
        base_filters=base_filters,
        depth=depth,
        norm=norm,
        dropout=dropout,
        pretrained=pretrained,
        seed=seed,
    )
