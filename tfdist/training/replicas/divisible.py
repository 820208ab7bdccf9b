"""Which programs are known to be divisible over replicas: those of Keras's own parts.

The guard computes all others on a batch before their first step. `tests/training/test_guard.py`
holds this list against what the guard finds.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import keras

from tfdist.internals import Operation
from tfdist.training.replicas.optimizers import list_optimizers
from tfdist.training.replicas.random_layers import list_seed_generators
from tfdist.training.replicas.step_checks import overrides

_LIBRARIES = ("keras.", "tfdist.")
# Keras's own losses that compute a single number from all examples that they see.
_LOSSES_OF_BATCHES = ("CTC", "Circle", "Dice", "Tversky", "ctc", "circle", "dice", "tversky")
# Layers that run code of the user or of another library, and those that mix examples.
_OPAQUE = ("FlaxLayer", "JaxLayer", "Lambda", "TFSMLayer", "TorchModuleWrapper")
_MIXING = ("AugMix", "CutMix", "MixUp", "RandAugment", "RandomElasticTransform")
# Operations that compute each number of their result from the numbers at its place.
_POINTWISE = {
    *("Abs", "Absolute", "Add", "Cast", "Cos", "Divide", "Equal", "Exp", "Gelu", "Greater", "Less"),
    *("Log", "LogicalAnd", "LogicalNot", "LogicalOr", "Maximum", "Minimum", "Multiply", "Negative"),
    *("NotEqual", "Relu", "Sigmoid", "Silu", "Sin", "Sqrt", "Square", "Subtract", "Tanh"),
    "TrueDivide",
}
# Operations along axes.
_ALONG = {
    *("All", "Any", "Concatenate", "LogSoftmax", "Max", "Mean", "Min", "Softmax", "Stack", "Sum")
}
_REDUCTIONS = ("sum_over_batch_size", "sum", "mean", "mean_with_sample_weight")
# Attributes of layers whose functions see examples.
_FUNCTIONS = ("activation", "recurrent_activation", "activity_regularizer")
_AXES = ("axis", "axes", "attention_axes", "_attention_axes")


def is_known(model: keras.Model) -> bool:
    """Returns whether a model trains by parts that are all known to be divisible.

    These are the layers, losses and optimizers of Keras and of this project, and Keras's steps.
    """
    if overrides(model, "train_step", "test_step", "compute_loss", "compute_metrics"):
        return False
    if not all(is_of_library(type(part)) for part in list_optimizers(model)):
        return False
    losses = list_losses(model)
    return bool(losses) and all(map(_is_known_loss, losses)) and has_known_layers(model)


def predicts_by_known_layers(model: keras.Model) -> bool:
    """Returns whether a model predicts by layers that are all known to be divisible."""
    return not overrides(model, "predict_step") and has_known_layers(model)


def may_draw_in_predictions(model: keras.Model) -> bool:
    """Returns whether a model may draw random numbers when it predicts."""
    return bool(list_seed_generators(model)) or not predicts_by_known_layers(model)


def has_known_layers(model: keras.Model) -> bool:
    """Returns whether all layers and operations of a model are known to be divisible."""
    layers = list(model._flatten_layers())
    return all(map(is_known_layer, layers)) and all(
        isinstance(operation, keras.layers.Layer) or _is_known_operation(operation)
        for layer in layers
        for operation in getattr(layer, "operations", None) or ()
    )


def is_of_library(thing: object) -> bool:
    """Returns whether a class or function is Keras's or this project's own."""
    return (getattr(thing, "__module__", None) or "").startswith(_LIBRARIES)


def is_of_batch(function: Any) -> bool:
    """Returns whether a loss, or the function of one, computes a single number from a batch."""
    wrapped = getattr(function, "fn", None) or getattr(function, "_fn", None)
    if wrapped is not None and is_of_batch(wrapped):
        return True
    name = getattr(function, "__name__", type(function).__name__)
    owner = function if inspect.isfunction(function) else type(function)
    return name in _LOSSES_OF_BATCHES and is_of_library(owner)


def list_losses(model: keras.Model) -> list[Any]:
    """Returns the losses with which a model was compiled and that are built."""
    return [loss for _, loss in list_losses_of_outputs(model)]


def list_losses_of_outputs(model: keras.Model) -> list[tuple[Sequence[Any], Any]]:
    """Returns these losses with the keys that lead to their outputs."""
    compiled = getattr(model, "_compile_loss", None)
    return [(flat.path, flat.loss) for flat in getattr(compiled, "_flat_losses", None) or ()]


def _is_known_loss(loss: object) -> bool:
    if is_of_batch(loss) or not is_of_library(type(loss)):
        return False
    function = getattr(loss, "fn", None)
    options = getattr(loss, "_fn_kwargs", {})
    if options.get("axis", -1) == 0 or getattr(loss, "reduction", "sum") not in _REDUCTIONS:
        return False
    return function is None or is_of_library(function)


def is_known_layer(layer: keras.Layer) -> bool:
    """Returns whether a layer is known to be divisible, apart from those inside it."""
    kind = type(layer)
    if kind.__name__ in _OPAQUE + _MIXING or not is_of_library(kind):
        return False
    functions = [value for value in vars(layer).values() if inspect.isfunction(value)]
    parts = [vars(layer).get(name) for name in _FUNCTIONS]
    others = [type(part) for part in parts if part is not None and not inspect.isfunction(part)]
    if not all(map(is_of_library, [*functions, *others])):
        return False
    is_by_example = all(_is_within_example(axis, layer) for axis in _list_axes(layer))
    return is_by_example and _keeps_first(getattr(layer, "equation", None))


def _list_axes(operation: keras.Operation) -> list[int]:
    axes = [getattr(operation, name, None) for name in _AXES]
    return [axis for axis in keras.tree.flatten(axes) if isinstance(axis, int)]


def _is_within_example(axis: int, operation: keras.Operation) -> bool:
    """Returns whether an axis of a layer or operation is known not to be that of the examples."""
    if axis >= 0:
        return axis > 0
    # Only those between the layers of a functional model know the rank of their inputs.
    tensors = [t for node in operation._inbound_nodes for t in node.input_tensors]
    rank = min((len(tensor.shape) for tensor in tensors), default=None)
    if rank is None:
        return axis == -1
    return axis + rank + (type(operation).__name__ == "Stack") > 0


def _keeps_first(equation: str | None) -> bool:
    """Returns whether an einsum keeps the first axis of its first operand.

    >>> _keeps_first("ab,bc->ac"), _keeps_first("ab,bc->bc"), _keeps_first("...x,xy->...y")
    (True, False, True)
    """
    if equation is None:
        return True
    first, _, output = equation.replace(" ", "").partition("->")
    return first[:1] == output[:1] != "" and (first.startswith("...") or first.count(first[0]) == 1)


def _is_known_operation(operation: keras.Operation) -> bool:
    """Returns whether an operation between layers combines tensors example by example."""
    if not isinstance(operation, Operation) or not is_of_library(type(operation)):
        return False
    if type(operation).__name__ in _ALONG:
        axes = _list_axes(operation)
        return bool(axes) and all(_is_within_example(axis, operation) for axis in axes)
    if type(operation).__name__ == "GetItem":
        return all(map(_takes_all_examples, operation._inbound_nodes))
    if type(operation).__name__ not in _POINTWISE:
        return False
    for node in operation._inbound_nodes:
        leaves = keras.tree.flatten((node.arguments.args, node.arguments.kwargs))
        tensors = [leaf for leaf in leaves if keras.utils.is_keras_tensor(leaf)]
        ranks = {len(tensor.shape) for tensor in tensors}
        others = [leaf for leaf in leaves if not keras.utils.is_keras_tensor(leaf)]
        shapes = [leaf.shape for leaf in others if len(getattr(leaf, "shape", ()))]
        has_rows = [len(shape) >= min(ranks) and shape[0] != 1 for shape in shapes]
        if len(ranks) > 1 or any(has_rows):
            return False
    return True


def _takes_all_examples(node: Any) -> bool:
    """Returns whether a call of `x[key]` keeps the first axis as it is."""
    x, key = list(node.arguments.args) + list(node.arguments.kwargs.values())
    keys = list(key) if isinstance(key, (tuple, list)) else [key]
    if not all(isinstance(k, (int, slice, type(Ellipsis))) for k in keys):
        return False
    return keys[0] == slice(None) or (keys[0] is Ellipsis and len(keys) <= len(x.shape))
