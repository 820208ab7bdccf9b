"""A run before it is built, with which both training and a dry run begin."""

from dataclasses import dataclass

from tfdist.cluster import ClusterConfig
from tfdist.data.pipeline import steps_per_epoch
from tfdist.runs import processes
from tfdist.runs.batch_size.choice import recall_batch_size
from tfdist.runs.options import TrainOptions
from tfdist.strategies.base import Traits
from tfdist.tasks.base import Task
from tfdist.training.options import TrainingOptions
from tfdist.training.run_directory import RunDirectory, find_run_directory
from tfdist.training.trackers import check_trackers


@dataclass(frozen=True)
class Plan:
    """A run whose process is configured.

    Attributes:
      options: the options, with everything resolved that depends on the machine, the cluster or
        an earlier start, except a batch size that must still be found.
      run: the run directory.
      cluster: the cluster that this process belongs to; None for a single process.
      traits: the strategy's traits.
      task: the task that is trained.
    """

    options: TrainOptions
    run: RunDirectory
    cluster: ClusterConfig | None
    traits: Traits
    task: Task


def make_plan(options: TrainOptions) -> Plan:
    """Joins the cluster, configures this process and resolves what the options leave open.

    Raises:
      TfdistError: the options do not suit one another, the machine or the cluster.
    """
    options.check()
    check_trackers(options.run.track)
    run = find_run_directory(options.run.run_dir)
    options, cluster = processes.start_process(options)
    options = recall_batch_size(options, run)
    traits = options.strategy.select().traits
    return Plan(options, run, cluster, traits, options.task.select())


def count_steps(training: TrainingOptions, num_examples: int) -> tuple[int, int]:
    """Returns the number of steps per epoch, and of the run.

    Args:
      training: the training options, with a batch size.
      num_examples: the number of training examples.
    """
    epoch_steps = steps_per_epoch(num_examples, training.global_batch_size)
    return epoch_steps, training.max_steps or training.epochs * epoch_steps
