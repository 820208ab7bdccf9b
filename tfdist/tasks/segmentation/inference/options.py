"""The options of the commands that use a finished run; see `tfdist.options`."""

from dataclasses import dataclass

from tfdist.options import CommandOptions, OptionGroup, inherit, option
from tfdist.tasks.commands import DeviceOptions, FinishedRunOptions
from tfdist.tasks.segmentation.inference.windows import check_overlap, parse_zoom
from tfdist.tasks.segmentation.task import Segmentation, parse_label_map

_LABEL_MAP_HELP = (
    "the class that a value or color stands for, as in 255:1 or #ff0000:1; the run's own by default"
)


_DEVICES = DeviceOptions()


@dataclass(frozen=True, kw_only=True)
class WindowOptions(OptionGroup):
    """Sliding windows."""

    overlap: float = option(0.5, "fraction in [0, 1) of a window that the next one overlaps")
    zoom: str = option(
        "auto",
        "resize images by this factor for the model, or auto: as the training images were resized; "
        "masks keep the images' size",
        metavar="FACTOR|auto",
    )
    tta: bool = option(False, "test-time augmentation: average with the mirror image's prediction")
    global_batch_size: int = option(16, "windows per step, over all replicas", result=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_overlap(self.overlap)
        parse_zoom(self.zoom)


@dataclass(frozen=True, kw_only=True)
class PredictRunOptions(FinishedRunOptions):
    """Input and output."""

    images: str | None = option(
        None,
        "a directory of images, or a pattern such as 'photos/*.jpg'",
        metavar="DIR_OR_GLOB",
        must_exist="Name another.",
    )
    masks: str | None = option(
        None,
        "a directory of true masks, NAME.png for each image; adds metrics",
        metavar="DIR",
        must_exist="It must hold NAME.png for every image.",
    )
    label_map: tuple[str, ...] = inherit(
        Segmentation, "label_map", help=f"for --masks: {_LABEL_MAP_HELP}"
    )
    output: str | None = option(
        None, "directory of masks, overlays and statistics; can be continued", metavar="DIR"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        parse_label_map(self.label_map)


@dataclass(frozen=True, kw_only=True)
class PredictOptions(CommandOptions):
    """The options of `python -m tfdist.predict`."""

    run: PredictRunOptions = PredictRunOptions()
    windows: WindowOptions = WindowOptions()
    devices: DeviceOptions = _DEVICES


@dataclass(frozen=True, kw_only=True)
class EvaluateRunOptions(FinishedRunOptions):
    """Input and output."""

    split: str = option("val", "split of the data set to evaluate on", metavar="NAME")
    dataset: str | None = option(
        None, "shapes, folder or tfds:NAME; the run's own by default", metavar="NAME"
    )
    data_dir: str | None = option(
        None, "directory of the data set; the run's own by default", metavar="DIR"
    )
    label_map: tuple[str, ...] = inherit(
        Segmentation, "label_map", help=f"folder: {_LABEL_MAP_HELP}"
    )
    num_examples: int | None = option(
        None, "number of examples, a maximum except for shapes; the run's by default", metavar="N"
    )
    full_size: bool = option(
        False, "predict images at their original size, in windows, instead of resizing them"
    )
    output: str | None = option(
        None, "JSON file of the metrics; RUN_DIR/evaluation/SPLIT.json by default", metavar="FILE"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        parse_label_map(self.label_map)


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(CommandOptions):
    """The options of `python -m tfdist.evaluate`."""

    run: EvaluateRunOptions = EvaluateRunOptions()
    windows: WindowOptions = WindowOptions()
    devices: DeviceOptions = _DEVICES
