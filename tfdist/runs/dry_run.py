"""Describes what a training command would do, without starting or writing anything."""

import math
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from tfdist.cluster import ClusterConfig
from tfdist.devices import ACCELERATORS, list_devices
from tfdist.errors import TfdistError
from tfdist.placement.costs import count_bytes, estimate_costs
from tfdist.placement.graph import find_functional, make_graph
from tfdist.placement.stages.cutting import balance_memory, count_kept, cut
from tfdist.records.run_directory import find_run_directory
from tfdist.runs import processes
from tfdist.runs.options import TrainOptions
from tfdist.runs.plan import LEAST_STEPS, Plan, count_steps, make_plan
from tfdist.strategies.registry import find_strategy
from tfdist.tasks.data import DataPlan
from tfdist.training.checkpoint.files import CheckpointStore
from tfdist.training.inputs.make_adapter import check_global_batch
from tfdist.training.options import AUTO_BATCH_SIZE
from tfdist.training.replicas.step_checks import check_model
from tfdist.training.step.model_variables import build_outputs

_FILES = (
    *("options.json", "checkpoints/", "metrics.jsonl", "tensorboard/", "model.keras"),
    "summary.json",
)
_TILE = (8, 128)  # examples and channels


@dataclass(frozen=True)
class MemoryEstimate:
    """The memory that training uses on one replica, in bytes.

    Attributes:
      activations: every layer's output for the examples that the replica computes at a time, which
        the backward pass needs; with rematerialization, the outputs between stages and those in
        the largest stage. Kernels' workspaces and the framework itself come on top. None for a
        subclass of `keras.Model`, which does not say what its layers return.
    """

    state: int
    activations: int | None


def describe_dry_run(options: TrainOptions) -> str:
    """Returns a readable description of what a command would do.

    Everything is resolved as in training, and the model is built in this process. No server is
    started, no data is read or downloaded, and no file is written.

    Raises:
      TfdistError: training would refuse the command before its first step. Errors in the examples
        themselves, or between several workers, are found only by a real start.
    """
    plan = make_plan(options)
    options, cluster = plan.options, plan.cluster
    training, step = options.training, options.step
    name, replicas, where = _find_replicas(options, cluster)
    asynchronous = plan.traits.has_servers
    sharing = 1 if asynchronous else replicas
    # For `auto`, the smallest possible batch stands in until the size is found.
    size = training.global_batch_size or sharing * step.micro_batches
    check_global_batch(size, num_replicas=sharing, micro_batches=step.micro_batches)
    rows = math.ceil(size / sharing)
    task = plan.task
    data = task.describe_data(seed=training.seed)
    total_steps, epoch_steps = training.max_steps, None
    if data.num_examples and training.global_batch_size:
        epoch_steps, total_steps = count_steps(training, data.num_examples)
    task.make_augmentation(data.info)
    model = processes.make_build_model(
        task.without_downloads(), training, data.info, total_steps=total_steps or 1
    )()
    x_spec = find_inputs(model, data)
    placement = options.placement.select()
    if not all(layer.built for layer in model._flatten_layers()):
        build_outputs(model, x_spec)
    check_model(
        options.step,
        model,
        x_spec,
        is_mirrored=plan.traits.copies_variables,
        num_replicas=sharing,
        has_parts=step.rematerialize or (placement is not None and placement.has_parts),
    )
    memory = estimate_memory(
        model, math.ceil(rows / step.micro_batches), rematerialize=step.rematerialize
    )
    is_found = training.global_batch_size != AUTO_BATCH_SIZE
    unknown = "the data is read" if is_found else "the batch size is found"
    lines = {
        "cluster": cluster.describe() if cluster else "none: this is a single process",
        "strategy": f"{name}: {where}{_describe_trials(plan, total_steps)}",
        "global batch": _describe_batch(options, rows, asynchronous=asynchronous),
        "data": data.text,
        "steps": f"{total_steps or f'known once {unknown}'}"
        + (f", {epoch_steps} per epoch" if epoch_steps else ""),
        "model": f"{task.describe_model()}, {model.count_params():,} parameters, "
        f"{training.precision}",
        "memory": ("" if is_found else "for the smallest batch, ") + _describe_memory(memory),
        "run directory": _describe_run_directory(options),
        "files": ", ".join(
            name
            for name in (*_FILES, *task.pictures)
            if options.run.tensorboard or name != "tensorboard/"
        ),
    }
    if plan.traits.fixes_shapes:
        lines["padding"] = describe_padding(model, size)
    width = max(map(len, lines))
    text = "\n".join(
        f"{title:<{width}}  {value}".replace("\n", f"\n{'':<{width}}  ")
        for title, value in lines.items()
    )
    return f"{text}\nA dry run: nothing was started or written."


def describe_padding(model: keras.Model, global_batch_size: int) -> str:
    """Returns a description of what a TPU pads, which computes with whole tiles of arrays.

    Source: https://docs.cloud.google.com/tpu/docs/performance-guide
    """
    rows, channels = _TILE
    weights = [w for w in model.trainable_weights if len(w.shape) > 1]
    padded = [w for w in weights if w.shape[-1] % channels]
    text = f"{len(padded)} of {len(weights)} layers have outputs that are padded"
    if padded:
        text += f", such as {padded[0].path} with {padded[0].shape[-1]} channels"
    cores = [cores for cores in (8, 4, 2, 1) if global_batch_size % (rows * cores) == 0]
    filled = f"fills the tiles on up to {_count(cores[0], 'core')}" if cores else "is padded, too"
    return (
        f"a TPU computes in tiles of {rows} examples and {channels} channels\n{text}\n"
        f"a global batch of {global_batch_size} {filled}"
    )


def estimate_memory(
    model: keras.Model, num_rows: int, *, rematerialize: bool = False
) -> MemoryEstimate:
    """Returns the memory of a training step, of a built model with an optimizer's variables."""
    model.optimizer.build(model.trainable_variables)
    state = sum(
        count_bytes(variable.shape, variable.dtype)
        for variable in [
            *model.weights,
            *model.trainable_variables,  # each has a gradient
            *model.optimizer.variables,
        ]
    )
    if find_functional(model) is None:
        return MemoryEstimate(state=state, activations=None)
    graph = make_graph(model)
    costs = estimate_costs(graph)
    kept = sum(cost.activations for cost in costs)
    if rematerialize:
        kept = count_kept(cut(graph, balance_memory(graph, costs)), costs, graph)
    return MemoryEstimate(state=state, activations=round(kept) * num_rows)


def find_inputs(model: keras.Model, data: DataPlan) -> Any:
    """Returns the specs of a batch of inputs, if they are known before reading the data."""
    if data.element_spec is not None:
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data.element_spec)
        return tf.nest.map_structure(lambda s: tf.TensorSpec((None, *s.shape), s.dtype), x)
    inputs = getattr(model, "inputs", None)
    if not inputs:
        raise TfdistError(
            "Cannot describe this model before its data is read. Leave out --dry_run."
        )
    specs = [tf.TensorSpec(x.shape, x.dtype) for x in inputs]
    return specs[0] if len(specs) == 1 else specs


def _describe_memory(memory: MemoryEstimate) -> str:
    state = f"{_to_mib(memory.state)} weights, gradients and optimizer"
    if memory.activations is None:
        return f"{state} (MiB per replica); activations come on top"
    total = _to_mib(memory.state + memory.activations)
    return f"about {total} MiB per replica: {state}, {_to_mib(memory.activations)} activations"


def _find_replicas(options: TrainOptions, cluster: ClusterConfig | None) -> tuple[str, int, str]:
    """Returns the strategy's name, its number of replicas, and a description of them."""
    name = options.strategy.strategy
    traits = find_strategy(name).traits
    if traits.is_local:
        strategy = processes.build_strategy(options)
        places = [d.rpartition("device:")[2] for d in strategy.extended.worker_devices]
        return name, len(places), f"{_count(len(places), 'replica')} on {', '.join(places)}"
    if traits.is_remote:
        return name, 1, "as many replicas as the TPU has cores, known only after connecting"
    workers = cluster.num_workers if cluster else 1
    accelerators = [d for d in list_devices() if d.partition(":")[0] in ACCELERATORS]
    each = 1 if traits.has_servers else max(1, len(accelerators))
    return (
        name,
        workers * each,
        f"{_count(workers * each, 'replica')} on {_count(workers, 'worker')} like this one",
    )


def _describe_trials(plan: Plan, total_steps: int | None) -> str:
    if plan.is_open and (total_steps is None or total_steps >= LEAST_STEPS):
        return "; auto may choose another one by trials when training starts"
    return ""


def _describe_batch(options: TrainOptions, rows: int, *, asynchronous: bool) -> str:
    training, step = options.training, options.step
    parts = f", in {step.micro_batches} micro-batches" if step.micro_batches > 1 else ""
    if training.global_batch_size == AUTO_BATCH_SIZE:
        return f"auto: found when training starts{parts}"
    share = "a whole batch for each worker" if asynchronous else f"at most {rows} per replica"
    return f"{training.global_batch_size} examples, {share}{parts}"


def _describe_run_directory(options: TrainOptions) -> str:
    run = find_run_directory(options.run.run_dir)
    if not run.check(options.select_result(), may_increase=options.list_growing()):
        return f"{run.path}, new"
    steps = CheckpointStore(run.checkpoints).list_steps()
    return f"{run.path}, continued after step {steps[-1] if steps else 0}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _to_mib(count: int) -> int:
    return math.ceil(count / 2**20)
