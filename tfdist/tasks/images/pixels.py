"""The values of a data set's images, and how they become numbers from 0 to 255."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from tfdist.errors import TfdistError

_WIDTH = 255.0


class PixelError(ValueError):
    """Raised for an image that differs from the others; the message says how."""


@dataclass(frozen=True)
class PixelFormat:
    """What the images of a data set have in common.

    Attributes:
      channels: the number of channels; 3 for gray images too.
      value_range: the stored values that become 0 and 255.
      is_given: whether the user has given the range, which is then that of all types.
    """

    dtype: str = "uint8"
    channels: int = 3
    value_range: tuple[float, float] = (0.0, _WIDTH)
    is_given: bool = False

    @property
    def is_kept(self) -> bool:
        """Whether the values are kept as they are stored: uint8, 0 to 255."""
        return self.dtype == "uint8" and not self.is_given

    @property
    def is_plain(self) -> bool:
        """Whether the images are those of a camera: red, green and blue, in 8 bits."""
        return self.is_kept and self.channels == 3

    def convert(self, values: np.ndarray) -> np.ndarray:
        """Returns an image for the model.

        Args:
          values: [height, width, channels] as stored, without an alpha channel.

        Returns:
          uint8 [height, width, channels] if the values are kept, else float32, in [0, 255].

        Raises:
          PixelError: it has other channels or another type than the data set.
        """
        channels = values.shape[-1]
        if channels == 1 and self.channels == 3:
            values = np.repeat(values, 3, axis=-1)
        elif channels != self.channels:
            raise PixelError(f"it has {channels} channels, not {self.channels} as the data set")
        if values.dtype.name != self.dtype and not self.is_given:
            raise PixelError(
                f"its values are {values.dtype.name}, not {self.dtype} as in the data set; "
                "convert it, or train with the range of all, as in `value_range=0,4095`"
            )
        if self.is_kept:
            return np.ascontiguousarray(values)
        low, high = self.value_range
        scaled = (values.astype(np.float32) - np.float32(low)) * np.float32(_WIDTH / (high - low))
        # Satellites have no value where they saw nothing.
        return np.clip(np.nan_to_num(scaled, nan=0.0), 0.0, _WIDTH)

    def to_json(self) -> dict[str, Any]:
        """Returns the format, ready for JSON."""
        return dataclasses.asdict(self) | {"value_range": list(self.value_range)}

    @classmethod
    def from_info(cls, info: Mapping[str, Any]) -> Self:
        """Returns the format that a data set's `info` holds; that of a camera by default."""
        found = info.get("pixels")
        if not isinstance(found, Mapping):
            return cls()
        low, high = found["value_range"]
        return cls(found["dtype"], found["channels"], (low, high), found["is_given"])


PLAIN = PixelFormat()


def make_format(dtype: str, channels: int, value_range: Sequence[float] = ()) -> PixelFormat:
    """Returns the format of images of which one is known.

    Args:
      channels: its channels; one channel is shown to the model as three.
      value_range: the range of the values; by default that of the type, if it is an integer.

    Raises:
      PixelError: the type has no range, and none is given.
    """
    check_value_range(value_range)
    channels = 3 if channels == 1 else channels
    if value_range:
        return PixelFormat(dtype, channels, (value_range[0], value_range[1]), is_given=True)
    if not np.issubdtype(np.dtype(dtype), np.integer):
        raise PixelError(
            f"its values are {dtype}, whose range a file does not say: give it, as in "
            "`value_range=0,1`"
        )
    limits = np.iinfo(dtype)
    return PixelFormat(dtype, channels, (float(limits.min), float(limits.max)))


def check_value_range(value_range: Sequence[float]) -> None:
    """Checks that a value range is empty, or two numbers that increase."""
    if value_range and (len(value_range) != 2 or not value_range[0] < value_range[1]):
        text = ",".join(f"{value:g}" for value in value_range)
        raise TfdistError(
            f"`value_range={text}` is not the lowest and the highest value. Write two numbers, as "
            "in `value_range=0,4095`."
        )


def to_colors(image: np.ndarray) -> np.ndarray:
    """Returns what a picture shows of an image: three channels, uint8, in [0, 255].

    Of more than three channels the first three are shown, of fewer the first.
    """
    chosen = image[..., :3] if image.shape[-1] >= 3 else image[..., :1]
    shown = np.broadcast_to(chosen, (*image.shape[:-1], 3))
    return shown if shown.dtype == np.uint8 else np.clip(shown, 0, _WIDTH).astype(np.uint8)
