"""How a run learns, and what it leaves behind; standard library only."""

from dataclasses import dataclass

from tfdist.options import OptionGroup, option

PRECISIONS = ("float32", "float64", "mixed_bfloat16", "mixed_float16")
AUTO_BATCH_SIZE = 0  # what `global_batch_size=auto` is until a number is found


@dataclass(frozen=True, kw_only=True)
class TrainingOptions(OptionGroup):
    """How it learns."""

    epochs: int = option(
        10, "passes over the training data; more for a finished run", minimum=1, grows=True
    )
    max_steps: int | None = option(
        None, "steps in all; wins over --epochs", metavar="N", minimum=1, grows=True
    )
    early_stopping: int = option(
        0,
        "epochs without a better value of the metric that the task watches, after which training "
        "ends; 0 for none",
        minimum=0,
    )
    init_from: str = option(
        "",
        "a finished run whose weights this one begins with, where names and shapes agree",
        metavar="DIR",
    )
    global_batch_size: int = option(
        16,
        "examples a step, over all replicas; auto: as many as fit the memory, found by trials",
        minimum=1,
        auto=AUTO_BATCH_SIZE,
        metavar="N|auto",
    )
    optimizer: str = option("adam", "optimizer", choices=("adam", "adamw", "sgd"))
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
