"""The options of `python -m tfdist.run`, which precede the script."""

from dataclasses import dataclass
from typing import ClassVar

from tfdist.options import CommandOptions, OptionGroup, option
from tfdist.placement.options import PlacementOptions
from tfdist.strategies.options import StrategyOptions, make_strategy_options
from tfdist.training.step_options import StepOptions


@dataclass(frozen=True, kw_only=True)
class ProcessOptions(OptionGroup):
    """How the script is started."""

    workers: int = option(
        0, "workers of a cluster to start on this machine; 0 to run in this process", minimum=0
    )
    ps: int = option(0, "parameter servers of that cluster, which also gets a chief", minimum=0)
    max_restarts: int = option(
        0, "how often the tasks of that cluster are restarted after a failure", minimum=0
    )
    log_dir: str = option(
        "", "directory for the logs/ of that cluster; temporary by default", metavar="DIR"
    )
    seed: int | None = option(
        None,
        "seed that the script starts from, as if it called keras.utils.set_random_seed; by "
        "default a random one, the same for all workers",
        minimum=0,
    )
    xla_cache: str = option(
        "none",
        "directory that keeps what XLA compiles, for the next start; a script that allows only "
        "deterministic operations on GPUs needs one of its own; auto: ~/.cache/tfdist/xla",
        metavar="DIR|auto|none",
    )
    quiet: bool = option(False, "print nothing but errors, and what the script prints")
    verbose_tensorflow: bool = option(False, "show TensorFlow's own messages")


_STRATEGY, _PLACEMENT, _STEP = make_strategy_options(), PlacementOptions(), StepOptions()


@dataclass(frozen=True, kw_only=True)
class ScriptOptions(CommandOptions):
    """The options of `python -m tfdist.run`, which precede the script."""

    rest: ClassVar[str] = " script.py [ARGUMENT ...]"

    strategy: StrategyOptions = _STRATEGY
    placement: PlacementOptions = _PLACEMENT
    step: StepOptions = _STEP
    run: ProcessOptions = ProcessOptions()
