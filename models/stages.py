"""Named stages: a model as a sequence of parts, each of which can be built in a scope of its own.

A layer belongs to the stage whose name, followed by "_", starts the layer's name, as in
`encoder_0_conv_1`.
"""

import contextlib
import hashlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import keras

StageScope = Callable[[str], AbstractContextManager]
"""Returns, for a stage's name, the context to build the stage in, such as a `tf.device`."""


def any_device(stage: str) -> AbstractContextManager:
    """Returns a context that changes nothing: the default `StageScope`."""
    del stage
    return contextlib.nullcontext()


def stage_names(depth: int) -> tuple[str, ...]:
    """Returns the names of a U-Net's stages, in the order in which they run.

    >>> stage_names(2)
    ('encoder_0', 'encoder_1', 'bottleneck', 'decoder_1', 'decoder_0', 'head')
    """
    encoders = [f"encoder_{level}" for level in range(depth)]
    decoders = [f"decoder_{level}" for level in reversed(range(depth))]
    return (*encoders, "bottleneck", *decoders, "head")


def freeze_encoder(model: keras.Model) -> None:
    """Makes the layers of a model's encoder untrainable: weights and statistics stay the same."""
    layers = [layer for layer in model.layers if layer.name.startswith("encoder_")]
    if not layers:
        raise ValueError(
            f"Cannot freeze the encoder of {model.name!r}: no layer has a name that starts with "
            "encoder_. Set layer.trainable where the model is built."
        )
    for layer in layers:
        layer.trainable = False


def layer_seed(seed: int, name: str) -> int:
    """Returns the seed of a layer's weights, a pure function of the model's seed and the name.

    >>> layer_seed(0, "encoder_0_conv_1") == layer_seed(0, "encoder_0_conv_1")
    True
    """
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:4], "big") >> 1


def check_image_size(
    image_size: Sequence[int | None], *, depth: int, model: str
) -> tuple[int | None, int | None]:
    """Returns height and width, after checking that they can be halved `depth` times.

    Raises:
      ValueError: there are not two, or one is not positive or not divisible by 2**depth.

    >>> check_image_size((100, 128), depth=4, model="unet")
    Traceback (most recent call last):
      ...
    ValueError: Cannot build unet: image size 100x128 cannot be halved 4 times. \
Use a multiple of 16: 96x128 or 112x128.
    """
    size = tuple(image_size)
    if len(size) != 2 or any(side is not None and side < 1 for side in size):
        raise ValueError(
            f"Cannot build {model}: image size is {image_size}. Give height and width, positive "
            "or None."
        )
    step = 2**depth
    if any(side is not None and side % step for side in size):
        below = [side and max(side // step, 1) * step for side in size]
        above = [side and -(-side // step) * step for side in size]
        nearest = dict.fromkeys("x".join(map(str, near)) for near in (below, above))
        raise ValueError(
            f"Cannot build {model}: image size {size[0]}x{size[1]} cannot be halved {depth} times. "
            f"Use a multiple of {step}: {' or '.join(nearest)}."
        )
    return size


def check_positive(model: str, **arguments: int) -> None:
    """Checks that each argument is at least 1."""
    for name, value in arguments.items():
        if value < 1:
            raise ValueError(f"Cannot build {model}: {name} is {value}. Give at least 1.")
