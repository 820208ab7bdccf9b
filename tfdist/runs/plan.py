"""A run before it is built, with which both training and a dry run begin."""

from dataclasses import dataclass

from tfdist.announcing import announce
from tfdist.cluster import ClusterConfig
from tfdist.data.pipeline import steps_per_epoch
from tfdist.devices import list_devices
from tfdist.placement.options import NONE
from tfdist.records.run_directory import RunDirectory, find_run_directory
from tfdist.runs import processes
from tfdist.runs.batch_size.choice import recall_batch_size
from tfdist.runs.options import TrainOptions
from tfdist.runs.trackers import check_trackers
from tfdist.strategies.base import Traits
from tfdist.strategies.registry import AUTO
from tfdist.tasks.base import Task
from tfdist.tasks.data import SourceData, to_sources
from tfdist.training.options import AUTO_BATCH_SIZE, TrainingOptions

LEAST_STEPS = 100
"""Trials of strategies are about as many steps, so a shorter run gains nothing from them."""


@dataclass(frozen=True)
class Plan:
    """A run whose process is configured.

    Attributes:
      options: the options, with everything resolved that depends on the machine, the cluster or
        an earlier start, except a batch size that must still be found.
      is_open: whether `auto` chose the strategy by the devices, and trials may choose another one.
    """

    options: TrainOptions
    run: RunDirectory
    cluster: ClusterConfig | None
    traits: Traits
    task: Task
    is_open: bool


def make_plan(options: TrainOptions) -> Plan:
    """Joins the cluster, configures this process and resolves what the options leave open."""
    options.check()
    check_trackers(options.run.track)
    run = find_run_directory(options.run.run_dir)
    is_auto = options.strategy.strategy == AUTO
    options, cluster = processes.start_process(options)
    options = recall_batch_size(options, run)
    traits = options.strategy.select().traits
    is_open = is_auto and cluster is None and _allows_trials(options)
    return Plan(options, run, cluster, traits, options.task.select(), is_open)


def read_data(plan: Plan) -> SourceData:
    """Makes the data of a run."""
    options = plan.options
    announce("Reading the data")
    data = plan.task.make_data(seed=options.training.seed, quiet=options.run.quiet)
    return to_sources(data)


def count_steps(training: TrainingOptions, num_examples: int) -> tuple[int, int]:
    """Returns the number of steps per epoch, and of the run."""
    epoch_steps = steps_per_epoch(num_examples, training.global_batch_size)
    return epoch_steps, training.max_steps or training.epochs * epoch_steps


def _allows_trials(options: TrainOptions) -> bool:
    """Returns whether several strategies of one process are possible, all with the same result."""
    if options.strategy.logical_replicas:  # type: ignore[attr-defined]
        return False
    named = options.strategy.devices or list_devices()  # type: ignore[attr-defined]
    return (
        len(named) > 1
        and not any("TPU" in device.upper() for device in named)
        and options.placement.placement == NONE
        # The moments of replicas, and the largest batch that fits, depend on the strategy.
        and options.step.batch_norm == "global"
        and options.training.global_batch_size != AUTO_BATCH_SIZE
    )
