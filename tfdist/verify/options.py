"""The options of `python -m tfdist.verify`."""

from dataclasses import dataclass
from typing import Any

from tfdist.options import CommandOptions, OptionGroup, inherit, option
from tfdist.placement.options import PlacementOptions
from tfdist.strategies.builtin.mirrored import Mirrored
from tfdist.strategies.registry import STRATEGIES, list_names
from tfdist.tasks.registry import OwnTaskOptions
from tfdist.tasks.segmentation.task import Segmentation
from tfdist.training.options import RunOptions, TrainingOptions
from tfdist.training.step_options import StepOptions

# For commands that accept only a number, not auto.
FIXED_BATCH_SIZE: dict[str, Any] = {
    "help": "examples per step, over all replicas",
    "auto": None,
    "metavar": None,
}

_PLACEMENT = PlacementOptions()


@dataclass(frozen=True, kw_only=True)
class VerificationOptions(OptionGroup):
    """Comparison."""

    strategies: tuple[str, ...] = option(
        tuple(name for name, kind in STRATEGIES.items() if not kind.traits.is_remote),
        "strategies to compare with one device; package.module:Class for one of your own",
        metavar="mirrored,local_sgd",
        choices=list_names(),
        is_open=True,
    )
    steps: int = option(20, "training steps", minimum=1)
    replicas: int = option(
        2,
        "mirrored, central_storage: devices; the GPUs or the CPU are split if there are fewer",
        minimum=2,
    )
    workers: int = option(2, "workers of the strategies with several processes", minimum=2)
    bits: bool = option(
        False,
        "instead, compare the bits of logical replicas in one process and in several, which share "
        "them",
    )
    logical_replicas: int = inherit(Mirrored, "logical_replicas", 4, help="bits: replicas")
    shard_optimizer: bool = inherit(StepOptions, "shard_optimizer")
    timeout_s: float = option(
        300.0, "seconds after which a cluster that has not finished counts as failed", above=0
    )


@dataclass(frozen=True, kw_only=True)
class VerifiedModelOptions(OwnTaskOptions):
    """Model and training."""

    model: str = option(
        "unet",
        "one of tfdist's models, such as unet or resnet50_unet, on the shapes data; or a function "
        "of your own that returns a compiled Keras model",
        metavar="NAME|package.module:function",
    )
    make_data: str = option(
        "",
        "for a model of your own: a function that returns arrays (x, y) or (x, y, sample_weight); "
        "by default, make_data in the model's module, or else random arrays of the model's shapes",
        metavar="package.module:function",
    )
    image_size: tuple[int, int] = inherit(Segmentation, "image_size", (16, 16))
    base_filters: int = inherit(Segmentation, "base_filters", 4)
    depth: int = inherit(Segmentation, "depth", 1)
    norm: str = inherit(Segmentation, "norm")
    global_batch_size: int = inherit(TrainingOptions, "global_batch_size", 9, **FIXED_BATCH_SIZE)
    optimizer: str = inherit(TrainingOptions, "optimizer")
    learning_rate: float = inherit(TrainingOptions, "learning_rate")
    clip_norm: float = inherit(TrainingOptions, "clip_norm")
    loss: str = inherit(Segmentation, "loss")
    precision: str = inherit(
        TrainingOptions,
        "precision",
        "float64",
        help="precision of the computation",
        choices=("float64", "float32", "mixed_bfloat16"),
    )
    seed: int = inherit(TrainingOptions, "seed")

    @property
    def is_own(self) -> bool:
        """Whether the model is one of tfdist's own."""
        return not self.task and ":" not in self.model


@dataclass(frozen=True, kw_only=True)
class ReportOptions(OptionGroup):
    """Report."""

    json: str = option("", "write all results to this file", metavar="FILE")
    quiet: bool = inherit(RunOptions, "quiet")
    verbose_tensorflow: bool = inherit(RunOptions, "verbose_tensorflow")


@dataclass(frozen=True, kw_only=True)
class VerifyOptions(CommandOptions):
    """The options of `python -m tfdist.verify`."""

    verification: VerificationOptions = VerificationOptions()
    placement: PlacementOptions = _PLACEMENT
    model: VerifiedModelOptions = VerifiedModelOptions()
    run: ReportOptions = ReportOptions()
