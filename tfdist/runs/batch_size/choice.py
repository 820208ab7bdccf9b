"""Resolves `--global_batch_size=auto`: the size with which a run began, or a new one."""

import dataclasses

from tfdist.errors import TfdistError
from tfdist.memory import find_free_memory
from tfdist.records.run_directory import RunDirectory
from tfdist.runs.batch_size.search import Usage, search_largest
from tfdist.runs.batch_size.trials import Trial, format_bytes, run_trial
from tfdist.runs.options import TrainOptions
from tfdist.strategies.base import Traits
from tfdist.tasks.data import SourceData
from tfdist.training.options import AUTO_BATCH_SIZE

_FLAG = "`global_batch_size=auto`"


def recall_batch_size(options: TrainOptions, run: RunDirectory) -> TrainOptions:
    """Returns the options with the batch size that the run began with, if it is `auto`.

    Args:
      options: the options of the run, with a strategy other than `auto`.

    Raises:
      TfdistError: the run is new, and its strategy does not support the search.
    """
    if options.training.global_batch_size != AUTO_BATCH_SIZE:
        return options
    before = run.read_result()
    if before is not None:
        return _set(options, before["global_batch_size"])
    strategy = options.strategy.select()
    if not strategy.traits.is_local:
        raise TfdistError(
            f"`strategy={strategy.name}` does not support {_FLAG}, which works only in a single "
            f"process on CPUs or GPUs. Give a number: {_find_advice(strategy.traits)}."
        )
    return options


def find_batch_size(options: TrainOptions, *, data: SourceData, num_replicas: int) -> TrainOptions:
    """Returns the options with the largest global batch that fits, if it is `auto`.

    Args:
      data: the data of the run; a batch has at most all of the training examples.
      num_replicas: the number of replicas; the batch size is a multiple of it times micro-batches.

    Raises:
      TfdistError: not even the smallest batch fits, or there are not enough examples for it.
    """
    training = options.training
    if training.global_batch_size != AUTO_BATCH_SIZE:
        return options
    num_examples = data.train.num_examples
    unit = num_replicas * options.step.micro_batches
    if num_examples < unit:
        raise TfdistError(
            f"Cannot find {_FLAG}: it must be a multiple of {unit} (replicas x micro-batches: "
            f"{num_replicas} x {options.step.micro_batches}), but there are only {num_examples} "
            "training examples. Use fewer --devices or --micro_batches."
        )
    free = find_free_memory()
    trials: list[Trial] = []

    def say(text: str) -> None:
        if not options.run.quiet:
            print(f"{_FLAG}: {text}", flush=True)

    def try_size(size: int) -> Usage | None:
        trial = run_trial(options, size, data=data, free=free)
        trials.append(trial)
        if trial.usage is None:
            say(f"{size} examples per step do not fit: {trial.problem}.")
        else:
            used, limit = map(format_bytes, (trial.usage.peak, trial.usage.limit))
            say(f"{size} examples per step use {used} of {limit}.")
        return trial.usage

    size, usage = search_largest(try_size, unit=unit, most=num_examples)
    if usage is None:
        raise TfdistError(
            f"{_FLAG}: not even a batch of {unit} fits: {trials[-1].problem} "
            f"({format_bytes(free.bytes)} free {free.where}). Free memory, or use smaller examples "
            "or a smaller model."
        )
    why = (
        f"about as many as fit in {format_bytes(usage.limit)}, nine tenths of the memory that is "
        f"free {trials[-1].free.where}"
        if size + unit <= num_examples
        else f"as many as there are training examples ({num_examples})"
    )
    say(f"{size}, {why}. The result depends on it: from now on, use --global_batch_size={size}.")
    return _set(options, size)


def _find_advice(traits: Traits) -> str:
    """Returns advice on a batch size for a strategy that does not support the search."""
    if traits.is_remote:
        return "a few dozen examples per core"
    if traits.has_servers:
        return "what `strategy=one_device` finds on a worker's machine"
    return "what `strategy=mirrored` finds on one of the machines, times the workers"


def _set(options: TrainOptions, global_batch_size: int) -> TrainOptions:
    return dataclasses.replace(
        options, training=dataclasses.replace(options.training, global_batch_size=global_batch_size)
    )
