"""The workload of a training command."""

import dataclasses
from typing import TYPE_CHECKING, Any

import keras

from tfdist import devices
from tfdist.aliases import Nested
from tfdist.errors import TfdistError
from tfdist.placement.costs import estimate_costs
from tfdist.placement.graph import make_graph
from tfdist.placement.stages.cutting import balance_memory, count_kept, cut
from tfdist.plan.hardware import Hardware
from tfdist.plan.workload import Workload, count_state, make_layers
from tfdist.runs import processes
from tfdist.runs.dry_run import find_inputs
from tfdist.runs.options import TrainOptions
from tfdist.strategies.options import StrategyOptions
from tfdist.training.options import AUTO_BATCH_SIZE
from tfdist.training.replicas.step_checks import check_model

if TYPE_CHECKING:
    import tensorflow as tf


def make_workload(options: TrainOptions, hardware: Hardware) -> Workload:
    """Returns what a training command computes. Builds its model, and reads no examples.

    Args:
      hardware: decides what `precision=auto` is.

    Raises:
      TfdistError: the batch size is to be found by trials; the layers of the model are known only
        while it runs; or its batch cannot be split into the micro-batches that are given.
    """
    options.check()
    training = options.training
    if training.global_batch_size == AUTO_BATCH_SIZE:
        raise TfdistError(
            "`global_batch_size=auto` is found by trials on the real machine. Give a number."
        )
    if training.precision == "auto":
        training = dataclasses.replace(training, precision=_choose_precision(hardware))
    hardware.find_peak(training.precision)
    devices.configure_precision(training.precision)
    task = options.task.select()
    data = task.describe_data(seed=training.seed)
    build = processes.make_build_model(
        task.without_downloads(), training, data.info, total_steps=training.max_steps or 1
    )
    model = build()
    refusal = _find_refusal(options, model, find_inputs(model, data))
    return describe_model(
        model,
        options,
        precision=training.precision,
        num_examples=data.num_examples or 0,
        refusal=refusal,
    )


def describe_model(
    model: keras.Model,
    options: TrainOptions,
    *,
    precision: str,
    num_examples: int = 0,
    refusal: str = "",
) -> Workload:
    """Returns the workload of a built and compiled model.

    Args:
      precision: the precision, no longer `auto`.
      num_examples: the examples of an epoch; 0 if unknown.

    Raises:
      TfdistError: the layers of the model are known only while it runs.
    """
    step = options.step
    return Workload(
        layers=make_layers(model, syncs=step.batch_norm == "global"),
        global_batch_size=options.training.global_batch_size,
        optimizer=count_state(model.optimizer, model.trainable_variables),
        precision=precision,
        num_examples=num_examples,
        micro_batches=step.micro_batches,
        rematerialized=_count_rematerialized(model) if step.rematerialize else None,
        refusal=refusal,
        compressed=0.5 if step.compress_gradients else 1.0,
        **_select(options.strategy),
    )


def _select(strategy: StrategyOptions) -> dict[str, Any]:
    names = ("bytes_per_pack", "sync_every", "all_reduce")
    return {name: getattr(strategy, name) for name in names}


def _count_rematerialized(model: keras.Model) -> float:
    graph = make_graph(model)
    costs = estimate_costs(graph)
    return count_kept(cut(graph, balance_memory(graph, costs)), costs, graph)


def _find_refusal(options: TrainOptions, model: keras.Model, x_spec: "Nested[tf.TypeSpec]") -> str:
    """Returns why the model's batch cannot be split into micro-batches; empty if it can."""
    step = dataclasses.replace(options.step, micro_batches=2)
    try:
        check_model(step, model, x_spec, is_mirrored=False, num_replicas=1, has_parts=False)
    except TfdistError as error:
        if options.step.micro_batches > 1:
            raise
        return str(error).partition(": ")[2].partition(".")[0] or str(error)
    return ""


def _choose_precision(hardware: Hardware) -> str:
    peaks = hardware.flops_per_s
    faster = peaks.get("mixed_bfloat16", 0.0) > peaks["float32"]
    return "mixed_bfloat16" if faster else "float32"
