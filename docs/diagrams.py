"""Draws how data, gradients and weights flow under each strategy, as docs/images/NAME.svg.

The boxes have a color of their own, so that the pictures can be read on white and on black.
"""

import itertools
import pathlib
from dataclasses import dataclass

import pygraphviz

_DATA, _GRADIENTS, _WEIGHTS, _CONTROL = "#3388cc", "#d55e00", "#009e73", "#8a8a8a"
_LEGEND = {_DATA: "data", _GRADIENTS: "gradients", _WEIGHTS: "weights", _CONTROL: "step numbers"}
_GRAPH = {"rankdir": "LR", "splines": "ortho", "bgcolor": "transparent", "ranksep": 0.05}
_FONT = {"fontname": "sans-serif", "fontsize": 10}
_BOX = {"shape": "box", "style": "filled,rounded", "fillcolor": "#e8eef4", "color": "#8a8a8a"}
_TEXT = {"shape": "none", "style": "", "width": 1.3}
# In inches. No size depends on a text, so it does not matter which fonts a machine has.
_WIDTHS, _HEIGHT, _TEXT_HEIGHT = {"left": 1.55, "middle": 1.95, "right": 1.55}, 0.65, 0.3


@dataclass(frozen=True)
class Flow:
    """One picture: data come from the left, are computed on in the middle, meet on the right.

    Attributes:
      left, middle, right: the texts of one or two boxes. A box that is alone in its column is as
        high as the picture.
      parts: what each box of the middle reads, one text each.
      to_right, to_middle: (what flows, its color) in each direction.
      between: (what flows, its color) between the boxes of the middle; in the color of control, the
        text of a box that steers those of the middle and the right.
    """

    left: tuple[str, ...]
    middle: tuple[str, ...]
    right: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    to_right: tuple[str, str] = ("", "")
    to_middle: tuple[str, str] = ("", "")
    between: tuple[str, str] = ("", "")


FLOWS = {
    "one_device": Flow(
        left=("global batch k",),
        middle=("device\nweights, step, update",),
        parts=("all rows",),
    ),
    "mirrored": Flow(
        left=("global batch k",),
        middle=("GPU:0\nweights, own update", "GPU:1\nweights, own update"),
        right=("all-reduce\nevery step",),
        parts=("rows 0 to 7", "rows 8 to 15"),
        to_right=("own part", _GRADIENTS),
        to_middle=("sum", _GRADIENTS),
    ),
    "central_storage": Flow(
        left=("global batch k",),
        middle=("GPU:0\ncomputes", "GPU:1\ncomputes"),
        right=("CPU:0\nthe only weights,\none update",),
        parts=("rows 0 to 7", "rows 8 to 15"),
        to_right=("own part", _GRADIENTS),
        to_middle=("read", _WEIGHTS),
    ),
    "multi_worker_mirrored": Flow(
        left=("data set\non machine a", "data set\non machine b"),
        middle=("worker 0\nweights, own update", "worker 1\nweights, own update"),
        right=("all-reduce\nover the network,\nevery step",),
        parts=("its rows of k", "its rows of k"),
        to_right=("own part", _GRADIENTS),
        to_middle=("sum", _GRADIENTS),
    ),
    "local_sgd": Flow(
        left=("data set\non machine a", "data set\non machine b"),
        middle=("worker 0\nN steps of its own", "worker 1\nN steps of its own"),
        right=("mean\nover the network,\nevery N steps",),
        parts=("its rows of k", "its rows of k"),
        to_right=("own weights", _WEIGHTS),
        to_middle=("mean", _WEIGHTS),
    ),
    "parameter_server": Flow(
        left=("data set\non machine a", "data set\non machine b"),
        middle=("worker 0\na whole batch", "worker 1\na whole batch"),
        right=("parameter servers\neach holds a part\nof the weights",),
        parts=("batch k", "batch k + 1"),
        to_right=("of its step", _GRADIENTS),
        to_middle=("read", _WEIGHTS),
        between=("chief\ngives out k, k + 1, ...,\nhas them applied in order", _CONTROL),
    ),
    "layers": Flow(
        left=("global batch k\nas micro-batches",),
        middle=("GPU:0\nfirst half of the layers,\ntheir weights and update",),
        right=("GPU:1\nsecond half,\nweights and update",),
        parts=("one after another",),
        to_right=("activations", _DATA),
        to_middle=("of activations", _GRADIENTS),
    ),
    "shards": Flow(
        left=("global batch k",),
        middle=(
            "GPU:0\nfilters 0 to 31,\ntheir weights and update",
            "GPU:1\nfilters 32 to 63,\ntheir weights and update",
        ),
        right=("GPU:0\njoins the outputs,\ncomputes all else",),
        parts=("all rows", "all rows"),
        to_right=("own outputs", _DATA),
        to_middle=("of outputs", _GRADIENTS),
    ),
    "strips": Flow(
        left=("global batch k\nevery image",),
        middle=("GPU:0\nits rows of every layer", "GPU:1\nits rows of every layer"),
        right=("GPU:0\nweights, update",),
        parts=("upper half", "lower half"),
        to_right=("own part", _GRADIENTS),
        to_middle=("copy", _WEIGHTS),
        between=("rows at the edge", _DATA),
    ),
    "tpu": Flow(
        left=("host\nglobal batch k",),
        middle=("core 0\nweights, own update", "core 1\nweights, own update"),
        right=("all-reduce\nover the TPU's\nown links",),
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
    text, color = flow.between
    chief = color == _CONTROL
    inner = _HEIGHT if chief else _TEXT_HEIGHT if text else 0.01
    gap = 0.28 if text else 0.14
    graph = pygraphviz.AGraph(directed=True, strict=False, nodesep=gap, **_GRAPH)
    graph.node_attr.update(fixedsize=True, fontcolor="#1a1a1a", **_BOX, **_FONT)
    graph.edge_attr.update(minlen=2, penwidth=1.5, arrowsize=0.7, **_FONT)
    # Above the middle of an arrow. Where Graphviz puts a `label` depends on the fonts.
    graph.edge_attr.update(labeldistance=5, labelangle=-10)
    _add_legend(graph, flow)  # Graphviz places what is added first at the bottom.
    for column, width in _WIDTHS.items():
        texts = getattr(flow, column)
        height = _HEIGHT + (len(flow.middle) - len(texts)) * (_HEIGHT + inner + 2 * gap)
        for row, label in enumerate(texts):
            graph.add_node(f"{column} {row}", label=label, width=width, height=height)
    for row, part in enumerate(flow.parts):
        left, middle = f"left {min(row, len(flow.left) - 1)}", f"middle {row}"
        _add_arrow(graph, left, middle, part, _DATA)
        if flow.right:
            _add_arrow(graph, middle, "right 0", *flow.to_middle, dir="back", labelangle=10)
            _add_arrow(graph, middle, "right 0", *flow.to_right)
    if len(flow.middle) == 2:  # What is between them also centers the boxes that are alone.
        look = {"width": _WIDTHS["middle"]} if chief else _TEXT | {"fontcolor": color}
        graph.add_node("between", label=text, height=inner, **look)
        graph.add_subgraph(["middle 0", "between", "middle 1"], rank="same")
        near = {"minlen": 1, "style": "" if text else "invis"}
        far = {"weight": 5, "style": "" if chief else "invis"}
        _add_arrow(graph, "middle 0", "between", "", color, dir="back", **near)
        _add_arrow(graph, "between", "middle 1", "", color, **near)
        _add_arrow(graph, "between", "right 0", "", color, **far)
        if len(flow.left) == 1:
            graph.add_edge("left 0", "between", weight=5, style="invis")
    svg = graph.draw(format="svg", prog="dot").decode()
    return svg[svg.index("<svg") :]  # Without the version of Graphviz.


def _add_legend(graph: pygraphviz.AGraph, flow: Flow) -> None:
    """Adds a text, or an empty one, to each column and gap; a gap is as wide as its text."""
    used = {_DATA, flow.to_right[1], flow.to_middle[1], flow.between[1]}
    colors = sorted(_LEGEND, key=lambda color: color not in used)[: 4 if flow.right else 2]
    for color in colors:
        label = f"→ {_LEGEND[color]}" if color in used else ""
        graph.add_node(color, label=label, fontcolor=color, height=_TEXT_HEIGHT, **_TEXT)
    for pair in itertools.pairwise(colors):
        graph.add_edge(*pair, style="invis", minlen=1)


def _add_arrow(graph, tail: str, head: str, text: str, color: str, **look) -> None:
    graph.add_edge(tail, head, headlabel=text, color=color, fontcolor=color, **look)
