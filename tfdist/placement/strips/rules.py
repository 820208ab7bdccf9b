"""How layers compute a strip of an image: one rule for each kind of layer.

A rule takes a forward pass, an operation and its inputs, of which at least one is divided. It
returns the outputs, or None if it cannot divide them: then the operation is computed whole.
"""

from typing import Any

import keras
from keras import layers

from tfdist.models.layers import FusedBatchNormalization, ReverseChannels
from tfdist.placement.graph import Operation
from tfdist.placement.strips.elements import add_noise, compute_elements, multiply_noise
from tfdist.placement.strips.forward import StripRule
from tfdist.placement.strips.moments import (
    average_all,
    maximize_all,
    normalize_batch,
    normalize_groups,
)
from tfdist.placement.strips.windows import (
    convolve,
    convolve_transposed,
    pool_average,
    pool_max,
    shift,
    upsample,
)


def find_rule(operation: Operation) -> StripRule | None:
    """Returns the rule for an operation; None if there is none."""
    layer = operation.layer
    if operation.node is None or not _takes_only_tensors(operation):
        return None
    if not isinstance(layer, keras.Layer):
        is_known = type(layer).__module__.startswith("keras.src.ops.")
        return compute_elements if is_known and type(layer).__name__ in _ELEMENTWISE else None
    is_last = getattr(layer, "data_format", "channels_last") == "channels_last"
    activation = getattr(layer, "activation", None)
    name = getattr(activation, "__name__", "")
    # Keras's activations act on each element, or on the last axis.
    is_plain = activation is None or getattr(keras.activations, name, None) is activation
    if layer.activity_regularizer is not None or not is_last or not is_plain:
        return None
    for kind, rule in _RULES.items():
        if isinstance(layer, kind) and layer.__class__.call is kind.call:
            return rule
    return None


def _takes_only_tensors(operation: Operation) -> bool:
    """Returns whether an operation is given nothing but tensors, numbers and `training`."""
    args, kwargs = operation.node.arguments.args, operation.node.arguments.kwargs
    leaves = keras.tree.flatten([args, kwargs])
    return all(leaf is None or isinstance(leaf, (keras.KerasTensor, int, float)) for leaf in leaves)


_MERGING = (
    *(layers.Add, layers.Subtract, layers.Multiply, layers.Average, layers.Maximum, layers.Minimum),
    layers.Concatenate,
)
_ELEMENTS = (
    *(layers.Activation, layers.ReLU, layers.LeakyReLU, layers.ELU, layers.Softmax),
    *(layers.Identity, layers.Rescaling, layers.Dense, layers.LayerNormalization, ReverseChannels),
)
_RULES: dict[Any, StripRule] = {
    **dict.fromkeys((*_MERGING, *_ELEMENTS), compute_elements),
    layers.Conv2D: convolve,
    layers.DepthwiseConv2D: convolve,
    layers.SeparableConv2D: convolve,
    layers.Conv2DTranspose: convolve_transposed,
    layers.MaxPooling2D: pool_max,
    layers.AveragePooling2D: pool_average,
    layers.ZeroPadding2D: shift,
    layers.Cropping2D: shift,
    layers.UpSampling2D: upsample,
    layers.Dropout: multiply_noise,
    layers.SpatialDropout2D: multiply_noise,
    layers.GaussianDropout: multiply_noise,
    layers.GaussianNoise: add_noise,
    layers.BatchNormalization: normalize_batch,
    FusedBatchNormalization: normalize_batch,
    layers.GroupNormalization: normalize_groups,
    layers.GlobalAveragePooling2D: average_all,
    layers.GlobalMaxPooling2D: maximize_all,
}
_ELEMENTWISE = {
    *("Abs", "Absolute", "Add", "Divide", "Elu", "Exp", "Gelu", "HardSigmoid", "HardSilu"),
    *("LeakyRelu", "Log", "Maximum", "Minimum", "Multiply", "Negative", "Relu", "Relu6", "Selu"),
    *("Sigmoid", "Sign", "Silu", "Softplus", "Softsign", "Sqrt", "Square", "Subtract", "Tanh"),
    "TrueDivide",
}
"""Names of Keras's operations that act on each element alone, with broadcasting."""
