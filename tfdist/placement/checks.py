"""Checks that a model can be computed by parts."""

from typing import Any

import keras
import tensorflow as tf

from tfdist.aliases import Nested
from tfdist.errors import TfdistError
from tfdist.placement.graph import make_graph

# Stateful operations that may run twice.
_HARMLESS = {"Assert", "PrintV2", "LookupTableFindV2", "LookupTableSizeV2"}


def check_parts(model: keras.Model, x_spec: Nested[tf.TypeSpec], *, recomputes: bool) -> None:
    """Checks that a model can be computed by parts in training.

    Raises:
      TfdistError: the model is neither functional nor sequential; a layer has a metric, assigns its
        own weight or trains a variable that is not one of its weights; or an operation would not
        give the same result the second time.
    """
    for operation in make_graph(model).operations:
        if isinstance(operation.layer, keras.Layer) and operation.layer.metrics_variables:
            raise _make_error(model, f"the layer {operation.name!r} has a metric")
    graph, updated = trace_call(model, x_spec)
    changed = [variable for variable in updated if variable.trainable]
    if changed:
        raise _make_error(model, f"a layer assigns its own weight {changed[0].path}")
    if graph.trainable_variables:
        name = graph.trainable_variables[0].name
        raise _make_error(model, f"the variable {name!r} is not a weight of a layer (add_weight)")
    for operation in graph.get_operations() if recomputes else ():
        if operation.op_def.is_stateful and operation.type not in _HARMLESS:
            raise TfdistError(
                f"Cannot recompute the model {model.name!r}: its operation {operation.name!r} "
                f"({operation.type}) has a side effect, or a state outside the layers' weights, so "
                "it cannot run a second time. Leave out `rematerialize`."
            )


def trace_call(model: keras.Model, x_spec: Nested[tf.TypeSpec]) -> tuple[Any, list[keras.Variable]]:
    """Returns the graph of a model's call in training, and the variables that its layers update."""
    updated: list[keras.Variable] = []

    @tf.function(autograph=False)
    def call(x: Nested[tf.Tensor], values: list[tf.Tensor]) -> None:
        mapping = list(zip(model.variables, values, strict=True))
        with keras.StatelessScope(mapping, collect_losses=True) as scope:
            model(x, training=True) if model._call_has_training_arg else model(x)
        updated.extend(v for v, value in mapping if scope.get_current_value(v) is not value)

    # The values are unknown while this is traced, so that no layer can depend on them.
    specs = [tf.TensorSpec(variable.shape, variable.dtype) for variable in model.variables]
    return call.get_concrete_function(x_spec, specs).graph, updated


def _make_error(model: keras.Model, reason: str) -> TfdistError:
    return TfdistError(
        f"Cannot compute the model {model.name!r} by parts: {reason}. Leave out `placement` and "
        "`rematerialize`."
    )
