"""The options of training, and of the files that a run writes; standard library only."""

from dataclasses import dataclass

from tfdist.options import OptionGroup, option
from tfdist.training.optimizers import OptimizerOptions

PRECISIONS = ("float32", "float64", "mixed_bfloat16", "mixed_float16")
TRACKERS = ("csv", "mlflow", "wandb")
AUTO_BATCH_SIZE = 0  # stands for `global_batch_size=auto` until a number is found


@dataclass(frozen=True, kw_only=True)
class TrainingOptions(OptimizerOptions):
    """How the model is trained."""

    epochs: int = option(
        10,
        "number of epochs; a higher number continues a finished run",
        minimum=1,
        may_increase=True,
    )
    max_steps: int | None = option(
        None, "total number of steps; overrides --epochs", metavar="N", minimum=1, may_increase=True
    )
    early_stopping: int = option(
        0,
        "end training after so many epochs without an improvement of the metric that the task "
        "watches; 0 to never end early",
        minimum=0,
    )
    init_from: str = option(
        "",
        "a finished run whose weights this run starts with, where names and shapes match",
        metavar="DIR_OR_FILE",
        must_exist="Name a finished run, or a .keras file.",
    )
    global_batch_size: int = option(
        16,
        "examples per step, over all replicas; auto: as many as fit in memory, found by trials",
        minimum=1,
        auto=AUTO_BATCH_SIZE,
        metavar="N|auto",
    )
    precision: str = option(
        "float32",
        "dtype policy; auto: mixed_bfloat16 if the hardware supports it, else float32",
        choices=(*PRECISIONS, "auto"),
    )
    seed: int = option(0, "seed of the initial weights, the data order and the augmentation")
    deterministic: bool = option(
        False, "use only kernels that give bitwise reproducible results (slower on GPUs)"
    )


@dataclass(frozen=True, kw_only=True)
class RunOptions(OptionGroup):
    """What the run writes."""

    run_dir: str = option(
        "runs/default",
        "directory for all files of the run; the same command continues the run",
        metavar="DIR",
        result=False,
    )
    checkpoint_every: str = option(
        "0",
        "steps, or seconds such as 90s, between checkpoints, in addition to each epoch; 0 for none",
        metavar="N|Ns",
        result=False,
        must_match=True,
    )
    keep_checkpoints: int = option(3, "number of checkpoints to keep", result=False, minimum=1)
    grace_period_s: float = option(
        25.0, "seconds from SIGTERM to the end, including a checkpoint", result=False, above=0
    )
    log_every: int = option(
        0,
        "steps between lines of metrics.jsonl, in addition to one per epoch; 0 for none",
        result=False,
        minimum=0,
    )
    sample_every: int = option(
        1,
        "epochs between pictures of predictions, in RUN_DIR/samples and TensorBoard; 0 for none",
        result=False,
        must_match=True,
        minimum=0,
    )
    tensorboard: bool = option(True, "write TensorBoard events", result=False)
    track: tuple[str, ...] = option(
        (),
        "send the lines of metrics.jsonl to experiment trackers as well; none by default",
        choices=TRACKERS,
        metavar="NAME,NAME",
        result=False,
    )
    profile: tuple[int, ...] = option(
        (),
        "first and last step to trace for TensorBoard's profile plugin; none by default",
        metavar="STEP,STEP",
        result=False,
    )
    xla_cache: str = option(
        "auto",
        "directory that keeps what XLA compiles, for the next start; auto: ~/.cache/tfdist/xla "
        "with --jit_compile; none",
        metavar="DIR|auto|none",
        result=False,
    )
    dry_run: bool = option(
        False, "print what would run, without starting or writing anything", result=False
    )
    quiet: bool = option(False, "print nothing but errors", result=False)
    verbose_tensorflow: bool = option(False, "show TensorFlow's own messages", result=False)
