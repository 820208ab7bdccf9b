"""Writes the names of classes and columns on pictures."""

from collections.abc import Mapping, Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont

_LINE, _MARGIN, _GAP = 18, 4, 12  # pixels
_FONT_SIZE = 12
_PAPER, _INK = (255, 255, 255), (0, 0, 0)


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
      headings: one text per column.
    """
    paper = Image.new("RGB", (picture.shape[1], _LINE), _PAPER)
    draw = ImageDraw.Draw(paper)
    font = ImageFont.load_default(_FONT_SIZE)
    for index, text in enumerate(headings):
        middle = (picture.shape[1] * (index + 0.5) / len(headings), _LINE / 2)
        draw.text(middle, text, _INK, font=font, anchor="mm")
    return np.concatenate([np.asarray(paper), picture])
