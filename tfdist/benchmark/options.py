"""The options of `python -m tfdist.benchmark`; see `tfdist.options`."""

from dataclasses import dataclass

from tfdist.options import CommandOptions, OptionGroup, inherit, option
from tfdist.strategies.registry import STRATEGIES
from tfdist.tasks.registry import OwnTaskOptions
from tfdist.tasks.segmentation.task import Segmentation
from tfdist.training.options import PRECISIONS, RunOptions, TrainingOptions
from tfdist.verify.options import FIXED_BATCH_SIZE

BASELINES = ("loop", "keras_fit", "keras_layers_fit")


@dataclass(frozen=True, kw_only=True)
class ContestOptions(OptionGroup):
    """Comparison."""

    strategies: tuple[str, ...] = option(
        ("one_device", "mirrored"),
        "strategies to measure",
        metavar="one_device,mirrored",
        choices=tuple(STRATEGIES),
    )
    precisions: tuple[str, ...] = option(
        ("float32", "mixed_bfloat16"),
        "precisions to measure each of them with",
        metavar="float32,mixed_bfloat16",
        choices=PRECISIONS,
    )
    replicas: tuple[int, ...] = option(
        (2,),
        "mirrored, central_storage: devices, one configuration per number; the GPUs or the CPU are "
        "split if there are fewer",
        metavar="2,4",
        minimum=2,
    )
    workers: tuple[int, ...] = option(
        (2,),
        "workers of the strategies with several processes, one configuration per number",
        metavar="2,4",
        minimum=2,
    )
    baselines: tuple[str, ...] = option(
        BASELINES,
        "what to measure besides the trainer: a loop written by hand, and Keras's fit, with "
        "tfdist's layers and with Keras's own",
        metavar="loop,keras_fit",
        choices=BASELINES,
    )
    rounds: int = option(3, "how often to measure each configuration, in turns", minimum=1)
    steps: int = option(12, "measured steps per round", minimum=1)
    warmup_steps: int = option(4, "steps before these, which are not measured", minimum=1)
    timeout_s: float = option(600.0, "seconds until a configuration counts as failed", above=0)


@dataclass(frozen=True, kw_only=True)
class MeasuredModelOptions(OwnTaskOptions):
    """Model and training."""

    model: str = inherit(Segmentation, "model")
    image_size: tuple[int, int] = option((128, 128), "height and width in pixels", metavar="H,W")
    num_classes: int = option(3, "classes", minimum=2)
    base_filters: int = inherit(Segmentation, "base_filters")
    depth: int = inherit(Segmentation, "depth")
    norm: str = inherit(Segmentation, "norm")
    global_batch_size: int = inherit(TrainingOptions, "global_batch_size", **FIXED_BATCH_SIZE)


@dataclass(frozen=True, kw_only=True)
class BenchmarkReportOptions(OptionGroup):
    """Report."""

    output: str = option("", "write results.json and results.html to this directory", metavar="DIR")
    quiet: bool = inherit(RunOptions, "quiet")
    verbose_tensorflow: bool = inherit(RunOptions, "verbose_tensorflow")


@dataclass(frozen=True, kw_only=True)
class BenchmarkOptions(CommandOptions):
    """The options of `python -m tfdist.benchmark`."""

    contest: ContestOptions = ContestOptions()
    model: MeasuredModelOptions = MeasuredModelOptions()
    run: BenchmarkReportOptions = BenchmarkReportOptions()
