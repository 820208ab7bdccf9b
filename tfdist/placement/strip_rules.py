"""How layers compute a strip of an image: one rule for each kind of layer.

A rule takes a forward pass, an operation and its inputs, of which at least one is divided. It
returns the outputs, or None if it cannot divide them: then the operation is computed whole.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf
from keras import layers

from tfdist.models.batch_norm import Moments, measure_moments
from tfdist.models.layers import FusedBatchNormalization, ReverseChannels
from tfdist.placement.graph import Operation
from tfdist.placement.strips import StripedImage, Window, divide_rows

if TYPE_CHECKING:
    from tfdist.placement.striped_call import Pass

Values = Sequence[Any]
StripRule = Callable[["Pass", Operation, Values], "list[Any] | None"]


def is_picture(spec: Any) -> bool:
    """Returns whether a symbolic tensor is [examples, height, width, channels], height known."""
    return len(spec.shape) == 4 and spec.shape[1] is not None


def find_rule(operation: Operation) -> StripRule | None:
    """Returns the rule for an operation; None if there is none."""
    layer = operation.layer
    if operation.node is None or not _takes_only_tensors(operation):
        return None
    if not isinstance(layer, keras.Layer):
        is_known = type(layer).__module__.startswith("keras.src.ops.")
        return _pointwise if is_known and type(layer).__name__ in _ELEMENTWISE else None
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


def _pointwise(run: "Pass", operation: Operation, taken: Values) -> list[Any] | None:
    """Elements that depend on elements at the same place only."""
    first = next(value for value in taken if isinstance(value, StripedImage))
    is_joined = isinstance(operation.layer, layers.Concatenate)
    if not set(_list_axes(operation.layer)) <= ({-1, -2, 2, 3} if is_joined else {-1, 3}):
        return None
    for value, spec in zip(taken, operation.node.arguments.keras_tensors, strict=True):
        if isinstance(value, StripedImage):
            differs = value.height != first.height
        else:  # the same for all rows
            differs = is_joined or (len(spec.shape) == 4 and spec.shape[1] != 1)
        if differs:
            return None
    parts: list[list[tf.Tensor]] = [[] for _ in operation.outputs]
    for place, (low, high) in enumerate(itertools.pairwise(first.bounds)):
        given = [
            run.take_rows(value, low, high)[0] if isinstance(value, StripedImage) else [value]
            for value in taken
        ]
        found = run.call(
            operation,
            [tensor for pieces in given for tensor in pieces],
            device=run.devices[place],
            prepare=functools.partial(_join_pieces, [len(pieces) for pieces in given]),
        )
        for own, part in zip(parts, found, strict=True):
            own.append(part)
    return [StripedImage(tuple(own), first.bounds) for own in parts]


def _list_axes(layer: Any) -> list[int]:
    axis = getattr(layer, "axis", -1)
    return [axis] if isinstance(axis, int) else list(axis)


def _join_pieces(counts: Sequence[int], *tensors: tf.Tensor) -> list[tf.Tensor]:
    """Returns tensors each of which is the next some pieces."""
    left = iter(tensors)
    pieces = [list(itertools.islice(left, count)) for count in counts]
    return [tf.concat(own, 1) if len(own) > 1 else own[0] for own in pieces]


def _slide(
    run: "Pass",
    operation: Operation,
    taken: Values,
    rows: Window,
    columns: Window,
    *,
    fill: Callable[[tf.DType], Any] = lambda _: 0,
    average: bool = False,
) -> list[Any] | None:
    """Elements that depend on a window: the strip gets the rows of its neighbors that it needs."""
    (strips,) = taken
    count = len(run.devices)
    height = rows.count_outputs(strips.height)
    around, aside = rows.find_padding(strips.height), columns.find_padding(strips.parts[0].shape[2])
    if height < count or around is None or aside is None:
        return None
    bounds = divide_rows(height, count)
    parts = []
    for place, (low, high) in enumerate(itertools.pairwise(bounds)):
        pieces, missing = run.take_rows(strips, *rows.find_inputs(low, high, around[0]))
        if not pieces:
            return None
        padding = [[0, 0], missing, aside, [0, 0]]
        counts: list[tf.Tensor] = []

        def prepare(
            *pieces: tf.Tensor, padding: Any = padding, counts: Any = counts
        ) -> list[tf.Tensor]:
            x = tf.concat(pieces, 1) if len(pieces) > 1 else pieces[0]
            if average and rows.is_same:
                shape = [1, tf.shape(x)[1], tf.shape(x)[2], 1]
                ones = tf.pad(tf.ones(shape, x.dtype), padding)
                size, step = (rows.size, columns.size), (rows.stride, columns.stride)
                counts.append(tf.nn.avg_pool2d(ones, size, step, "VALID"))
            if max(max(pair) for pair in padding):
                x = tf.pad(x, padding, constant_values=tf.constant(fill(x.dtype), x.dtype))
            return [x]

        def finish(y: tf.Tensor, counts: Any = counts) -> tf.Tensor:
            return y / counts[0] if counts else y

        parts += run.call(
            operation,
            pieces,
            device=run.devices[place],
            prepare=prepare,
            finish=finish,
            attributes={"padding": "valid"},
        )
    return [StripedImage(tuple(parts), bounds)]


def _convolve(run: "Pass", operation: Operation, taken: Values) -> list[Any] | None:
    layer = operation.layer
    rows, columns = (
        Window((size - 1) * dilation + 1, stride, layer.padding == "same")
        for size, stride, dilation in zip(
            layer.kernel_size, layer.strides, _pair(layer.dilation_rate), strict=True
        )
    )
    return _slide(run, operation, taken, rows, columns)


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else tuple(value)


def _list_pool_windows(layer: Any) -> list[Window]:
    pairs = zip(_pair(layer.pool_size), _pair(layer.strides), strict=True)
    return [Window(size, stride, layer.padding == "same") for size, stride in pairs]


def _pool_max(run: "Pass", operation: Operation, taken: Values) -> list[Any] | None:
    windows = _list_pool_windows(operation.layer)
    return _slide(run, operation, taken, *windows, fill=lambda dtype: dtype.min)


def _pool_average(run: "Pass", operation: Operation, taken: Values) -> list[Any] | None:
    return _slide(run, operation, taken, *_list_pool_windows(operation.layer), average=True)


def _shift(run: "Pass", operation: Operation, taken: Values) -> list[Any] | None:
    """Rows and columns are added or removed at the borders."""
    (strips,), layer = taken, operation.layer
    is_added = isinstance(layer, layers.ZeroPadding2D)
    name = "padding" if is_added else "cropping"
    (before, after), aside = getattr(layer, name)
    sign = 1 if is_added else -1
    height = strips.height + sign * (before + after)
    if height < len(run.devices):
        return None
    bounds = divide_rows(height, len(run.devices))
    parts = []
    for place, (low, high) in enumerate(itertools.pairwise(bounds)):
        pieces, missing = run.take_rows(strips, low - sign * before, high - sign * before)
        if not pieces:
            return None

        def prepare(*pieces: tf.Tensor, missing: Any = missing) -> list[tf.Tensor]:
            return [tf.pad(tf.concat(pieces, 1), [[0, 0], missing, [0, 0], [0, 0]])]

        parts += run.call(
            operation,
            pieces,
            device=run.devices[place],
            prepare=prepare,
            attributes={name: ((0, 0), aside)},
        )
    return [StripedImage(tuple(parts), bounds)]


def _convolve_transposed(run: "Pass", operation: Operation, taken: Values) -> list[Any] | None:
    """Every row of the input adds to a window of the output, from which the strip is cut."""
    (strips,), layer = taken, operation.layer
    width = strips.parts[0].shape[2]
    if layer.output_padding is not None or _pair(layer.dilation_rate) != (1, 1) or width is None:
        return None
    is_same = layer.padding == "same"
    (size, size_aside), (stride, stride_aside) = layer.kernel_size, layer.strides
    top, left = (
        max(0, k - s) // 2 if is_same else 0
        for k, s in zip(layer.kernel_size, layer.strides, strict=True)
    )
    height, wide = (
        length * s + (0 if is_same else max(0, k - s))
        for length, s, k in ((strips.height, stride, size), (width, stride_aside, size_aside))
    )
    bounds = divide_rows(height, len(run.devices))
    parts = []
    for place, (low, high) in enumerate(itertools.pairwise(bounds)):
        first = min(-(-(low + top - size + 1) // stride), (low + top) // stride)
        first = max(0, first)
        last = min(strips.height, (high - 1 + top) // stride + 1)
        pieces, _ = run.take_rows(strips, first, last)
        start = low - (first * stride - top)

        def finish(y: tf.Tensor, start: int = start, rows: int = high - low) -> tf.Tensor:
            return y[:, start : start + rows, left : left + wide]

        parts += run.call(
            operation,
            pieces,
            device=run.devices[place],
            prepare=lambda *pieces: [tf.concat(pieces, 1)],
            finish=finish,
            attributes={"padding": "valid"},
        )
    return [StripedImage(tuple(parts), bounds)]


def _upsample(run: "Pass", operation: Operation, taken: Values) -> list[Any] | None:
    if operation.layer.interpolation != "nearest":
        return None
    found = _pointwise(run, operation, taken)
    if found is None:
        return None
    times = operation.layer.size[0]
    return [StripedImage(found[0].parts, tuple(bound * times for bound in found[0].bounds))]


def _multiply_noise(run: "Pass", operation: Operation, taken: Values) -> list[Any] | None:
    return _draw(run, operation, taken, tf.ones, tf.multiply)


def _add_noise(run: "Pass", operation: Operation, taken: Values) -> list[Any] | None:
    return _draw(run, operation, taken, tf.zeros, tf.add)


def _draw(
    run: "Pass", operation: Operation, taken: Values, make: Any, combine: Any
) -> list[Any] | None:
    """The numbers are drawn for the whole image, as on one device, and divided."""
    if not run.is_training(operation):
        return _pointwise(run, operation, taken)
    (strips,) = taken
    sizes = tf.unstack(tf.shape(strips.parts[0]))
    sizes[1] = strips.height
    neutral = make(sizes, strips.parts[0].dtype)
    neutral.set_shape([None, strips.height, *strips.parts[0].shape[2:]])
    (noise,) = run.call(operation, [neutral], device=None)
    noises = [noise[:, low:high] for low, high in itertools.pairwise(strips.bounds)]
    return [_map_parts(run, strips, lambda x, noise: combine(x, noise), noises)]


def _map_parts(
    run: "Pass",
    strips: StripedImage,
    function: Callable[..., tf.Tensor],
    own: Values,
    *shared: tf.Tensor,
) -> StripedImage:
    """Returns a function of each strip, of one further tensor each and of some for all."""
    parts = []
    for device, part, further in zip(run.devices, strips.parts, own, strict=True):
        parts += run.cells.run(device, lambda *x: [function(*x)], [part, further, *shared])
    return StripedImage(tuple(parts), strips.bounds)


def _normalize_batch(run: "Pass", operation: Operation, taken: Values) -> list[Any] | None:
    """The moments of the strips are pooled, and then those of the replicas."""
    (strips,), layer = taken, operation.layer
    if not (run.is_training(operation) and layer.trainable):
        return _pointwise(run, operation, taken)
    if getattr(layer, "axis", -1) not in (-1, 3) or getattr(layer, "renorm", False):
        return None
    dtype = tf.float64 if strips.parts[0].dtype == tf.float64 else tf.float32
    moments = _measure(run, strips, lambda x: measure_moments(tf.cast(x, dtype)))
    is_shared = getattr(layer, "synchronized", True) or not isinstance(
        layer, FusedBatchNormalization
    )

    def pool(*flat: tf.Tensor) -> list[tf.Tensor]:
        local = _pool(flat)
        everywhere = run.pool(local)
        used = everywhere if is_shared else local
        return [used.mean, used.variance, everywhere.mean, everywhere.variance]

    mean, variance, *moving = run.cells.run(None, pool, moments)
    for variable, new in zip((layer.moving_mean, layer.moving_variance), moving, strict=True):
        old = tf.cast(run.read(variable), dtype)
        new = old * layer.momentum + new * (1.0 - layer.momentum)
        run.states[id(variable)] = tf.cast(new, variable.dtype)
    return [_normalize(run, strips, layer, mean, variance, dtype)]


def _normalize_groups(run: "Pass", operation: Operation, taken: Values) -> list[Any] | None:
    (strips,), layer = taken, operation.layer
    channels = strips.parts[0].shape[-1]
    if layer.axis not in (-1, 3):
        return None
    groups = channels if layer.groups == -1 else layer.groups
    dtype = tf.float64 if strips.parts[0].dtype == tf.float64 else tf.float32

    def measure(x: tf.Tensor) -> Moments:
        shape = tf.shape(x)
        x = tf.reshape(tf.cast(x, dtype), [shape[0], -1, groups, channels // groups])
        count = tf.cast(shape[1] * shape[2] * (channels // groups), dtype)
        return Moments(count, *tf.nn.moments(x, [1, 3]))

    def pool(*flat: tf.Tensor) -> list[tf.Tensor]:
        found = _pool(flat)
        return [
            tf.repeat(t, channels // groups, axis=1)[:, None, None, :]
            for t in (found.mean, found.variance)
        ]

    moments = _measure(run, strips, measure)
    mean, variance = run.cells.run(None, pool, moments)
    return [_normalize(run, strips, layer, mean, variance, dtype)]


def _measure(
    run: "Pass", strips: StripedImage, measure: Callable[[tf.Tensor], Moments]
) -> list[tf.Tensor]:
    """Returns the count, mean and variance of each strip, one after the other."""
    found = []
    for device, part in zip(run.devices, strips.parts, strict=True):
        found += run.cells.run(device, lambda x: list(measure(x)), [part])
    return found


def _pool(flat: Sequence[tf.Tensor]) -> Moments:
    """Returns the moments of all strips. Source: Chan, Golub and LeVeque 1979."""
    counts, means, variances = flat[::3], flat[1::3], flat[2::3]
    count = tf.add_n(list(counts))
    shares = [tf.stop_gradient(c / count) for c in counts]
    offsets = [mean - means[0] for mean in means]
    offset = tf.add_n([s * o for s, o in zip(shares, offsets, strict=True)])
    squares = [
        s * (v + tf.square(o - offset)) for s, v, o in zip(shares, variances, offsets, strict=True)
    ]
    return Moments(count, means[0] + offset, tf.add_n(squares))


def _normalize(
    run: "Pass",
    strips: StripedImage,
    layer: Any,
    mean: tf.Tensor,
    variance: tf.Tensor,
    dtype: tf.DType,
) -> StripedImage:
    gamma, beta = getattr(layer, "gamma", None), getattr(layer, "beta", None)
    weights = [run.read(v) for v in (gamma, beta) if v is not None]

    def compute(x: tf.Tensor, mean: tf.Tensor, variance: tf.Tensor, *weights: tf.Tensor) -> Any:
        left = iter(weights)
        scale = tf.math.rsqrt(variance + layer.epsilon)
        if gamma is not None:
            scale *= tf.cast(next(left), dtype)
        y = (tf.cast(x, dtype) - mean) * scale
        if beta is not None:
            y += tf.cast(next(left), dtype)
        return tf.cast(y, layer.compute_dtype)

    return _map_parts(run, strips, compute, [mean] * len(strips.parts), variance, *weights)


def _average_all(run: "Pass", operation: Operation, taken: Values) -> list[Any]:
    (strips,), keeps = taken, operation.layer.keepdims

    def compute(*parts: tf.Tensor) -> list[tf.Tensor]:
        area = tf.cast(strips.height * tf.shape(strips.parts[0])[2], parts[0].dtype)
        return [tf.add_n(list(parts)) / area]

    return _reduce(run, strips, tf.reduce_sum, compute, keeps)


def _maximize_all(run: "Pass", operation: Operation, taken: Values) -> list[Any]:
    (strips,), keeps = taken, operation.layer.keepdims

    def compute(*parts: tf.Tensor) -> list[tf.Tensor]:
        return [tf.reduce_max(tf.stack(parts), 0)]

    return _reduce(run, strips, tf.reduce_max, compute, keeps)


def _reduce(
    run: "Pass",
    strips: StripedImage,
    each: Any,
    together: Callable[..., list[tf.Tensor]],
    keeps: bool,
) -> list[Any]:
    parts = []
    for device, part in zip(run.devices, strips.parts, strict=True):
        parts += run.cells.run(device, lambda x: [each(x, [1, 2], keepdims=keeps)], [part])
    return run.cells.run(None, together, parts)


_MERGING = (
    layers.Add,
    layers.Subtract,
    layers.Multiply,
    layers.Average,
    layers.Maximum,
    layers.Minimum,
    layers.Concatenate,
)
_ELEMENTS = (
    layers.Activation,
    layers.ReLU,
    layers.LeakyReLU,
    layers.ELU,
    layers.Softmax,
    layers.Identity,
    layers.Rescaling,
    layers.Dense,
    layers.LayerNormalization,
    ReverseChannels,
)
_RULES: dict[Any, StripRule] = {
    **dict.fromkeys((*_MERGING, *_ELEMENTS), _pointwise),
    layers.Conv2D: _convolve,
    layers.DepthwiseConv2D: _convolve,
    layers.SeparableConv2D: _convolve,
    layers.Conv2DTranspose: _convolve_transposed,
    layers.MaxPooling2D: _pool_max,
    layers.AveragePooling2D: _pool_average,
    layers.ZeroPadding2D: _shift,
    layers.Cropping2D: _shift,
    layers.UpSampling2D: _upsample,
    layers.Dropout: _multiply_noise,
    layers.SpatialDropout2D: _multiply_noise,
    layers.GaussianDropout: _multiply_noise,
    layers.GaussianNoise: _add_noise,
    layers.BatchNormalization: _normalize_batch,
    FusedBatchNormalization: _normalize_batch,
    layers.GroupNormalization: _normalize_groups,
    layers.GlobalAveragePooling2D: _average_all,
    layers.GlobalMaxPooling2D: _maximize_all,
}
_ELEMENTWISE = {
    *("Abs", "Absolute", "Add", "Divide", "Elu", "Exp", "Gelu", "HardSigmoid", "HardSilu"),
    *("LeakyRelu", "Log", "Maximum", "Minimum", "Multiply", "Negative", "Relu", "Relu6", "Selu"),
    *("Sigmoid", "Sign", "Silu", "Softplus", "Softsign", "Sqrt", "Square", "Subtract", "Tanh"),
    "TrueDivide",
}
"""Names of Keras's operations that act on each element alone, with broadcasting."""
