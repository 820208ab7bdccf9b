"""Draws curves as SVG, readable on any background and without a plotting library."""

import html
import math
from collections.abc import Mapping, Sequence

_WIDTH, _HEIGHT = 560, 300  # the picture, in pixels
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 150, 30, 40  # the margins of the frame, in pixels
# Those of Okabe and Ito's colors that are visible on white and black (jfly.uni-koeln.de/color).
_COLORS = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9")
_TICKS = 4


def make_curves(
    curves: Mapping[str, Sequence[float]], *, title: str = "", x_label: str = "epoch"
) -> str:
    """Returns an SVG with one line per name; text and axes have the color of the page's text.

    Args:
      curves: name -> values; the first value is drawn at 1 on the horizontal axis. Values
        that are not finite are left out.
      title: the title above the picture.
      x_label: what the horizontal axis counts.

    Raises:
      ValueError: no curve has a finite value.

    Source: Okabe and Ito, Color Universal Design (2008), for the colors.
    """
    points = {
        name: [(x, y) for x, y in enumerate(map(float, values), 1) if math.isfinite(y)]
        for name, values in curves.items()
    }
    everything = [point for line in points.values() for point in line]
    if not everything:
        raise ValueError("Cannot draw curves: none has a finite value.")
    x_max = max(x for x, _ in everything)
    low, high = (choose(y for _, y in everything) for choose in (min, max))
    height = (high - low) or abs(high) or 1.0

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - 1) / max(x_max - 1, 1)
        up = (y - low) / height
        return (
            _LEFT + across * (_WIDTH - _LEFT - _RIGHT),
            _HEIGHT - _BOTTOM - up * (_HEIGHT - _TOP - _BOTTOM),
        )

    parts = [_write(title, _LEFT, 18), _write(x_label, (_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 6)]
    parts += [_write(f"{x}", place(x, low)[0], _HEIGHT - 24) for x in sorted({1, x_max})]
    for tick in range(_TICKS + 1):
        value = low + height * tick / _TICKS
        y = place(1, value)[1]
        parts.append(_write(f"{value:.3g}", _LEFT - 8, y + 4, anchor="end"))
        parts.append(
            f'<path d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}" stroke="currentColor" opacity="0.2"/>'
        )
    for index, (name, line) in enumerate(points.items()):
        color = _COLORS[index % len(_COLORS)]
        placed = " ".join("{:.1f},{:.1f}".format(*place(*point)) for point in line)
        parts.append(f'<polyline points="{placed}" fill="none" stroke="{color}" stroke-width="2"/>')
        if len(line) == 1:
            x, y = place(*line[0])
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>')
        y = _TOP + 10 + 20 * index
        parts.append(
            f'<path d="M{_WIDTH - _RIGHT + 12} {y}h18" stroke="{color}" stroke-width="3"/>'
        )
        parts.append(_write(name, _WIDTH - _RIGHT + 36, y + 4))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'width="{_WIDTH}" height="{_HEIGHT}" font-family="sans-serif" font-size="12">'
        f"{''.join(parts)}</svg>"
    )


def stack_curves(pictures: Sequence[str]) -> str:
    """Returns one SVG that stacks pictures of `make_curves` vertically."""
    parts = [
        f'<g transform="translate(0 {index * _HEIGHT})">{picture}</g>'
        for index, picture in enumerate(pictures)
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" '
        f'height="{len(pictures) * _HEIGHT}">{"".join(parts)}</svg>'
    )


def _write(text: str, x: float, y: float, *, anchor: str = "start") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="currentColor">'
        f"{html.escape(text)}</text>"
    )
