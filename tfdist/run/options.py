"""What `python -m tfdist.run` takes before the script."""

from dataclasses import dataclass
from typing import ClassVar

from tfdist.options import CommandOptions, OptionGroup, option
from tfdist.strategies.options import StrategyOptions, make_strategy_options
from tfdist.training.step_options import StepOptions


@dataclass(frozen=True, kw_only=True)
class ProcessOptions(OptionGroup):
    """How it is started."""

    workers: int = option(
        0, "start a cluster of so many workers on this machine; 0 for this process", minimum=0
    )
    ps: int = option(0, "parameter servers of that cluster; adds a chief", minimum=0)
    max_restarts: int = option(
        0, "of that cluster: how often its tasks are started again after a failure", minimum=0
    )
    log_dir: str = option(
        "", "of that cluster: where logs/ goes; a temporary directory by default", metavar="DIR"
    )
    verbose_tensorflow: bool = option(False, "show TensorFlow's own messages")


_STRATEGY, _STEP = make_strategy_options(), StepOptions()


@dataclass(frozen=True, kw_only=True)
class ScriptOptions(CommandOptions):
    """Everything that `python -m tfdist.run` takes before the script.

    Attributes:
      strategy, step, run: the groups.
    """

    rest: ClassVar[str] = " script.py [ARGUMENT ...]"

    strategy: StrategyOptions = _STRATEGY
    step: StepOptions = _STEP
    run: ProcessOptions = ProcessOptions()
