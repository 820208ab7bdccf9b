"""Where the parts of a model are computed; standard library only."""

import math
import re
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from tfdist.errors import TfdistError
from tfdist.options import OptionGroup, inherit, option

NONE = "none"


@dataclass(frozen=True, kw_only=True)
class Placement(OptionGroup):
    """Base class of placements: how the model of one replica is divided over several devices.

    Attributes:
      has_parts: whether a functional model is computed in another way than Keras does.
    """

    name: ClassVar[str]
    has_parts: ClassVar[bool] = False

    devices: int = option(
        0, "devices of each replica; 0: all devices, divided over the replicas", minimum=0
    )


@dataclass(frozen=True, kw_only=True)
class Layers(Placement):
    """Stages of consecutive layers, each with its weights and its optimizer's state on a device.

    With `micro_batches`, the devices work at the same time: while one computes a micro-batch, the
    one before it computes the next. The first device is the replica's own. `stages` may give what
    the names of layers begin with, before a "_" or "/"; by default, all stages have about the same
    share of the work and of the activations. With `branches` instead, all layers that fit no
    pattern run on the first device.
    """

    name: ClassVar[str] = "layers"
    has_parts: ClassVar[bool] = True

    stages: tuple[str, ...] = option(
        (),
        "placement=layers: the first layer of each stage but the first; balanced by default",
        metavar="LAYER,LAYER",
        result=False,
    )
    branches: tuple[str, ...] = option(
        (),
        "placement=layers: patterns of layer names, each with the number of its device, for "
        "branches that run at the same time",
        metavar="PATTERN:N,PATTERN:N",
        result=False,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stages and self.branches:
            raise TfdistError("`stages` and `branches` exclude each other. Leave one of them out.")
        self.parse_branches()

    def parse_branches(self) -> dict[str, int]:
        """Returns pattern of layer names -> number of a device.

        >>> Layers(branches=("left_*:0", "right_*:1")).parse_branches()
        {'left_*': 0, 'right_*': 1}
        """
        parsed = {}
        for text in self.branches:
            pattern, _, number = text.rpartition(":")
            if not pattern or not number.isdigit():
                raise TfdistError(
                    f"`branches={text}` is not a pattern and the number of a device, from 0. Write "
                    "branch_1_*:1."
                )
            parsed[pattern] = int(number)
        return parsed


@dataclass(frozen=True, kw_only=True)
class Shards(Placement):
    """The units of layers, such as the filters of a convolution, divided over the devices.

    Each device has its part of the weights and of the optimizer's state. The patterns of `layout`
    are regular expressions that must fit the whole path, such as `.*dense.*kernel:1`; it may also
    be a `keras.distribution.LayoutMap`, whose layouts name one axis each. A layer's bias is divided
    with its kernel.
    """

    name: ClassVar[str] = "shards"

    layout: tuple[str, ...] = option(
        (),
        "placement=shards: patterns of weights' paths, each with the axis to divide; by default, "
        "all layers that can be divided",
        metavar="PATTERN:AXIS,PATTERN:AXIS",
        result=False,
    )

    def __post_init__(self) -> None:
        if hasattr(self.layout, "items"):
            object.__setattr__(self, "layout", _parse_layout_map(self.layout))
        super().__post_init__()
        self.parse_layout()

    def parse_layout(self) -> dict[str, int]:
        """Returns pattern of weights' paths -> axis.

        >>> Shards(layout=(".*kernel:-1",)).parse_layout()
        {'.*kernel': -1}

        Raises:
          TfdistError: a pattern has no axis, or is not a regular expression.
        """
        parsed = {}
        for text in self.layout:
            pattern, _, axis = text.rpartition(":")
            try:
                re.compile(pattern)
                parsed[pattern] = int(axis)
            except (ValueError, re.error):
                pattern = ""
            if not pattern:
                raise TfdistError(
                    f"`layout={text}` is not a regular expression and an axis. Write "
                    ".*dense.*kernel:1."
                )
        return parsed


@dataclass(frozen=True, kw_only=True)
class Strips(Placement):
    """The rows of images, divided over the devices: each computes a strip of every image.

    Each device has the activations of its rows. The weights are on the first device. A `grid` of
    (2, 3) is for six devices.
    """

    name: ClassVar[str] = "strips"
    has_parts: ClassVar[bool] = True

    grid: tuple[int, ...] = option(
        (),
        "placement=strips: into how many parts the height and the width are divided; by default, "
        "the height alone",
        metavar="ROWS,COLUMNS",
        minimum=1,
        result=False,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.grid:
            return
        given, fields = ",".join(map(str, self.grid)), math.prod(self.grid)
        if len(self.grid) != 2 or fields < 2:
            raise TfdistError(
                f"`grid={given}` is not a grid. Write 2,3 for two parts of the height and three "
                "of the width."
            )
        if self.devices not in (0, fields):
            raise TfdistError(
                f"`grid={given}` has {fields} parts, but each replica has {self.devices} devices. "
                f"Give `mesh=model:{fields}`, or another grid."
            )
        object.__setattr__(self, "devices", fields)


def _parse_layout_map(layout: Any) -> tuple[str, ...]:
    """Returns the patterns and axes of a `keras.distribution.LayoutMap`."""
    found = []
    for pattern, tensor_layout in layout.items():
        named = [axis for axis, name in enumerate(tensor_layout.axes) if name is not None]
        if len(named) > 1:
            raise TfdistError(
                f"The layout {tensor_layout.axes} of {pattern!r} names {len(named)} axes, but a "
                "weight can be divided along one axis only."
            )
        found += [f"{pattern}:{axis}" for axis in named]
    return tuple(found)


PLACEMENTS: dict[str, type[Placement]] = {kind.name: kind for kind in (Layers, Shards, Strips)}
"""Value of `--placement` -> class."""


@dataclass(frozen=True, kw_only=True)
class PlacementOptions(OptionGroup):
    """Where the parts of a model are computed."""

    placement: str = option(
        NONE,
        "divide the model of each replica over several devices; layers: stages of layers; shards: "
        "the units of layers; strips: the rows of images",
        choices=(NONE, *PLACEMENTS),
        result=False,
        must_match=True,
    )
    mesh: tuple[str, ...] = option(
        (),
        "with a placement: replicas of this process, and devices of each; by default, all devices "
        "are one replica's",
        metavar="data:2,model:2",
        result=False,
    )
    stages: tuple[str, ...] = inherit(Layers, "stages")
    branches: tuple[str, ...] = inherit(Layers, "branches")
    layout: tuple[str, ...] = inherit(Shards, "layout")
    grid: tuple[int, ...] = inherit(Strips, "grid")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.parse_mesh()
        self.select()

    def parse_mesh(self) -> dict[str, int]:
        """Returns the sizes of the axes `data` and `model`; 0 for one that is not given.

        >>> PlacementOptions(placement="layers", mesh=("data:2", "model:3")).parse_mesh()
        {'data': 2, 'model': 3}

        Raises:
          TfdistError: an axis is unknown or has no size.
        """
        sizes = {"data": 0, "model": 0}
        for text in self.mesh:
            axis, _, size = text.partition(":")
            if axis not in sizes or not size.isdigit() or int(size) < 1:
                raise TfdistError(
                    f"`mesh={','.join(self.mesh)}` is not a mesh. Write data:2,model:2 for two "
                    "replicas with two devices each."
                )
            sizes[axis] = int(size)
        return sizes

    def select(self) -> Placement | None:
        """Returns the chosen placement, None if there is none; refuses options without effect."""
        kind = PLACEMENTS.get(self.placement)
        own = [item.name for item in fields(kind)] if kind else []
        for name in ("stages", "branches", "layout", "grid", "mesh"):
            fits = name in own or (name == "mesh" and kind is not None)
            if getattr(self, name) and not fits:
                users = [p for p, k in PLACEMENTS.items() if name == "mesh" or hasattr(k, name)]
                given = ",".join(map(str, getattr(self, name)))
                raise TfdistError(
                    f"`{name}={given}` has no effect without "
                    f"`placement={' or '.join(users)}`. Leave it out."
                )
        if kind is None:
            return None
        options = {name: getattr(self, name) for name in own if name != "devices"}
        return kind(devices=self.parse_mesh()["model"], **options)
