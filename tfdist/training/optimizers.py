"""The options of optimizers and learning-rate schedules, and what they build."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tfdist.options import OptionGroup, option

if TYPE_CHECKING:
    import keras


@dataclass(frozen=True, kw_only=True)
class OptimizerOptions(OptionGroup):
    """How the optimizer updates the weights."""

    optimizer: str = option("adam", "optimizer", choices=("adam", "adamw", "sgd"))
    learning_rate: float = option(2e-3, "the highest learning rate", above=0)
    schedule: str = option("cosine", "learning-rate schedule", choices=("cosine", "constant"))
    warmup_steps: int = option(
        50, "cosine: steps of a linear warm-up, at most a tenth of the run", minimum=0
    )
    weight_decay: float = option(1e-4, "adamw: decoupled weight decay", minimum=0)
    momentum: float = option(0.9, "sgd: momentum", minimum=0)
    clip_norm: float = option(
        1.0, "clip the gradient of the global batch to this norm; 0 for no clipping", minimum=0
    )
    ema_momentum: float = option(
        0.0,
        "evaluate and save an exponential moving average of the weights; its momentum, such as "
        "0.99",
        minimum=0,
        below=1,
    )


def make_schedule(
    options: OptimizerOptions, *, total_steps: int
) -> "float | keras.optimizers.schedules.LearningRateSchedule":
    """Builds the learning rate: a constant, or a linear warm-up and then a cosine to zero.

    Args:
      options: `learning_rate`, `schedule` and `warmup_steps`.
      total_steps: the steps of the run; the warm-up takes at most a tenth of them.

    Source: Loshchilov and Hutter 2017, arXiv:1608.03983 (cosine), without restarts.
    """
    import keras

    if options.schedule == "constant":
        return options.learning_rate
    warmup = min(options.warmup_steps, total_steps // 10)
    return keras.optimizers.schedules.CosineDecay(
        initial_learning_rate=0.0 if warmup else options.learning_rate,
        decay_steps=max(1, total_steps - warmup),
        warmup_target=options.learning_rate if warmup else None,
        warmup_steps=warmup,
    )


def make_optimizer(options: OptimizerOptions, *, total_steps: int) -> "keras.optimizers.Optimizer":
    """Builds the optimizer; clipping acts on the global batch's gradient."""
    import keras

    learning_rate = make_schedule(options, total_steps=total_steps)
    more: dict[str, Any] = {"global_clipnorm": options.clip_norm or None}
    if options.ema_momentum:
        more |= {"use_ema": True, "ema_momentum": options.ema_momentum}
    if options.optimizer == "sgd":
        return keras.optimizers.SGD(learning_rate, momentum=options.momentum, **more)
    if options.optimizer == "adamw":
        return keras.optimizers.AdamW(learning_rate, weight_decay=options.weight_decay, **more)
    return keras.optimizers.Adam(learning_rate, **more)
