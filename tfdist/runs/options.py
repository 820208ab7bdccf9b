"""What `python -m tfdist.train` takes."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from tfdist.errors import TfdistError
from tfdist.options import CommandOptions, OptionGroup, option
from tfdist.strategies.options import StrategyOptions, make_strategy_options
from tfdist.training.step_options import StepOptions

PRECISIONS = ("float32", "float64", "mixed_bfloat16", "mixed_float16")
AUTO_BATCH_SIZE = 0  # what `--global_batch_size=auto` is until a number is found


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
        choices=(*PRECISIONS, "auto"),
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
        alike=True,
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


_ANY_STRATEGY, _STEP = make_strategy_options(), StepOptions()


@dataclass(frozen=True, kw_only=True)
class TrainOptions(CommandOptions):
    """Everything that `python -m tfdist.train` takes.

    Attributes:
      strategy, data, model, training, step, run: the groups.
    """

    strategy: StrategyOptions = _ANY_STRATEGY
    data: DataOptions = DataOptions()
    model: ModelOptions = ModelOptions()
    training: TrainingOptions = TrainingOptions()
    step: StepOptions = _STEP
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
        loop = self.step.steps_per_loop
        if loop > 1:
            raise TfdistError(
                f"--profile traces single steps, and --steps_per_loop={loop} runs several at a "
                "time. Leave one of them out."
            )
        return steps[0], steps[1]


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
