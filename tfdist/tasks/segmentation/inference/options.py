"""What the commands take that use a finished run; see `tfdist.options`."""

from dataclasses import dataclass

from tfdist.options import CommandOptions, OptionGroup, inherit, option
from tfdist.tasks.commands import DeviceOptions, FinishedRunOptions
from tfdist.tasks.segmentation.task import Segmentation

_LABEL_MAP_HELP = (
    "the class that a value or color stands for, as in 255:1 or #ff0000:1; the run's own by default"
)


_DEVICES = DeviceOptions()


@dataclass(frozen=True, kw_only=True)
class WindowOptions(OptionGroup):
    """How it looks at an image."""

    overlap: float = option(0.5, "share in [0, 1) of a window that the next one sees again")
    zoom: float = option(
        1.0, "resize images by this factor for the model; masks keep the images' size"
    )
    tta: bool = option(False, "test-time augmentation: average with the mirror image's prediction")
    global_batch_size: int = option(16, "windows a step, over all replicas", result=False)


@dataclass(frozen=True, kw_only=True)
class PredictRunOptions(FinishedRunOptions):
    """What it reads and writes."""

    images: str | None = option(
        None, "a directory of images, or a pattern such as 'photos/*.jpg'", metavar="DIR_OR_GLOB"
    )
    masks: str | None = option(
        None, "a directory with the truth, NAME.png for each image: adds the metrics", metavar="DIR"
    )
    label_map: tuple[str, ...] = inherit(
        Segmentation, "label_map", help=f"of --masks, {_LABEL_MAP_HELP}"
    )
    output: str | None = option(
        None, "masks, overlays and statistics; the same command continues", metavar="DIR"
    )


@dataclass(frozen=True, kw_only=True)
class PredictOptions(CommandOptions):
    """Everything that `python -m tfdist.predict` takes.

    Attributes:
      run, windows, devices: the groups.
    """

    run: PredictRunOptions = PredictRunOptions()
    windows: WindowOptions = WindowOptions()
    devices: DeviceOptions = _DEVICES


@dataclass(frozen=True, kw_only=True)
class EvaluateRunOptions(FinishedRunOptions):
    """What it reads and writes."""

    split: str = option("val", "the part of the data set", metavar="NAME")
    dataset: str | None = option(
        None, "shapes, folder or tfds:NAME; the run's own by default", metavar="NAME"
    )
    data_dir: str | None = option(
        None, "where the data set is; the run's own by default", metavar="DIR"
    )
    label_map: tuple[str, ...] = inherit(
        Segmentation, "label_map", help=f"folder: {_LABEL_MAP_HELP}"
    )
    num_examples: int | None = option(
        None, "examples of shapes, or a cap on them; the run's own by default", metavar="N"
    )
    full_size: bool = option(
        False, "images in their own size, in windows, instead of resized to the run's size"
    )
    output: str | None = option(
        None, "the metrics as JSON; RUN_DIR/evaluation/SPLIT.json by default", metavar="FILE"
    )


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(CommandOptions):
    """Everything that `python -m tfdist.evaluate` takes.

    Attributes:
      run, windows, devices: the groups.
    """

    run: EvaluateRunOptions = EvaluateRunOptions()
    windows: WindowOptions = WindowOptions()
    devices: DeviceOptions = _DEVICES


@dataclass(frozen=True, kw_only=True)
class ExportRunOptions(FinishedRunOptions):
    """What it reads and writes."""

    output: str | None = option(
        None, "holds the versions: 1, 2, ...; each export adds one", metavar="DIR"
    )


@dataclass(frozen=True, kw_only=True)
class ExportOptions(CommandOptions):
    """Everything that `python -m tfdist.export` takes.

    Attributes:
      run: the only group.
    """

    run: ExportRunOptions = ExportRunOptions()
