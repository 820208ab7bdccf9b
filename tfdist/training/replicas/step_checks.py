"""Checks that a strategy can run a program, and compute its steps as the options say."""

import re

import keras
import tensorflow as tf

from tfdist.aliases import Nested
from tfdist.errors import TfdistError
from tfdist.placement.checks import check_parts, trace_call
from tfdist.placement.options import Placement, Shards, Strips
from tfdist.strategies.base import Traits
from tfdist.strategies.logical_replicas import read_numerics
from tfdist.strategies.registry import find_traits
from tfdist.training.replicas.compilation import check_compilation, describe_layer
from tfdist.training.replicas.loss_scaling import get_inner_optimizer
from tfdist.training.replicas.optimizers import list_optimizers
from tfdist.training.replicas.random_layers import list_seed_generators
from tfdist.training.step_options import StepOptions

FUNCTION_METHODS = ("make_train_function", "make_test_function", "make_predict_function")


def overrides(model: keras.Model, *names: str) -> list[str]:
    """Returns which of some methods of `keras.Model` a model's class, or the model, overrides."""
    return [
        name
        for name in names
        if name in vars(model) or getattr(type(model), name) is not getattr(keras.Model, name)
    ]


def check_names(model: keras.Model) -> None:
    """Checks that the graph of a step can have the names of the model and its layers.

    Where it cannot, Keras's own `fit` fails, and leaves a scope open for models that come later.
    """
    for layer in model._flatten_layers():
        first = r"[A-Za-z0-9.]" if layer is model else ""
        if not re.fullmatch(rf"{first}[A-Za-z0-9_.\\/>-]*", layer.name):
            raise TfdistError(
                f"TensorFlow cannot train {type(layer).__name__} under the name {layer.name!r}. "
                "Give it a `name` of letters, digits and underscores that begins with a letter."
            )


def check_strategy(
    options: StepOptions,
    strategy: tf.distribute.Strategy,
    *,
    num_workers: int,
    placement: Placement | None = None,
) -> None:
    """Checks that a strategy can compute its steps as the options say."""
    name = type(strategy).__name__
    traits = find_traits(strategy)
    if options.steps_per_loop > 1 and _trains_apart(strategy, num_workers):
        raise TfdistError(
            f"{name} does not support `steps_per_loop` (given: {options.steps_per_loop}): its host "
            "has work to do at each step. Leave it out, or use another strategy."
        )
    if options.micro_batches > 1 and traits.has_servers:
        raise TfdistError(
            f"{name} does not support `micro_batches` (given: {options.micro_batches}): a worker "
            "computes its whole batch at once. Give a smaller `global_batch_size`, or use another "
            "strategy."
        )
    if options.shard_tables_bytes and not traits.has_servers:
        raise TfdistError(
            f"{name} does not support `shard_tables_bytes`: it has no parameter servers. Leave it "
            "out, or give `strategy=parameter_server`."
        )
    crosses_network = traits.has_workers and not traits.local_updates
    if options.compress_gradients and not crosses_network:
        raise TfdistError(
            f"{name} does not support `compress_gradients`: no gradient crosses a network. Leave "
            "it out, or give `strategy=multi_worker_mirrored`."
        )
    if options.jit_compile and (traits.has_servers or traits.shares_variables):
        raise TfdistError(
            f"{name} does not support `jit_compile`: XLA can only read variables on its own "
            "device. Leave it out, or use another strategy."
        )
    if options.rematerialize and (options.jit_compile or traits.fixes_shapes):
        raise TfdistError(
            "XLA does not support `rematerialize`: it decides by itself what to recompute. Leave "
            "it out, or leave out `jit_compile` and use a strategy other than tpu."
        )
    if options.gather_outputs and traits.local_updates and num_workers > 1:
        raise TfdistError(
            f"{name} does not support `gather_outputs`: each worker trains on its own batches. "
            "Leave it out, or give `strategy=multi_worker_mirrored`."
        )
    if options.gather_outputs and (options.micro_batches > 1 or options.jit_compile):
        other = (
            "`micro_batches`, which compute the loss of a part of a replica's examples"
            if options.micro_batches > 1
            else "`jit_compile`, under which replicas cannot communicate"
        )
        raise TfdistError(
            f"`gather_outputs` cannot be combined with {other}. Leave one of them out."
        )
    _check_placement(options, traits, name, placement)
    refused = {"placement": placement is not None, "shard_optimizer": options.shard_optimizer}
    refused["jit_compile"] = options.jit_compile
    conflict = next((key for key, is_given in refused.items() if is_given), None)
    if conflict and read_numerics(strategy):
        raise TfdistError(
            f"`logical_replicas` cannot be combined with `{conflict}`, which has another order of "
            "sums. Leave one of them out."
        )
    if options.rematerialize and traits.has_servers:
        raise TfdistError(
            f"{name} does not support `rematerialize`: a worker computes its whole model at once. "
            "Leave it out, or use another strategy."
        )


def can_shard_optimizer(traits: Traits) -> bool:
    """Returns whether a strategy has replicas over which an optimizer's state can be divided."""
    return traits.copies_variables and not (traits.local_updates or traits.fixes_shapes)


def _check_placement(
    options: StepOptions, traits: Traits, name: str, placement: Placement | None
) -> None:
    """Checks that a strategy leaves the places of variables to a placement, if there is one."""
    is_placed = placement is not None
    if is_placed and (traits.has_servers or traits.shares_variables or traits.fixes_shapes):
        raise TfdistError(
            f"{name} does not support `placement`, because it decides itself where variables are. "
            "Leave it out, or use one_device, mirrored or multi_worker_mirrored."
        )
    if options.shard_optimizer and not can_shard_optimizer(traits):
        raise TfdistError(
            f"{name} does not support `shard_optimizer`, which divides the optimizer's state over "
            "replicas with the same weights. Leave it out, or use mirrored or "
            "multi_worker_mirrored."
        )
    refused = {Shards: ("shard_optimizer", "rematerialize"), Strips: ("rematerialize",)}
    for other in refused.get(type(placement), ()):
        if placement is not None and getattr(options, other):
            raise TfdistError(
                f"`placement={placement.name}` cannot be combined with `{other}`. Leave one of "
                "them out."
            )
    if is_placed and options.jit_compile:
        raise TfdistError(
            "`placement` cannot be combined with `jit_compile`: XLA compiles for one device. Leave "
            "one of them out."
        )


def check_program(
    options: StepOptions,
    model: keras.Model,
    strategy: tf.distribute.Strategy,
    *,
    num_workers: int,
    is_placed: bool = False,
) -> None:
    """Checks that a strategy can run the program of a model's class and optimizer."""
    name = type(strategy).__name__
    is_asynchronous = find_traits(strategy).has_servers
    has_replicas = strategy.num_replicas_in_sync > 1 or num_workers > 1 or is_asynchronous
    functions = overrides(model, *FUNCTION_METHODS)
    changes = options.changes_gradient or options.fused_layers or is_placed
    if functions and (has_replicas or changes or options.steps_per_loop > 1):
        reason = (
            "does not support replicas"
            if has_replicas
            else "micro_batches, jit_compile, fused_layers, rematerialize, placement and "
            "steps_per_loop cannot change"
        )
        raise TfdistError(
            f"{type(model).__name__} overrides {functions[0]}, which {reason}. "
            "Override train_step, test_step or predict_step instead."
        )
    if functions and model.steps_per_execution > 1:
        raise TfdistError(
            f"{type(model).__name__} overrides {functions[0]}, which would run "
            f"{model.steps_per_execution} steps per call. Leave out steps_per_execution in "
            "compile()."
        )
    steps = overrides(model, "train_step")
    if steps and is_asynchronous:
        raise TfdistError(
            f"{name} cannot run {type(model).__name__}.train_step: a worker computes a gradient "
            "and updates nothing. Override compute_loss instead, or use another strategy."
        )
    if steps and options.changes_gradient:
        raise TfdistError(
            f"{type(model).__name__} overrides train_step, which micro_batches and jit_compile "
            "cannot change. Leave out these options."
        )
    if is_placed and (model.run_eagerly or tf.config.functions_run_eagerly()):
        raise TfdistError(
            "`placement` and `rematerialize` need compiled steps. Leave out run_eagerly in "
            "compile(), and tf.config.run_functions_eagerly."
        )
    optimizers = [get_inner_optimizer(o) for o in list_optimizers(model)]
    is_apart = _trains_apart(strategy, num_workers)
    if is_apart and any(o.gradient_accumulation_steps for o in optimizers):
        raise TfdistError(
            f"{name} does not support gradient_accumulation_steps: each worker makes its own "
            "steps. Leave it out, or use another strategy."
        )
    is_scaling = isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    if is_scaling and is_apart:
        raise TfdistError(
            f"{name} does not support `precision=mixed_float16` or a loss scale: each worker would "
            "scale its loss independently. Use mixed_bfloat16 or float32."
        )


def check_model(
    options: StepOptions,
    model: keras.Model,
    x_spec: Nested[tf.TypeSpec],
    *,
    is_mirrored: bool,
    num_replicas: int,
    has_parts: bool,
) -> None:
    """Checks that the steps of a model can be computed as the options say.

    Args:
      is_mirrored: whether each replica has a copy of the variables.
      num_replicas: the number of replicas that share a global batch.
      has_parts: whether the model is computed by parts: stages or strips.

    Raises:
      TfdistError: a layer updates a state from the examples it sees together, as batch
        normalization does, so the result would depend on how they are split; XLA would compile a
        layer that updates a state of all replicas or that has an unsupported operation; or the
        model cannot be computed by parts.
    """
    if has_parts:
        check_parts(model, x_spec, recomputes=options.rematerialize)
    stateful = [layer for layer in model._flatten_layers() if getattr(layer, "stateful", False)]
    if stateful and num_replicas > 1:
        raise TfdistError(
            f"Cannot divide a batch over {num_replicas} replicas: the layer "
            f"{describe_layer(stateful[0])} keeps a state per example from batch to batch. Leave "
            "out stateful=True, or train on one device."
        )
    layer = None
    if options.micro_batches > 1 or (options.jit_compile and is_mirrored):
        layer = _find_layer_of_batches(model, x_spec)
    if layer is not None and options.micro_batches > 1:
        raise TfdistError(
            f"Cannot split a batch into {options.micro_batches} micro-batches: the layer "
            f"{describe_layer(layer)} computes statistics over the examples it sees together. Use "
            "a normalization that does not, such as `norm=group`, freeze the layer, or leave out "
            "`micro_batches`."
        )
    if layer is not None:
        raise TfdistError(
            f"Cannot compile the step with XLA: the layer {describe_layer(layer)} updates "
            "variables that replicas share. Leave out `jit_compile`, or give "
            "`strategy=one_device` or `norm=group`."
        )
    if options.jit_compile:
        check_compilation(model, x_spec)


def _trains_apart(strategy: tf.distribute.Strategy, num_workers: int) -> bool:
    """Returns whether each worker makes its own steps."""
    is_local = find_traits(strategy).local_updates and num_workers > 1
    return is_local or find_traits(strategy).has_servers


def _find_layer_of_batches(
    model: keras.Model, x_spec: Nested[tf.TypeSpec]
) -> keras.layers.Layer | None:
    """Returns the first layer that updates a variable other than a seed in training, if any."""
    seeds = {id(generator.state) for generator in list_seed_generators(model)}
    _, changed = trace_call(model, x_spec)
    updated = {id(variable) for variable in changed} - seeds
    layers = model._flatten_layers(include_self=False)
    owners = (layer for layer in layers if any(id(v) in updated for v in _list_own(layer)))
    return next(owners, None)


def _list_own(layer: keras.layers.Layer) -> list[keras.Variable]:
    return [*layer._trainable_variables, *layer._non_trainable_variables]
