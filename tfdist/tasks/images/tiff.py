"""Reads TIFF files with `tifffile`, which is imported when the first one is read."""

import contextlib
import importlib.util
import io
from dataclasses import dataclass
from typing import Any

import numpy as np

from tfdist.errors import TfdistError

EXTENSIONS = (".tif", ".tiff")

_ROWS, _COLUMNS = "Y", "X"
_CHANNELS = "SCQ"  # samples of a pixel, channels of a microscope, and pages of no known meaning
_ALPHA = (1, 2)  # of the tag ExtraSamples: with color multiplied by it, or not


class TiffFormatError(ValueError):
    """Raised for a file that is not a readable TIFF image; the message says why."""


@dataclass(frozen=True)
class TiffImage:
    """An opened TIFF file.

    Attributes:
      values: [height, width, channels] as stored, mapped from the file where that is possible.
      is_lossy: whether the compression changes values.
      palette: [3, colors] if the values are indices of colors, or None.
    """

    values: np.ndarray
    has_alpha: bool = False
    is_lossy: bool = False
    palette: np.ndarray | None = None
    is_inverted: bool = False

    def to_pixels(self, values: np.ndarray) -> np.ndarray:
        """Returns the pixels that some of the values stand for, without alpha."""
        if self.palette is not None:
            return (np.moveaxis(self.palette, 0, -1)[values[..., 0]] >> 8).astype(np.uint8)
        if values.dtype == bool:
            values = values.astype(np.uint8) * np.uint8(255)
        if self.is_inverted and np.issubdtype(values.dtype, np.integer):
            values = np.iinfo(values.dtype).max - values
        return values[..., :-1] if self.has_alpha else values


def is_tiff(path: str) -> bool:
    """Returns whether a file's name says that it is a TIFF file.

    >>> is_tiff("a/B.TIF"), is_tiff("tif.png")
    (True, False)
    """
    return path.lower().endswith(EXTENSIONS)


def check_installed(path: str) -> None:
    """Checks that the package that reads TIFF files is there."""
    if importlib.util.find_spec("tifffile") is None:
        raise TfdistError(
            f"Cannot read {path!r}: the package tifffile is missing. Run "
            "pip install 'tfdist[tiff]'."
        )


def open_tiff(source: str | bytes) -> TiffImage:
    """Opens the first image of a TIFF file.

    Args:
      source: the path of a local file, of which only what is used is read if it is neither
        compressed nor tiled; or the bytes of a file.

    Raises:
      TiffFormatError: it is damaged, or more than rows, columns and channels.
    """
    import tifffile

    try:
        with tifffile.TiffFile(source if isinstance(source, str) else io.BytesIO(source)) as file:
            page: Any = file.pages[0]
            series = file.series[0]
            axes, shape = _check_axes(series)
            return TiffImage(
                _arrange(_read(file, source), axes, shape),
                has_alpha=_has_alpha(page, axes),
                is_lossy="JPEG" in page.compression.name or "WEBP" in page.compression.name,
                palette=page.colormap if page.photometric.name == "PALETTE" else None,
                is_inverted=page.photometric.name == "MINISWHITE",
            )
    except TiffFormatError:
        raise
    except Exception as error:  # whatever a damaged file causes
        text = " ".join(str(error).split())
        if "imagecodecs" in text:
            text = "its compression needs imagecodecs: run pip install 'tfdist[tiff]'"
        raise TiffFormatError(text or type(error).__name__) from error


def _read(file: Any, source: str | bytes) -> np.ndarray:
    import tifffile

    if isinstance(source, str):
        with contextlib.suppress(ValueError):  # compressed, tiled or of less than a byte
            return tifffile.memmap(source, mode="r")
    return file.asarray(series=0)


def _check_axes(series: Any) -> tuple[str, list[int]]:
    """Returns the axes of an image and their lengths, without those of length 1."""
    lengths = {
        axis: length
        for axis, length in zip(series.axes, series.shape, strict=True)
        if length > 1 or axis in (_ROWS, _COLUMNS)
    }
    others = lengths.keys() - {_ROWS, _COLUMNS}
    if len(lengths) - len(others) < 2 or len(others) > 1 or not others <= set(_CHANNELS):
        raise TiffFormatError(
            f"its axes are {series.axes} of {'x'.join(map(str, series.shape))}; an image has rows, "
            "columns and channels: write each slice or time to a file of its own"
        )
    return "".join(lengths), list(lengths.values())


def _arrange(values: np.ndarray, axes: str, shape: list[int]) -> np.ndarray:
    """Returns the values as [rows, columns, channels]."""
    values = values.reshape(shape)
    if len(axes) == 2:
        values, axes = values[..., None], f"{axes}S"
    (last,) = set(axes) - {_ROWS, _COLUMNS}
    return values.transpose([axes.index(axis) for axis in (_ROWS, _COLUMNS, last)])


def _has_alpha(page: Any, axes: str) -> bool:
    extra = tuple(map(int, page.extrasamples or ()))
    return bool(extra) and extra[-1] in _ALPHA and "S" in axes
