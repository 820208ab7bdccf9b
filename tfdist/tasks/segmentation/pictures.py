"""Pictures of segmentations: overlays, and image, truth and prediction side by side."""

import colorsys
from collections.abc import Mapping, Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from tfdist.tasks.images.pixels import to_colors

_VOID = (0, 0, 0)
_MIN_HEIGHT = 128  # Smaller pictures are enlarged.
_GOLDEN_RATIO = 0.61803398875
_LIGHTNESS = (0.35, 0.55, 0.72)
_LINE, _MARGIN, _GAP = 18, 4, 12  # pixels
_FONT_SIZE = 12
_PAPER, _INK = (255, 255, 255), (0, 0, 0)


def make_palette(num_classes: int) -> np.ndarray:
    """Returns one color per class, uint8 [num_classes, 3], spread over hue and lightness."""
    colors = [
        colorsys.hls_to_rgb(index * _GOLDEN_RATIO % 1, _LIGHTNESS[index % 3], 0.75)
        for index in range(num_classes)
    ]
    return np.round(255 * np.array(colors)).astype(np.uint8)


def color_mask(mask: np.ndarray, palette: np.ndarray) -> np.ndarray:
    """Returns the colors, uint8 [..., 3], of int labels [...]; labels without one are black."""
    table = np.concatenate([palette, np.array([_VOID], np.uint8)])
    inside = (mask >= 0) & (mask < len(palette))
    return table[np.where(inside, mask, len(palette))]


def make_overlay(
    image: np.ndarray,
    mask: np.ndarray,
    palette: np.ndarray,
    *,
    class_names: Sequence[str] | None = None,
) -> bytes:
    """Returns a PNG of the image, blended half and half with the colors of its classes.

    Args:
      image: [height, width, channels], in [0, 255].
      mask: uint8 [height, width].
      palette: uint8 [classes, 3].
      class_names: one name per class, for a legend of the mask's classes; None for no legend.
    """
    sums = to_colors(image).astype(np.uint16) + color_mask(mask, palette)
    mixed = ((sums + 1) // 2).astype(np.uint8)
    if class_names is not None:
        mixed = _add_legend(mixed, mask, palette, class_names)
    import tensorflow as tf  # not above: a report needs the palette only

    return tf.io.encode_png(mixed).numpy()


def make_comparison(
    images: np.ndarray, truths: np.ndarray, predictions: np.ndarray, *, class_names: Sequence[str]
) -> np.ndarray:
    """Returns a picture with one row per example: image, truth and prediction side by side.

    It has headings, and a legend of the classes that occur.

    Args:
      images: [examples, height, width, channels], in [0, 255].
      truths, predictions: int labels [examples, height, width]; where the truth has no color
        (the ignore label), the prediction is not shown either.

    Returns:
      uint8 [height, width, 3].
    """
    num_classes = len(class_names)
    palette = make_palette(num_classes)
    enlarge = max(1, _MIN_HEIGHT // images.shape[1])
    unknown = (truths < 0) | (truths >= num_classes)
    predictions = np.where(unknown, num_classes, predictions)
    rows = []
    for image, truth, prediction in zip(images, truths, predictions, strict=True):
        image = to_colors(image)
        panels = [
            np.kron(panel, np.ones((enlarge, enlarge, 1), np.uint8))
            for panel in (image, color_mask(truth, palette), color_mask(prediction, palette))
        ]
        rows.append(
            np.concatenate(
                [np.pad(p, ((2, 2), (2, 2), (0, 0)), constant_values=255) for p in panels], axis=1
            )
        )
    picture = add_headings(np.concatenate(rows), ("image", "truth", "prediction"))
    shown = np.concatenate([truths.ravel(), predictions.ravel()])
    return _add_legend(picture, shown, palette, class_names)


def _add_legend(
    picture: np.ndarray, labels: np.ndarray, palette: np.ndarray, class_names: Sequence[str]
) -> np.ndarray:
    found = [label for label in np.unique(labels) if 0 <= label < len(class_names)]
    return add_legend(picture, {class_names[label]: palette[label] for label in found})


def add_legend(picture: np.ndarray, colors: Mapping[str, Sequence[int]]) -> np.ndarray:
    """Returns a picture with the names of colors below it, in as many lines as they need.

    A picture that is narrower than the longest name is widened.

    Args:
      picture: uint8 [height, width, 3].
      colors: name -> color, of 3 numbers in [0, 255].
    """
    font = ImageFont.load_default(_FONT_SIZE)
    side = _LINE - 2 * _MARGIN
    widths = [3 * _MARGIN + side + int(font.getlength(name)) for name in colors]
    width = max(picture.shape[1], *widths, 1)
    x, y = 0, 0
    places = []
    for needed in widths:
        if x and x + needed > width:
            x, y = 0, y + _LINE
        places.append((x, y))
        x += needed + _GAP
    paper = Image.new("RGB", (width, y + _LINE), _PAPER)
    draw = ImageDraw.Draw(paper)
    for (x, y), (name, color) in zip(places, colors.items(), strict=True):
        corner = (x + _MARGIN, y + _MARGIN)
        draw.rectangle((corner, (corner[0] + side, corner[1] + side)), tuple(map(int, color)))
        middle = (x + 2 * _MARGIN + side + 1, y + _LINE / 2)
        draw.text(middle, name, _INK, font=font, anchor="lm")
    widened = np.pad(
        picture, ((0, 0), (0, width - picture.shape[1]), (0, 0)), constant_values=_PAPER[0]
    )
    return np.concatenate([widened, np.asarray(paper)])


def add_headings(picture: np.ndarray, headings: Sequence[str]) -> np.ndarray:
    """Returns a picture of equally wide columns with a heading above each of them.

    Args:
      picture: uint8 [height, width, 3].
    """
    paper = Image.new("RGB", (picture.shape[1], _LINE), _PAPER)
    draw = ImageDraw.Draw(paper)
    font = ImageFont.load_default(_FONT_SIZE)
    for index, text in enumerate(headings):
        middle = (picture.shape[1] * (index + 0.5) / len(headings), _LINE / 2)
        draw.text(middle, text, _INK, font=font, anchor="mm")
    return np.concatenate([np.asarray(paper), picture])
