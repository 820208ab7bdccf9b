"""The options of `python -m tfdist.train`."""

import re
from dataclasses import dataclass
from typing import ClassVar

from tfdist.cluster import resolve_cluster
from tfdist.errors import TfdistError
from tfdist.options import CommandOptions
from tfdist.placement.options import PlacementOptions
from tfdist.records.durable_files import exists, is_local
from tfdist.records.run_directory import find_run_directory
from tfdist.strategies.options import StrategyOptions, make_strategy_options
from tfdist.tasks.registry import TaskOptions, make_task_options
from tfdist.training.options import RunOptions, TrainingOptions
from tfdist.training.step_options import StepOptions

_ANY_STRATEGY, _ANY_TASK = make_strategy_options(), make_task_options()
_PLACEMENT = PlacementOptions()
_TRAINING, _STEP, _RUN = TrainingOptions(), StepOptions(), RunOptions()


@dataclass(frozen=True, kw_only=True)
class TrainOptions(CommandOptions):
    """All options of `python -m tfdist.train`."""

    common: ClassVar[tuple[str, ...]] = (
        *("strategy", "virtual_devices", "devices", "task", "preset", "dataset", "data_dir"),
        *("num_classes", "image_size", "model", "loss", "optimizer", "learning_rate", "epochs"),
        *("max_steps", "early_stopping", "init_from", "global_batch_size", "micro_batches"),
        *("precision", "seed", "run_dir", "checkpoint_every", "dry_run", "quiet"),
    )

    strategy: StrategyOptions = _ANY_STRATEGY
    placement: PlacementOptions = _PLACEMENT
    task: TaskOptions = _ANY_TASK
    training: TrainingOptions = _TRAINING
    step: StepOptions = _STEP
    run: RunOptions = _RUN

    def reads_inputs(self) -> bool:
        """Returns whether a run begins here: others may do without, such as parameter servers."""
        path = find_run_directory(self.run.run_dir).path
        began = not is_local(path) or exists(f"{path}/options.json")
        return not began and resolve_cluster() is None

    def check(self) -> None:
        """Checks the values that need more than a range or a list of choices."""
        self.parse_checkpoint_every()
        self.parse_profile()
        self.task.select().check()

    def parse_checkpoint_every(self) -> tuple[int, float]:
        """Returns the steps and the seconds between checkpoints; 0 for none.

        >>> TrainOptions(run=RunOptions(checkpoint_every="90s")).parse_checkpoint_every()
        (0, 90.0)
        """
        text = self.run.checkpoint_every
        match = re.fullmatch(r"(\d+)|(\d+(?:\.\d+)?)s", text)
        if match is None:
            raise TfdistError(
                f"--checkpoint_every={text} is neither steps nor seconds. Write 500 or 90s."
            )
        return int(match[1] or 0), float(match[2] or 0)

    def parse_profile(self) -> tuple[int, int] | None:
        """Returns the first and the last step to trace, or None.

        >>> TrainOptions(run=RunOptions(profile=(10, 12))).parse_profile()
        (10, 12)
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
                f"--profile traces single steps, but --steps_per_loop={loop} runs several at a "
                "time. Leave one of them out."
            )
        return steps[0], steps[1]
