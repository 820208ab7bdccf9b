"""The arguments of a trainer and its methods, with the checks of the flags of the same names."""

from dataclasses import dataclass
from typing import Any

from tfdist.data.pipeline import MAX_SEED
from tfdist.errors import TfdistError
from tfdist.options import OptionGroup, inherit, option
from tfdist.strategies.builtin.mirrored import Mirrored
from tfdist.training.options import RunOptions, TrainingOptions


@dataclass(frozen=True, kw_only=True)
class TrainerArguments(OptionGroup):
    """The arguments of a trainer."""

    logical_replicas: int = inherit(Mirrored, "logical_replicas")
    checkpoint_dir: str | None = option(None, "directory of checkpoints")
    keep_checkpoints: int = inherit(RunOptions, "keep_checkpoints")
    seed: int | None = inherit(TrainingOptions, "seed", None, minimum=0, below=MAX_SEED + 1)


@dataclass(frozen=True, kw_only=True)
class BatchArguments(OptionGroup):
    """The numbers among the arguments of `evaluate` and `predict`."""

    steps: int | None = option(None, "batches that are read")
    batch_size: int | None = option(None, "examples per step", minimum=1)
    global_batch_size: int | None = option(None, "examples per step", minimum=1)
    verbose: Any = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        given = self.batch_size, self.global_batch_size
        if None not in given and given[0] != given[1]:
            raise TfdistError(
                f"batch_size={given[0]} and global_batch_size={given[1]} are two names for the "
                "examples per step, over all replicas. Give one of them."
            )
        is_number = isinstance(self.verbose, (int, bool)) and self.verbose >= 0
        if not (is_number or self.verbose in ("auto", None)):
            raise TfdistError(f"`verbose={self.verbose}` is unknown. Give 'auto', 0, 1 or 2.")

    @property
    def size(self) -> int | None:
        """The examples per step, over all replicas; None if not given."""
        return self.batch_size or self.global_batch_size


@dataclass(frozen=True, kw_only=True)
class FitArguments(BatchArguments):
    """The numbers among the arguments of `fit`."""

    epochs: int = inherit(TrainingOptions, "epochs", 1, minimum=0)
    initial_epoch: int = option(0, "the epoch in which training begins", minimum=0)
    max_steps: int | None = inherit(TrainingOptions, "max_steps")
    validation_split: float = option(0.0, "part of the data to validate on", minimum=0, below=1)
    validation_batch_size: int | None = option(None, "examples per step", minimum=1)
    steps_per_epoch: int | None = option(None, "batches of an epoch")
    validation_steps: int | None = option(None, "batches to validate on")
    validation_freq: Any = 1
    checkpoint_every: int | None = option(None, "steps between checkpoints", minimum=0)
    checkpoint_every_s: float | None = option(None, "seconds between checkpoints", minimum=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        every = self.validation_freq
        is_number = isinstance(every, int) and not isinstance(every, bool) and every >= 1
        if not (is_number or isinstance(every, (list, tuple, set))):
            raise TfdistError(
                f"`validation_freq={every}` says no epochs. Give a number of epochs, 1 or more, or "
                "a list of epochs."
            )


def check_kind(name: str, value: object, kind: type) -> None:
    """Raises a TfdistError if an argument is neither None nor of a kind."""
    if value is not None and not isinstance(value, kind):
        raise TfdistError(
            f"`{name}={value!r}` is a {type(value).__name__}. Give a {kind.__name__}, or None."
        )
