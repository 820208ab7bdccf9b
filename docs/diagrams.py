"""Draws how data, gradients and weights flow under each strategy, as docs/images/NAME.svg.

The boxes have a color of their own, so that the pictures can be read on white and on black.
"""

import html
import itertools
import pathlib
from dataclasses import dataclass

_DATA, _GRADIENTS, _WEIGHTS, _CONTROL = "#3388cc", "#d55e00", "#009e73", "#8a8a8a"
_LEGEND = {_DATA: "data", _GRADIENTS: "gradients", _WEIGHTS: "weights", _CONTROL: "step numbers"}
_WIDTH, _BOX_HEIGHT, _GAP = 720, 62, 22
_COLUMNS = {"left": (10, 150), "middle": (260, 190), "right": (560, 150)}  # x and width


@dataclass(frozen=True)
class Flow:
    """One picture: data come from the left, are computed on in the middle, meet on the right.

    Attributes:
      left, middle, right: the boxes' texts; a bar starts a new line. A box that is alone in its
        column is as high as the picture.
      parts: what each box of the middle reads, one text each.
      to_right, to_middle: (what flows, its color) in each direction; None for nothing.
      between: (what flows, its color) between the boxes of the middle; None for nothing.
      chief: the text of a box above, which gives out steps; empty for none.
    """

    left: tuple[str, ...]
    middle: tuple[str, ...]
    right: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    to_right: tuple[str, str] | None = None
    to_middle: tuple[str, str] | None = None
    between: tuple[str, str] | None = None
    chief: str = ""


FLOWS = {
    "one_device": Flow(
        left=("global batch k",),
        middle=("device|weights, step, update",),
        parts=("all rows",),
    ),
    "mirrored": Flow(
        left=("global batch k",),
        middle=("GPU:0|weights, own update", "GPU:1|weights, own update"),
        right=("all-reduce|every step",),
        parts=("rows 0 to 7", "rows 8 to 15"),
        to_right=("own part", _GRADIENTS),
        to_middle=("sum", _GRADIENTS),
    ),
    "central_storage": Flow(
        left=("global batch k",),
        middle=("GPU:0|computes", "GPU:1|computes"),
        right=("CPU:0|the only weights,|one update",),
        parts=("rows 0 to 7", "rows 8 to 15"),
        to_right=("own part", _GRADIENTS),
        to_middle=("read", _WEIGHTS),
    ),
    "multi_worker_mirrored": Flow(
        left=("data set|on machine a", "data set|on machine b"),
        middle=("worker 0|weights, own update", "worker 1|weights, own update"),
        right=("all-reduce|over the network,|every step",),
        parts=("its rows of k", "its rows of k"),
        to_right=("own part", _GRADIENTS),
        to_middle=("sum", _GRADIENTS),
    ),
    "local_sgd": Flow(
        left=("data set|on machine a", "data set|on machine b"),
        middle=("worker 0|N steps of its own", "worker 1|N steps of its own"),
        right=("mean|over the network,|every N steps",),
        parts=("its rows of k", "its rows of k"),
        to_right=("own weights", _WEIGHTS),
        to_middle=("mean", _WEIGHTS),
    ),
    "parameter_server": Flow(
        left=("data set|on machine a", "data set|on machine b"),
        middle=("worker 0|a whole batch", "worker 1|a whole batch"),
        right=("parameter servers|each holds a part|of the weights",),
        parts=("batch k", "batch k + 1"),
        to_right=("of its step", _GRADIENTS),
        to_middle=("read", _WEIGHTS),
        chief="chief: gives out k, k + 1, ...; has them applied in this order",
    ),
    "layers": Flow(
        left=("global batch k|as micro-batches",),
        middle=("GPU:0|first half of the layers,|their weights and update",),
        right=("GPU:1|second half,|weights and update",),
        parts=("one after another",),
        to_right=("activations", _DATA),
        to_middle=("of activations", _GRADIENTS),
    ),
    "shards": Flow(
        left=("global batch k",),
        middle=(
            "GPU:0|filters 0 to 31,|their weights and update",
            "GPU:1|filters 32 to 63,|their weights and update",
        ),
        right=("GPU:0|joins the outputs,|computes all else",),
        parts=("all rows", "all rows"),
        to_right=("own outputs", _DATA),
        to_middle=("of outputs", _GRADIENTS),
    ),
    "strips": Flow(
        left=("global batch k|every image",),
        middle=("GPU:0|its rows of every layer", "GPU:1|its rows of every layer"),
        right=("GPU:0|weights, update",),
        parts=("upper half", "lower half"),
        to_right=("own part", _GRADIENTS),
        to_middle=("copy", _WEIGHTS),
        between=("rows at the edge", _DATA),
    ),
    "tpu": Flow(
        left=("host|global batch k",),
        middle=("core 0|weights, own update", "core 1|weights, own update"),
        right=("all-reduce|over the TPU's|own links",),
        parts=("its rows", "its rows"),
        to_right=("own part", _GRADIENTS),
        to_middle=("sum", _GRADIENTS),
    ),
}


def write_diagrams(directory: pathlib.Path) -> None:
    """Writes one SVG a flow; a file that would not change is left alone."""
    for name, flow in FLOWS.items():
        path, svg = directory / f"{name}.svg", draw_flow(flow)
        if not path.exists() or path.read_text() != svg:
            path.write_text(svg)


def draw_flow(flow: Flow) -> str:
    """Returns a flow as SVG."""
    top = 8 + (_BOX_HEIGHT if flow.chief else 0)
    height = len(flow.middle) * (_BOX_HEIGHT + _GAP) - _GAP
    centers = [
        top + _BOX_HEIGHT / 2 + row * (_BOX_HEIGHT + _GAP) for row in range(len(flow.middle))
    ]
    parts, used = [], {_DATA}
    for y, below in itertools.pairwise(centers if flow.between else []):
        text, color = flow.between
        high, low = y + _BOX_HEIGHT / 2, below - _BOX_HEIGHT / 2
        parts += [_arrow(270, high, 270, low, "", color), _arrow(290, low, 290, high, "", color)]
        parts.append(_text(302, (high + low) / 2 + 4, text, color, "start"))
    for y, part in zip(centers, flow.parts, strict=True):
        parts.append(_arrow(160, y, 260, y, part, _DATA))
        if flow.to_right and flow.to_middle:
            parts.append(_arrow(450, y - 9, 560, y - 9, *flow.to_right))
            parts.append(_arrow(560, y + 9, 450, y + 9, *flow.to_middle, below=True))
            used |= {flow.to_right[1], flow.to_middle[1]}
    if flow.chief:
        parts.append(_box(260, 24, 450, 36, flow.chief))
        parts += [_arrow(x, 42, x, top, "", _CONTROL) for x in (355, 635)]
        used.add(_CONTROL)
    for column, (x, width) in _COLUMNS.items():
        texts = getattr(flow, column)
        if len(texts) == 1:  # as high as all of the middle
            parts.append(_box(x, top + height / 2, width, height, texts[0]))
        else:
            for text, y in zip(texts, centers, strict=bool(texts)):
                parts.append(_box(x, y, width, _BOX_HEIGHT, text))
    y = top + height + 28
    for index, color in enumerate(color for color in _LEGEND if color in used):
        x = 260 + 110 * index
        parts.append(f'<path d="M{x} {y}h22" stroke="{color}" stroke-width="3"/>')
        parts.append(_text(x + 28, y + 4, _LEGEND[color], "#8a8a8a", "start"))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {y + 16}" '
        f'font-family="sans-serif" font-size="13">{"".join(parts)}</svg>\n'
    )


def _box(x: float, y: float, width: float, height: float, text: str) -> str:
    lines = text.split("|")
    written = "".join(
        _text(x + width / 2, y + 5 + 17 * (index - (len(lines) - 1) / 2), line, "#1a1a1a", "middle")
        for index, line in enumerate(lines)
    )
    return (
        f'<rect x="{x}" y="{y - height / 2}" width="{width}" height="{height}" rx="6" '
        f'fill="#e8eef4" stroke="#8a8a8a"/>{written}'
    )


def _arrow(
    x0: float, y0: float, x1: float, y1: float, text: str, color: str, *, below: bool = False
) -> str:
    length = ((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5
    along = ((x1 - x0) / length, (y1 - y0) / length)
    back = (x1 - 9 * along[0], y1 - 9 * along[1])
    side = (-5 * along[1], 5 * along[0])
    head = f"{x1},{y1} {back[0] + side[0]:.1f},{back[1] + side[1]:.1f} "
    head += f"{back[0] - side[0]:.1f},{back[1] - side[1]:.1f}"
    middle = ((x0 + x1) / 2, (y0 + y1) / 2 + (17 if below else -7))
    return (
        f'<path d="M{x0} {y0}L{back[0]:.1f} {back[1]:.1f}" stroke="{color}" stroke-width="2"/>'
        f'<polygon points="{head}" fill="{color}"/>'
        + (_text(*middle, text, color, "middle") if text else "")
    )


def _text(x: float, y: float, text: str, color: str, anchor: str) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{color}">'
        f"{html.escape(text)}</text>"
    )
