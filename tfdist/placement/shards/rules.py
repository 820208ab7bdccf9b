"""How layers compute a part of their units: one rule for each kind of layer.

A rule gives the axis of the units in the output and in each weight, and computes the outputs of
some of the units from their part of the weights. A layer whose class has its own `call` has none.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf
from keras import layers, ops

Weights = Mapping[str, Any]
"""Name of a layer's attribute -> its value."""
Axes = Mapping[str, int]
"""Name of a layer's attribute -> the axis of the units."""

_KERNEL = ("kernel",)
_ACROSS = {"glu", "log_softmax", "softmax", "sparsemax"}
"""Keras's activations that do not act on each element alone."""


@dataclass(frozen=True)
class Rule:
    """How a kind of layer is divided.

    Attributes:
      find_axes: layer -> the axes of the units in its weights; empty if it cannot be divided.
      find_axis: layer -> the axis of the units in its output.
      compute: (layer, input, weights) -> the output of some units, without the activation.
      shared: the attributes of further weights, which all units need whole.
      takes_part: whether each unit needs only its own part of the input.
      is_sparse: whether its gradient has only some rows of a weight.
      rows: whether the table's rows are divided, and not its units.
    """

    kinds: tuple[Any, ...]
    find_axes: Callable[[Any], Axes]
    find_axis: Callable[[Any], int]
    compute: Callable[[Any, Any, Weights], Any]
    shared: tuple[str, ...] = ()
    takes_part: bool = False
    is_sparse: bool = False
    rows: bool = False


def find_rule(layer: keras.Layer, *, rows: bool = False) -> Rule | None:
    """Returns the rule for a layer; None if there is none."""
    for rule in _RULES:
        own = [kind for kind in rule.kinds if isinstance(layer, kind)]
        if rule.rows == rows and any(layer.__class__.call is kind.call for kind in own):
            is_plain = not (getattr(layer, "lora_enabled", False) or layer.quantization_mode)
            return rule if is_plain and rule.find_axes(layer) else None
    return None


def splits_activation(layer: keras.Layer) -> bool:
    """Returns whether the activation of a layer acts on each element alone."""
    activation: Any = getattr(layer, "activation", None)
    name = getattr(activation, "__name__", "")
    is_known = getattr(keras.activations, name, None) is activation and name not in _ACROSS
    return activation is None or is_known


def _channel_axis(layer: keras.Layer) -> int:
    return -1 if getattr(layer, "data_format", None) != "channels_first" else 1


def _with_bias(layer: keras.Layer, **axes: int) -> Axes:
    return axes | ({"bias": 0} if getattr(layer, "bias", None) is not None else {})


def _dense(layer: keras.Layer, x: tf.Tensor, weights: Weights) -> Any:
    y = ops.matmul(x, weights["kernel"])
    return y if weights.get("bias") is None else ops.add(y, weights["bias"])


def _convolve(
    function: Callable[..., Any],
    kernels: Sequence[str],
    layer: keras.Layer,
    x: tf.Tensor,
    weights: Weights,
    **changed: Any,
) -> Any:
    names = ("strides", "padding", "dilation_rate", "data_format")
    options = {name: getattr(layer, name) for name in names} | changed
    y = function(x, *(weights[name] for name in kernels), **options)
    if weights.get("bias") is None:
        return y
    shape = [1] * len(y.shape)
    shape[_channel_axis(layer)] = -1
    return ops.add(y, ops.reshape(weights["bias"], shape))


def _conv(layer: keras.Layer, x: tf.Tensor, weights: Weights) -> Any:
    padding = layer.padding
    if padding == "causal":
        pads = [[0, 0], [0, 0], [0, 0]]
        time = 1 if _channel_axis(layer) == -1 else 2
        pads[time][0] = layer.dilation_rate[0] * (layer.kernel_size[0] - 1)
        x, padding = ops.pad(x, pads), "valid"
    return _convolve(ops.conv, _KERNEL, layer, x, weights, padding=padding)


def _find_conv_axes(layer: keras.Layer) -> Axes:
    # One's own may need all units.
    is_plain = layer.__class__.convolution_op is layers.Conv2D.convolution_op
    return _with_bias(layer, kernel=-1) if is_plain and layer.groups == 1 else {}


def _find_depthwise_axes(layer: keras.Layer) -> Axes:
    # The outputs of one input channel are neighbors, so the bias has the same order.
    return _with_bias(layer, kernel=-2) if layer.depth_multiplier == 1 else {}


def _transposed(layer: keras.Layer, x: tf.Tensor, weights: Weights) -> Any:
    padding = layer.output_padding
    return _convolve(ops.conv_transpose, _KERNEL, layer, x, weights, output_padding=padding)


def _einsum(layer: keras.Layer, x: tf.Tensor, weights: Weights) -> Any:
    y = ops.einsum(layer.equation, x, weights["kernel"])
    return y if weights.get("bias") is None else ops.add(y, weights["bias"])


def _find_letter(layer: keras.Layer) -> str:
    """Returns the letter of the units in the equation of an EinsumDense."""
    left, output = layer.equation.replace(" ", "").split("->")
    taken, kernel = left.split(",")
    found = [c for c in kernel if c in output and c not in taken and c != "."]
    # Counted from the end of the output, so behind the dots.
    found = [c for c in found if "." not in output[output.index(c) :]]
    sizes = {c: layer.kernel.shape[kernel.index(c)] for c in found if "." not in kernel}
    return max(sizes, key=lambda c: sizes[c], default="")


def _find_einsum_axis(layer: keras.Layer) -> int:
    output = layer.equation.replace(" ", "").split("->")[1]
    return output.index(_find_letter(layer)) - len(output)


def _find_einsum_axes(layer: keras.Layer) -> Axes:
    letter = _find_letter(layer)
    if not letter:
        return {}
    kernel = layer.equation.replace(" ", "").split("->")[0].split(",")[1]
    axes = {"kernel": kernel.index(letter)}
    if layer.bias is not None:
        axis = _find_einsum_axis(layer) + len(layer.bias.shape)
        if axis < 0 or layer.bias.shape[axis] != layer.kernel.shape[axes["kernel"]]:
            return {}
        axes["bias"] = axis
    return axes


def _embedding(layer: keras.Layer, x: tf.Tensor, weights: Weights) -> Any:
    found = ops.take(weights["embeddings"], x, axis=0)
    return ops.cast(found, layer.compute_dtype)


def _make_lookup(*, axis: int) -> Rule:
    return Rule(
        (layers.Embedding,),
        lambda _: {"embeddings": axis},
        lambda _: -1,
        _embedding,
        is_sparse=True,
        rows=axis == 0,
    )


_depthwise = functools.partial(_convolve, ops.depthwise_conv, _KERNEL)
_separable = functools.partial(
    _convolve, ops.separable_conv, ("depthwise_kernel", "pointwise_kernel")
)
_CONVS = layers.Conv1D, layers.Conv2D, layers.Conv3D
_DEPTHWISE = layers.DepthwiseConv1D, layers.DepthwiseConv2D
_TRANSPOSED = layers.Conv1DTranspose, layers.Conv2DTranspose, layers.Conv3DTranspose
_SEPARABLE = layers.SeparableConv1D, layers.SeparableConv2D
_RULES = (
    Rule((layers.Dense,), functools.partial(_with_bias, kernel=1), lambda _: -1, _dense),
    Rule(_CONVS, _find_conv_axes, _channel_axis, _conv),
    Rule(_DEPTHWISE, _find_depthwise_axes, _channel_axis, _depthwise, takes_part=True),
    Rule(_TRANSPOSED, functools.partial(_with_bias, kernel=-2), _channel_axis, _transposed),
    Rule(
        _SEPARABLE,
        functools.partial(_with_bias, pointwise_kernel=-1),
        _channel_axis,
        _separable,
        shared=("depthwise_kernel",),
    ),
    Rule((layers.EinsumDense,), _find_einsum_axes, _find_einsum_axis, _einsum),
    _make_lookup(axis=1),
    _make_lookup(axis=0),
)


def look_up(ids: tf.Tensor, sizes: Sequence[int], read: Callable[[int, tf.Tensor], Any]) -> Any:
    """Returns the rows of a table whose rows are divided.

    Args:
      ids: integers of any shape.
      read: (number of a part, its own ids [n]) -> rows [n, units].
    """
    flat = tf.reshape(ids if ids.dtype.is_integer else tf.cast(ids, tf.int32), [-1])
    flat = tf.where(flat < 0, flat + sum(sizes), flat)
    bounds = tf.cumsum(tf.constant(sizes, flat.dtype))
    owners = tf.searchsorted(bounds, flat, side="right", out_type=tf.int32)
    owners = tf.minimum(owners, len(sizes) - 1)  # ids out of range fail where they are read
    starts = tf.concat([[0], bounds[:-1]], 0)
    own = tf.dynamic_partition(flat - tf.gather(starts, owners), owners, len(sizes))
    places = tf.dynamic_partition(tf.range(tf.size(flat)), owners, len(sizes))
    rows = [read(place, ids) for place, ids in enumerate(own)]
    found = tf.dynamic_stitch(places, rows)
    shape = tf.concat([tf.shape(ids), tf.shape(found)[1:]], 0)
    result = tf.reshape(found, shape)
    result.set_shape([*ids.shape, rows[0].shape[-1]])
    return result
