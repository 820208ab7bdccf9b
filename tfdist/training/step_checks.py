"""Whether a strategy can run a program, and compute its steps as the options say."""

from typing import Any

import keras
import tensorflow as tf

from tfdist.errors import TfdistError
from tfdist.strategies.registry import find_traits
from tfdist.training.compilation import check_compilation, describe_layer
from tfdist.training.loss_scaling import get_inner_optimizer
from tfdist.training.randomness import list_seed_generators
from tfdist.training.rematerialize import check_stages
from tfdist.training.replica_optimizers import list_optimizers
from tfdist.training.step_options import StepOptions


def overrides(model: keras.Model, *names: str) -> list[str]:
    """Returns which of Keras's methods a model's class has of its own."""
    return [name for name in names if getattr(type(model), name) is not getattr(keras.Model, name)]


def check_strategy(
    options: StepOptions, strategy: tf.distribute.Strategy, *, num_workers: int
) -> None:
    """Checks that the steps of a strategy can be computed so.

    Raises:
      TfdistError: they cannot.
    """
    name = type(strategy).__name__
    traits = find_traits(strategy)
    if options.steps_per_loop > 1 and _trains_apart(strategy, num_workers):
        raise TfdistError(
            f"{name} does not take `steps_per_loop` (given: {options.steps_per_loop}): its host "
            "has work of its own at each step. Leave it out, or take another strategy."
        )
    if options.micro_batches > 1 and traits.has_servers:
        raise TfdistError(
            f"{name} does not take `micro_batches` (given: {options.micro_batches}): a worker "
            "computes its whole batch at once. Give a smaller `global_batch_size`, or take another "
            "strategy."
        )
    crosses_network = traits.has_workers and not traits.trains_apart
    if options.compress_gradients and not crosses_network:
        raise TfdistError(
            f"{name} does not take `compress_gradients`: no gradient crosses a network. Leave it "
            "out, or take `strategy=multi_worker_mirrored`."
        )
    if options.jit_compile and (traits.has_servers or traits.shares_variables):
        raise TfdistError(
            f"{name} does not take `jit_compile`: XLA reads variables of its own device only. "
            "Leave it out, or take another strategy."
        )
    if options.rematerialize and (options.jit_compile or traits.fixes_shapes):
        raise TfdistError(
            "XLA does not take `rematerialize`: it decides by itself what it computes again. Leave "
            "it out, or leave out `jit_compile` and take another strategy than tpu."
        )
    if options.gather_outputs and traits.trains_apart and num_workers > 1:
        raise TfdistError(
            f"{name} does not take `gather_outputs`: each worker trains on batches of its own. "
            "Leave it out, or take `strategy=multi_worker_mirrored`."
        )
    if options.gather_outputs and (options.micro_batches > 1 or options.jit_compile):
        other = "`micro_batches`" if options.micro_batches > 1 else "`jit_compile`"
        raise TfdistError(
            f"`gather_outputs` does not go with {other}, which computes the loss of a part of a "
            "replica's rows, or where no replica sees another. Leave one of them out."
        )
    if options.rematerialize and traits.has_servers:
        raise TfdistError(
            f"{name} does not take `rematerialize`: a worker computes its whole model at once. "
            "Leave it out, or take another strategy."
        )


def check_program(
    options: StepOptions, model: keras.Model, strategy: tf.distribute.Strategy, *, num_workers: int
) -> None:
    """Checks that a strategy can run what a model's class and optimizer say.

    Raises:
      TfdistError: it cannot.
    """
    name = type(strategy).__name__
    is_asynchronous = find_traits(strategy).has_servers
    has_replicas = strategy.num_replicas_in_sync > 1 or num_workers > 1 or is_asynchronous
    functions = overrides(
        model, "make_train_function", "make_test_function", "make_predict_function"
    )
    if functions:
        raise TfdistError(
            f"{type(model).__name__} has a {functions[0]} of its own, which knows no replicas. "
            "Override train_step, test_step or predict_step instead."
        )
    steps = overrides(model, "train_step")
    if steps and is_asynchronous:
        raise TfdistError(
            f"{name} cannot run {type(model).__name__}.train_step: a worker computes a gradient "
            "and updates nothing. Override compute_loss instead, or take another strategy."
        )
    if steps and options.changes_gradient:
        raise TfdistError(
            f"{type(model).__name__} has a train_step of its own, which micro_batches, jit_compile "
            "and rematerialize cannot change. Leave these out."
        )
    optimizers = [get_inner_optimizer(o) for o in list_optimizers(model)]
    if has_replicas and any(o.gradient_accumulation_steps for o in optimizers):
        raise TfdistError(
            "The optimizer has gradient_accumulation_steps, which Keras cannot run under "
            "tf.distribute. Leave it out, and give the trainer micro_batches."
        )
    is_scaling = isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    if is_scaling and _trains_apart(strategy, num_workers):
        raise TfdistError(
            f"{name} does not take `precision=mixed_float16`: each worker would "
            "scale its loss by itself. Take mixed_bfloat16 or float32."
        )


def check_model(
    options: StepOptions, model: keras.Model, x_spec: Any, *, is_mirrored: bool, num_replicas: int
) -> None:
    """Checks that the steps of a model can be computed so.

    Args:
      options: how.
      model: a built model.
      x_spec: structure of `tf.TensorSpec` of its inputs.
      is_mirrored: whether each replica has a copy of the variables.
      num_replicas: how many share a global batch.

    Raises:
      TfdistError: a layer updates a state by the rows it sees together, as batch normalization
        does, so that the result would depend on how they are cut; or XLA is to compile one that
        draws, that updates a state of all replicas or has an operation that XLA does not know; or
        the model cannot be computed again.
    """
    if options.rematerialize:
        check_stages(model, x_spec)
        updated = {id(variable) for variable in find_updated(model, x_spec)}
        assigned = [v for v in model.trainable_variables if id(v) in updated]
        if assigned:
            raise TfdistError(
                f"Cannot compute the model {model.name!r} again by stages: a layer assigns its own "
                f"weight {assigned[0].path}. Leave out `rematerialize`."
            )
    stateful = [layer for layer in model._flatten_layers() if getattr(layer, "stateful", False)]
    if stateful and num_replicas > 1:
        raise TfdistError(
            f"Cannot divide a batch over {num_replicas} replicas: the layer "
            f"{describe_layer(stateful[0])} keeps a state for each row from batch to batch. Leave "
            "out stateful=True, or train on one device."
        )
    drawing = [layer for layer in model._flatten_layers() if layer._seed_generators]
    if options.jit_compile and drawing:
        raise TfdistError(
            f"Cannot compile the step with XLA: the layer {describe_layer(drawing[0])} draws, and "
            "XLA would draw other numbers. Leave out `jit_compile`."
        )
    layer = None
    if options.micro_batches > 1 or (options.jit_compile and is_mirrored):
        layer = _find_layer_of_batches(model, x_spec)
    if layer is not None and options.micro_batches > 1:
        raise TfdistError(
            f"Cannot cut a batch into {options.micro_batches} micro-batches: the layer "
            f"{describe_layer(layer)} takes statistics of the rows that it sees together. Take a "
            "normalization that does not, such as `norm=group`, freeze the layer, or leave out "
            "`micro_batches`."
        )
    if layer is not None:
        raise TfdistError(
            f"Cannot compile the step with XLA: the layer {describe_layer(layer)} updates what it "
            "has in common with other replicas. Leave out `jit_compile`, or take "
            "`strategy=one_device` or `norm=group`."
        )
    if options.jit_compile:
        check_compilation(model, x_spec)


def _trains_apart(strategy: tf.distribute.Strategy, num_workers: int) -> bool:
    """Whether each worker makes steps of its own."""
    is_local = find_traits(strategy).trains_apart and num_workers > 1
    return is_local or find_traits(strategy).has_servers


def _find_layer_of_batches(model: keras.Model, x_spec: Any) -> keras.layers.Layer | None:
    """Returns the first layer that updates a variable in training, but for seeds, if any does."""
    seeds = {id(generator.state) for generator in list_seed_generators(model)}
    updated = {id(variable) for variable in find_updated(model, x_spec)} - seeds
    layers = model._flatten_layers(include_self=False)
    owners = (layer for layer in layers if any(id(v) in updated for v in _list_own(layer)))
    return next(owners, None)


def _list_own(layer: keras.layers.Layer) -> list[keras.Variable]:
    return [*layer._trainable_variables, *layer._non_trainable_variables]


def find_updated(model: keras.Model, x_spec: Any) -> list[keras.Variable]:
    """Returns the variables that a model's layers update when it is called in training.

    Args:
      model: a built model.
      x_spec: structure of `tf.TensorSpec` of its inputs.
    """
    updated: list[keras.Variable] = []

    @tf.function(autograph=False)
    def call(x: Any, values: list[tf.Tensor]) -> None:
        mapping = list(zip(model.variables, values, strict=True))
        with keras.StatelessScope(mapping, collect_losses=True) as scope:
            model(x, training=True) if model._call_has_training_arg else model(x)
        updated.extend(v for v, value in mapping if scope.get_current_value(v) is not value)

    # Not known while this is traced, or a layer would decide by them.
    specs = [tf.TensorSpec(variable.shape, variable.dtype) for variable in model.variables]
    call.get_concrete_function(x_spec, specs)
    return updated
