"""What `python -m tfdist.verify` takes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tfdist.options import CommandOptions, OptionGroup, inherit, option
from tfdist.strategies.registry import STRATEGIES, list_names
from tfdist.tasks.registry import find_task, join_task
from tfdist.tasks.segmentation.task import Segmentation
from tfdist.training.options import RunOptions, TrainingOptions

# For commands that take a number alone.
FIXED_BATCH_SIZE: dict[str, Any] = {
    "help": "examples a step, over all replicas",
    "auto": None,
    "metavar": None,
}


@dataclass(frozen=True, kw_only=True)
class VerificationOptions(OptionGroup):
    """What is compared."""

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
        "mirrored, central_storage: devices; the CPU is split where there are fewer",
        minimum=2,
    )
    workers: int = option(2, "strategies of several processes: workers", minimum=2)
    timeout_s: float = option(
        300.0, "seconds after which a cluster that is not done has failed", above=0
    )


@dataclass(frozen=True, kw_only=True)
class VerifiedModelOptions(OptionGroup):
    """What is trained for it."""

    task: str = option(
        "",
        "a task of your own instead, with its flags: package.module:Class or FILE.py:Class",
        metavar="FILE.py:Class",
    )
    model: str = option(
        "unet",
        "unet, mobilenet_v2_unet or resnet50_unet on the shapes data; or a function of your own "
        "that returns a compiled Keras model",
        metavar="NAME|package.module:function",
    )
    make_data: str = option(
        "",
        "for a model of your own: a function that returns (x, y) or (x, y, sample_weight), arrays; "
        "the model's module's make_data by default, else arrays made up from the model's shapes",
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
        help="of the computation",
        choices=("float64", "float32", "mixed_bfloat16"),
    )
    seed: int = inherit(TrainingOptions, "seed")

    @classmethod
    def widen(cls, chosen: Mapping[str, str]) -> type["VerifiedModelOptions"]:
        """Returns the class with the options of a task that is named."""
        name = chosen.get("task")
        kind: Any = find_task(name) if name else None
        return join_task(VerifiedModelOptions, kind) if kind else VerifiedModelOptions

    @property
    def is_own(self) -> bool:
        """Whether it is one of the project's own networks."""
        return not self.task and ":" not in self.model


@dataclass(frozen=True, kw_only=True)
class ReportOptions(OptionGroup):
    """What is said of it."""

    json: str = option("", "write everything that was found to this file", metavar="FILE")
    quiet: bool = inherit(RunOptions, "quiet")
    verbose_tensorflow: bool = inherit(RunOptions, "verbose_tensorflow")


@dataclass(frozen=True, kw_only=True)
class VerifyOptions(CommandOptions):
    """Everything that `python -m tfdist.verify` takes.

    Attributes:
      verification, model, run: the groups.
    """

    verification: VerificationOptions = VerificationOptions()
    model: VerifiedModelOptions = VerifiedModelOptions()
    run: ReportOptions = ReportOptions()
