"""What a run is made of: frozen dataclasses whose fields are also the command line's flags.

Standard library only. A field says once what a flag needs: its group, its help, its unit and
what it may be. `tfdist.flags` turns the fields into flags and the flags into these.
"""

import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from tfdist.errors import TfdistError

AUTO_BATCH_SIZE = 0  # what `--global_batch_size=auto` is until a number is found

_PATHS = ("DIR", "FILE", "DIR_OR_GLOB")  # options whose leading ~ is the home directory


def option(default: Any, help_text: str, **metadata: Any) -> Any:
    """Returns a dataclass field that is also a flag.

    Args:
      default: the default; its type, or the field's annotation, is the flag's type.
      help_text: one line for `--help`, units included.
      **metadata: `choices`, valid values shown in `--help`; `minimum`, the lowest valid value,
        or `above`, the highest that no longer is; `auto`, what the word auto stands for beside
        whole numbers; `metavar`, how the value looks, one of `_PATHS` for a path;
        `result=False`, for what may change when a run is continued because it does not
        change what the run computes, or the name of the only strategy under which it does.
    """
    return field(default=default, metadata={"help": help_text, **metadata})


class OptionGroup:
    """A group of options: a frozen dataclass, whose paths are those of the user's own machine."""

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, item.name)
            if value and item.metadata.get("metavar") in _PATHS:
                value = os.path.expanduser(value)
                if item.metadata["metavar"] == "DIR":
                    # In a bucket, "run//model" is another file than "run/model".
                    value = value.rstrip("/") or "/"
                object.__setattr__(self, item.name, value)


@dataclass(frozen=True, kw_only=True)
class StrategyOptions(OptionGroup):
    """Where it runs."""

    strategy: str = option(
        "auto",
        "how the work is distributed",
        choices=(
            "auto",
            "one_device",
            "mirrored",
            "central_storage",
            "multi_worker_mirrored",
            "parameter_server",
            "local_sgd",
            "tpu",
        ),
        result=False,
    )
    devices: tuple[str, ...] = option(
        (),
        "devices to compute on; all accelerators by default",
        metavar="GPU:0,GPU:1",
        result=False,
    )
    virtual_devices: int = option(
        0,
        "split the CPU, or the GPUs, into this many logical devices; 0 does not",
        result=False,
        minimum=0,
    )
    all_reduce: str = option(
        "auto",
        "mirrored: how gradients are summed",
        choices=("auto", "nccl", "hierarchical_copy", "reduction_to_one_device"),
        result=False,
    )
    collective: str = option(
        "auto",
        "several workers: how they sum their gradients or weights",
        choices=("auto", "ring", "nccl"),
        result=False,
    )
    bytes_per_pack: int = option(
        4 * 2**20,
        "multi_worker_mirrored: bytes of gradients that are summed at a time, while the backward "
        "pass goes on; 0 for all at once, after it",
        result=False,
        minimum=0,
    )
    compress_gradients: bool = option(
        False, "multi_worker_mirrored: sum the workers' gradients in bfloat16, half the bytes"
    )
    worker_timeout_s: float = option(
        600.0, "several workers: seconds to wait for all of them to start", result=False, above=0
    )
    sync_every: int = option(
        8, "local_sgd: steps between two averagings of the weights", result="local_sgd"
    )
    average_optimizer: bool = option(
        True, "local_sgd: average the optimiser's state as well", result="local_sgd"
    )
    outer_learning_rate: float = option(
        1.0, "local_sgd: of the step from one average to the next", result="local_sgd"
    )
    outer_momentum: float = option(
        0.0, "local_sgd: of that step; 0 takes the plain average", result="local_sgd"
    )
    parameter_device: str = option(
        "CPU:0", "central_storage: where the variables live", metavar="CPU:0", result=False
    )
    max_in_flight: int = option(
        0,
        "parameter_server: steps given out to workers at a time, one more than the highest "
        "staleness; 0 for one a worker",
        result=False,
    )
    tpu: str = option(
        "",
        "tpu: local on a TPU VM, a TPU's name, or empty to look for one",
        metavar="NAME",
        result=False,
    )


@dataclass(frozen=True, kw_only=True)
class DataOptions(OptionGroup):
    """What it learns from."""

    dataset: str = option(
        "shapes", "shapes (made as it goes), folder, or tfds:NAME", metavar="NAME"
    )
    data_dir: str | None = option(
        None,
        "folder: holds SPLIT/images and SPLIT/masks; tfds: where data sets are kept (gs:// too)",
        metavar="DIR",
    )
    num_classes: int | None = option(None, "classes; the data set's own by default", metavar="N")
    ignore_label: int | None = option(
        None, "label of pixels that count in no loss and no metric", metavar="LABEL"
    )
    label_map: tuple[str, ...] = option(
        (),
        "folder: the class that a mask's value or color stands for, as in 255:1 or #ff0000:1; "
        "values that are not named stand for themselves, colors must all be named",
        metavar="FROM:TO,FROM:TO",
    )
    class_names: tuple[str, ...] = option((), "names for the metrics", metavar="sky,road")
    image_size: tuple[int, int] = option(
        (96, 96),
        "height and width in pixels: bilinear for images, nearest for masks",
        metavar="H,W",
    )
    train_examples: int | None = option(
        None, "training examples of shapes, or a cap on them", metavar="N"
    )
    val_examples: int | None = option(
        None, "validation examples of shapes, or a cap on them", metavar="N"
    )
    flip: bool = option(True, "mirror half of the training examples")
    scale: tuple[float, float] = option(
        (0.75, 1.5),
        "zoom training examples by a factor in this range, then crop",
        metavar="MIN,MAX",
    )
    colour: float = option(
        0.2, "strength in [0, 1) of changes of brightness, contrast and saturation"
    )
    class_weights: str = option(
        "none",
        "weigh classes by how rare their pixels are",
        choices=("none", "sqrt", "median_frequency"),
    )
    on_bad_example: str = option(
        "fail",
        "folder: what to do with an image or mask that cannot be used; skip reads all at the "
        "start, names the bad ones and leaves them out",
        choices=("fail", "skip"),
    )
    cache: str = option(
        "auto",
        "where decoded and resized examples are kept",
        choices=("auto", "memory", "disk", "none"),
        result=False,
    )


@dataclass(frozen=True, kw_only=True)
class ModelOptions(OptionGroup):
    """What it trains."""

    model: str = option("unet", "network", choices=("unet", "mobilenet_v2_unet", "resnet50_unet"))
    base_filters: int = option(32, "filters of the first level; they double with every level")
    depth: int = option(4, "levels below the first: image sizes are multiples of 2**depth")
    norm: str = option(
        "sync_batch",
        "normalisation; sync_batch takes its moments over the global batch",
        choices=("sync_batch", "batch", "group", "none"),
    )
    pretrained: bool = option(False, "ImageNet weights for the encoder (needs a network)")


@dataclass(frozen=True, kw_only=True)
class TrainingOptions(OptionGroup):
    """How it learns."""

    preset: str = option(
        "none",
        "published hyperparameters; flags that are given win over them",
        choices=("none", "camvid", "oxford_pets"),
        result=False,
    )
    epochs: int = option(10, "passes over the training data", minimum=1)
    max_steps: int | None = option(None, "steps in all; wins over --epochs", metavar="N", minimum=1)
    global_batch_size: int = option(
        16,
        "examples a step, over all replicas; auto: as many as fit the memory, found by trials",
        minimum=1,
        auto=AUTO_BATCH_SIZE,
        metavar="N|auto",
    )
    micro_batches: int = option(
        1,
        "parts, one after the other, in which a replica computes its rows of a global batch: for "
        "those that do not fit",
        result=False,
        minimum=1,
    )
    optimizer: str = option("adam", "optimiser", choices=("adam", "adamw", "sgd"))
    learning_rate: float = option(2e-3, "the highest learning rate", above=0)
    schedule: str = option(
        "cosine", "of the learning rate, after the warm-up", choices=("cosine", "constant")
    )
    warmup_steps: int = option(
        50, "steps over which the learning rate rises to its highest", minimum=0
    )
    weight_decay: float = option(1e-4, "adamw: decoupled weight decay", minimum=0)
    momentum: float = option(0.9, "sgd: momentum", minimum=0)
    clip_norm: float = option(
        1.0, "the global gradient is scaled down to this norm; 0 does not clip", minimum=0
    )
    loss: str = option(
        "cross_entropy",
        "loss",
        choices=("cross_entropy", "dice", "cross_entropy_dice", "focal"),
    )
    precision: str = option(
        "float32",
        "of the computation; auto: mixed_bfloat16 where the hardware has it, else float32",
        choices=("float32", "float64", "mixed_bfloat16", "mixed_float16", "auto"),
    )
    steps_per_loop: int = option(
        1,
        "steps run at a time, without the host in between; callbacks see each, after all of them",
        minimum=1,
        result=False,
    )
    check: str = option(
        "auto",
        "before the first step, replicas compute a batch divided and undivided; what differs is "
        "refused; auto: where the program is not known to be divisible",
        choices=("auto", "on", "off"),
        result=False,
    )
    gather_outputs: bool = option(
        False,
        "every replica computes the loss of the outputs and labels of all replicas, for a loss "
        "that is no mean over the examples; they cross the network at each step",
        result=False,
    )
    jit_compile: str = option(
        "auto",
        "XLA compiles the forward and backward pass; auto: off, for it is slower on CPUs and was "
        "not measured on GPUs",
        choices=("auto", "on", "off"),
        result=False,
    )
    rematerialize: bool = option(
        False,
        "compute activations again in the backward pass, so that only those between the model's "
        "stages stay in memory",
        result=False,
    )
    seed: int = option(0, "of the initial weights, the order and the augmentation")
    deterministic: bool = option(
        False, "only kernels that give the same bits every time (slower on GPUs)"
    )


@dataclass(frozen=True, kw_only=True)
class RunOptions(OptionGroup):
    """What it leaves behind."""

    run_dir: str = option(
        "runs/default",
        "everything the run leaves; the same command continues it",
        metavar="DIR",
        result=False,
    )
    checkpoint_every: str = option(
        "0",
        "steps, or seconds as in 90s, between checkpoints, besides one an epoch; 0 for none",
        metavar="N|Ns",
        result=False,
    )
    keep_checkpoints: int = option(3, "newest checkpoints that stay", result=False, minimum=1)
    grace_period_s: float = option(
        25.0, "seconds from SIGTERM to the end, checkpoint included", result=False, above=0
    )
    log_every: int = option(
        0,
        "steps between lines of metrics.jsonl, besides one an epoch; 0 for none",
        result=False,
        minimum=0,
    )
    tensorboard: bool = option(True, "write TensorBoard events", result=False)
    profile: tuple[int, ...] = option(
        (),
        "first and last step of a trace for TensorBoard's profile plugin; none by default",
        metavar="STEP,STEP",
        result=False,
    )
    dry_run: bool = option(
        False, "say what would be run, and end: nothing is started or written", result=False
    )
    quiet: bool = option(False, "print nothing but errors", result=False)
    verbose_tensorflow: bool = option(False, "show TensorFlow's own messages", result=False)


@dataclass(frozen=True, kw_only=True)
class CommandOptions:
    """Everything that a command takes: a frozen dataclass whose fields are groups of options.

    Attributes:
      rest: what else a command line has after these, for `--help`.
    """

    rest: ClassVar[str] = ""

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Returns group -> field -> value, ready for JSON."""
        return {
            group: {
                key: list(value) if isinstance(value, tuple) else value
                for key, value in fields.items()
            }
            for group, fields in dataclasses.asdict(self).items()
        }

    @classmethod
    def list_groups(cls) -> dict[str, type]:
        """Returns the groups' classes by their names, in the order of `--help`."""
        return {item.name: type(item.default) for item in dataclasses.fields(cls)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Returns the options that `to_dict` gave; what is missing has its default."""
        return cls(
            **{
                name: group(
                    **{
                        item.name: tuple(value) if isinstance(value, list) else value
                        for item in dataclasses.fields(group)
                        for value in [values[name].get(item.name, item.default)]
                    }
                )
                for name, group in cls.list_groups().items()
            }
        )


@dataclass(frozen=True, kw_only=True)
class TrainOptions(CommandOptions):
    """Everything that `python -m tfdist.train` takes.

    Attributes:
      strategy, data, model, training, run: the groups.
    """

    strategy: StrategyOptions = StrategyOptions()
    data: DataOptions = DataOptions()
    model: ModelOptions = ModelOptions()
    training: TrainingOptions = TrainingOptions()
    run: RunOptions = RunOptions()

    def check(self) -> None:
        """Refuses what each flag's own limits let through.

        Raises:
          TfdistError: a value that cannot be understood.
        """
        self.parse_checkpoint_every()
        self.parse_profile()
        parse_label_map(self.data.label_map)

    def parse_checkpoint_every(self) -> tuple[int, float]:
        """Returns the steps and the seconds between checkpoints; 0 for none.

        >>> TrainOptions(run=RunOptions(checkpoint_every="90s")).parse_checkpoint_every()
        (0, 90.0)

        Raises:
          TfdistError: it is neither.
        """
        text = self.run.checkpoint_every
        match = re.fullmatch(r"(\d+)|(\d+(?:\.\d+)?)s", text)
        if match is None:
            raise TfdistError(
                f"--checkpoint_every={text} is neither steps, as in 500, nor seconds, as in 90s."
            )
        return int(match[1] or 0), float(match[2] or 0)

    def parse_profile(self) -> tuple[int, int] | None:
        """Returns the first and the last step to trace; None for none.

        >>> TrainOptions(run=RunOptions(profile=(10, 12))).parse_profile()
        (10, 12)

        Raises:
          TfdistError: they are not two steps in order.
        """
        steps = self.run.profile
        if not steps:
            return None
        if len(steps) != 2 or not 1 <= steps[0] <= steps[1]:
            raise TfdistError(
                f"--profile={','.join(map(str, steps))} is not the first and the last step to "
                "trace. Write two steps in order, from 1, as in --profile=10,12."
            )
        loop = self.training.steps_per_loop
        if loop > 1:
            raise TfdistError(
                f"--profile traces single steps, and --steps_per_loop={loop} runs several at a "
                "time. Leave one of them out."
            )
        return steps[0], steps[1]

    def select_result(self) -> dict[str, Any]:
        """Returns the options that decide what the run computes, as flag -> JSON value."""
        values = self.to_dict()
        return {
            item.name: values[name][item.name]
            for name, group in self.list_groups().items()
            for item in dataclasses.fields(group)
            if item.metadata.get("result", True) in (True, self.strategy.strategy)
        }

    def select_alike(self) -> dict[str, Any]:
        """Returns the options that all workers must have alike, as flag -> JSON value.

        Those of the result, and those by which workers would wait for one another in vain.
        """
        return {
            **self.select_result(),
            "strategy": self.strategy.strategy,
            "collective": self.strategy.collective,
            "bytes_per_pack": self.strategy.bytes_per_pack,
            "checkpoint_every": self.run.checkpoint_every,
            "steps_per_loop": self.training.steps_per_loop,
        }


def parse_label_map(pairs: Sequence[str]) -> dict[int | str, int]:
    """Returns value or color -> class, from what `--label_map` lists.

    >>> parse_label_map(["255:1", "128:2"])
    {255: 1, 128: 2}
    >>> parse_label_map(["#FF0000:1"])
    {'#ff0000': 1}

    Raises:
      TfdistError: an entry is not FROM:TO, a number is not in 0 .. 255, FROM is given twice, or
        values and colors are mixed.
    """
    label_map: dict[int | str, int] = {}
    for pair in pairs:
        match = re.fullmatch(r"(\d{1,3}|#[0-9a-fA-F]{6}):(\d{1,3})", pair.strip())
        numbers = [int(text) for text in match.groups() if text.isdigit()] if match else [256]
        if match is None or max(numbers) > 255:
            raise TfdistError(
                f"--label_map={pair} is not FROM:TO, a value from 0 to 255 or a color and its "
                "class. Write --label_map=255:1, or --label_map=#000000:0,#ff0000:1."
            )
        found: int | str = match[1].lower() if match[1].startswith("#") else int(match[1])
        if found in label_map:
            raise TfdistError(f"--label_map names {found} twice. Give it one class.")
        label_map[found] = int(match[2])
    if len({type(found) for found in label_map}) > 1:
        raise TfdistError(
            f"--label_map={','.join(pairs)} mixes values and colors. Name all colors, or values "
            "alone."
        )
    return label_map


def inherit(group: type, name: str, default: Any = dataclasses.MISSING, **metadata: Any) -> Any:
    """Returns the option of another group, possibly with another default or other metadata."""
    item = next(item for item in dataclasses.fields(group) if item.name == name)
    value = item.default if default is dataclasses.MISSING else default
    return field(default=value, metadata={**item.metadata, **metadata})


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
        (
            "one_device",
            "mirrored",
            "central_storage",
            "multi_worker_mirrored",
            "local_sgd",
            "parameter_server",
        ),
        "strategies to compare with one device",
        metavar="mirrored,local_sgd",
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
    image_size: tuple[int, int] = inherit(DataOptions, "image_size", (16, 16))
    base_filters: int = inherit(ModelOptions, "base_filters", 4)
    depth: int = inherit(ModelOptions, "depth", 1)
    norm: str = inherit(ModelOptions, "norm")
    global_batch_size: int = inherit(TrainingOptions, "global_batch_size", 9, **FIXED_BATCH_SIZE)
    optimizer: str = inherit(TrainingOptions, "optimizer")
    learning_rate: float = inherit(TrainingOptions, "learning_rate")
    clip_norm: float = inherit(TrainingOptions, "clip_norm")
    loss: str = inherit(TrainingOptions, "loss")
    precision: str = inherit(
        TrainingOptions,
        "precision",
        "float64",
        help="of the computation",
        choices=("float64", "float32", "mixed_bfloat16"),
    )
    seed: int = inherit(TrainingOptions, "seed")


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
