"""A model's variables under a strategy: created in its scope, with an aggregation."""

import contextlib
import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.aliases import Nested
from tfdist.errors import TfdistError
from tfdist.internals import compute_output_spec
from tfdist.placement.tables import divide_tables
from tfdist.strategies.registry import find_traits
from tfdist.strategies.servers import make_placement
from tfdist.training.replicas.aggregation import aggregate_state, set_aggregation
from tfdist.training.replicas.optimizers import building_optimizers, list_optimizers
from tfdist.training.replicas.step_checks import overrides
from tfdist.training.step_options import StepOptions

_ONE_COPY = (tf.distribute.OneDeviceStrategy, type(tf.distribute.get_strategy()))


def make_creator(strategy: tf.distribute.Strategy, options: StepOptions) -> Callable[..., Any]:
    """Returns the creator of a model's variables, for `tf.variable_creator_scope` in the scope."""
    if not find_traits(strategy).has_servers:
        return aggregate_state
    create = make_placement(strategy)
    if not options.shard_tables_bytes:
        return create
    min_bytes, num_servers = options.shard_tables_bytes, strategy.extended._num_ps
    return divide_tables(create, min_bytes=min_bytes, num_servers=num_servers)


def aggregate_variables(model: keras.Model, strategy: tf.distribute.Strategy) -> None:
    """Sets the aggregation of model variables that were created without one."""
    if isinstance(strategy, _ONE_COPY):
        return
    variables = [*model.variables, *(v for o in list_optimizers(model) for v in o.variables)]
    for variable in variables:
        set_aggregation(variable.value)


def check_scope(model: keras.Model, strategy: tf.distribute.Strategy) -> None:
    """Checks that a model and its optimizers were created in a strategy's scope."""
    optimizers = list_optimizers(model)
    if isinstance(strategy, _ONE_COPY):
        are_built = all(optimizer.built for optimizer in optimizers)
        inside = all(strategy.extended.variable_created_in_scope(v.value) for v in model.variables)
        if inside or are_built:
            for optimizer in optimizers:
                optimizer._distribution_strategy = strategy  # no difference for a single copy
            return
    name = type(strategy).__name__
    for variable in [*model.variables, *model.metrics_variables]:
        if not strategy.extended.variable_created_in_scope(variable.value):
            raise TfdistError(
                f"Cannot train {model.name!r} under {name}: its variable {variable.path} was "
                "created outside of the strategy's scope. Build the model in `with "
                "strategy.scope():`, or give the trainer a function that builds it."
            )
    for optimizer in optimizers:
        if getattr(optimizer, "_distribution_strategy", strategy) is not strategy:
            raise TfdistError(
                f"Cannot train {model.name!r} under {name}: its optimizer {optimizer.name!r} was "
                "created outside of the strategy's scope. Compile with Trainer.compile, or in "
                "`with strategy.scope():`."
            )


@contextlib.contextmanager
def keeping_values(variables: Sequence[keras.Variable]) -> Iterator[None]:
    """Gives variables back the values that they had on entry. All workers must use it."""
    values = [np.array(variable.numpy()) for variable in variables]
    yield
    for variable, value in zip(variables, values, strict=True):
        variable.value.assign(value)


def build_model(model: keras.Model, batch_spec: Nested[tf.TypeSpec], *, can_wait: bool) -> None:
    """Creates the variables of a model, its metrics and its optimizer.

    Args:
      can_wait: whether what cannot be built without data may be built by tracing the first step.

    Raises:
      TfdistError: the model cannot be built without data, and may not wait; or its optimizer is
        not built yet and starts from a copy of the weights.
    """
    is_built = all(layer.built for layer in model._flatten_layers())
    if can_wait and not is_built:
        return  # Keras builds it when the first step is traced
    late = [optimizer for optimizer in list_optimizers(model) if not optimizer.built]
    with tf.variable_creator_scope(_lift):
        _build(model, batch_spec, is_built=is_built, can_wait=can_wait)
    for optimizer in late:
        _check_start(optimizer, model)


def _check_start(optimizer: keras.optimizers.Optimizer, model: keras.Model) -> None:
    """Checks that an optimizer does not start from a copy of the weights, which `fit` loses.

    Keras's own `fit` creates the optimizer's variables while it traces its first step. They start
    from what their initializers say, and not from what is assigned to them then.
    """
    for weight in sorted(model.trainable_variables, key=lambda v: math.prod(v.shape)):
        value = weight.numpy()
        if (value != value.flat[0]).any():
            break
    else:
        return
    slots = [slot for slot in optimizer.variables if slot.shape == weight.shape]
    if any(np.array_equal(slot.numpy(), value) for slot in slots):
        raise TfdistError(
            f"Cannot train with {type(optimizer).__name__} as Keras's fit does, which loses the "
            "copy of the weights that this optimizer starts from. Call "
            "model.optimizer.build(model.trainable_variables) when you build the model."
        )


def make_known(arguments: dict[str, Any]) -> bool:
    """Replaces a variable's initial value, if it is a constant of a graph, by its value.

    Returns whether the initial value is known outside of the graph then.
    """
    value = arguments.get("initial_value")
    if not tf.is_tensor(value) or isinstance(value, tf.__internal__.EagerTensor):
        return True
    known = tf.get_static_value(value)
    if known is not None:
        arguments["initial_value"] = known
    return known is not None


def _lift(next_creator: Callable[..., tf.Variable], **arguments: Any) -> tf.Variable:
    """Creates a variable outside of the graph in which a model is built without data."""
    if not make_known(arguments):
        raise TfdistError(
            "Cannot build the model: its `build` creates a tf.Variable with a value that only "
            "a step knows. Create it in `__init__`, or give a function as its initial value."
        )
    with tf.init_scope():
        return next_creator(**arguments)


def _build(
    model: keras.Model, batch_spec: Nested[tf.TypeSpec], *, is_built: bool, can_wait: bool
) -> None:
    of_step: Exception | None = None
    if not is_built:
        # As the first step does, because a model may build differently outside of training.
        try:
            with building_optimizers():
                compute_output_spec(model.train_step, _to_symbols(batch_spec))
        except tf.errors.ResourceExhaustedError:
            raise  # half an optimizer is of no use
        except Exception as error:
            of_step = error
    try:
        model._symbolic_build(data_batch=batch_spec)
        return
    except tf.errors.ResourceExhaustedError:
        raise
    except Exception as error:
        cause = error
    layers_are_built = all(layer.built for layer in model._flatten_layers(include_self=False))
    is_traced = not is_built and of_step is None
    if (layers_are_built or is_traced) and overrides(model, "train_step"):
        # Its own code creates everything besides the layers when it is traced. It may use layers
        # without calling them, which they need to count as built.
        return
    output = _find_output(model)
    if layers_are_built and output is not None:
        # What a layer returns without data may differ from the outputs it had when it was built.
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(_to_symbols(batch_spec))
        compute_output_spec(model.compute_metrics, x, y, output, sample_weight=sample_weight)
        compute_output_spec(model._compute_loss, x, y, output, sample_weight=sample_weight)
        model.optimizer.build(model.trainable_variables)
        model._post_build()
    elif not can_wait or layers_are_built:
        if of_step is not None and not overrides(model, "call"):
            cause = of_step  # only its own step can build it
        raise _explain(model, cause) from cause


def build_outputs(model: keras.Model, x_spec: Nested[tf.TypeSpec]) -> None:
    """Creates the variables of a model's call, without those of metrics and the optimizer."""
    try:
        compute_output_spec(model, _to_symbols(x_spec))
    except Exception as error:
        raise _explain(model, error) from error


def _find_output(model: keras.Model) -> Any:
    """Returns the symbolic outputs of a functional or sequential model; None for others."""
    return getattr(getattr(model, "_functional", None) or model, "output", None)


def _to_symbols(spec: Nested[tf.TypeSpec]) -> Any:
    return keras.tree.map_structure(
        lambda leaf: None if leaf is None else keras.KerasTensor(leaf.shape, leaf.dtype.name), spec
    )


def _explain(model: keras.Model, error: Exception) -> TfdistError:
    cause = error.__context__ if isinstance(error, RuntimeError) and error.__context__ else error
    text = " ".join(str(cause).split()).rstrip(".")
    return TfdistError(
        f"Cannot build {model.name!r}: {type(cause).__name__}: {text[:500]}. Call it on a batch in "
        "the strategy's scope to build it yourself."
    )


def hash_values(variables: Iterable[keras.Variable]) -> str:
    """Returns a SHA-256 over the bytes of all values. All workers must call this."""
    digest = hashlib.sha256()
    for variable in variables:
        digest.update(np.ascontiguousarray(variable.numpy()).tobytes())
    return digest.hexdigest()


def hash_each(variables: Iterable[keras.Variable]) -> dict[str, str]:
    """Returns a SHA-256 of each value, by the path of its variable. All workers must call this."""
    return {variable.path: hash_values([variable]) for variable in variables}


def hash_changes(variables: Iterable[keras.Variable], before: Mapping[str, str]) -> str | None:
    """Returns a hash of the values that differ from `hash_each` of before; None if none does."""
    known = [variable for variable in variables if variable.path in before]
    changed = [v for v in known if hash_values([v]) != before[v.path]]
    return hash_values(changed) if changed else None


def hash_weights(model: keras.Model) -> str:
    """Returns a SHA-256 over the float32 bytes of all weights, in the model's order."""
    digest = hashlib.sha256()
    for weight in model.weights:
        digest.update(np.ascontiguousarray(weight.numpy(), dtype="<f4").tobytes())
    return digest.hexdigest()
