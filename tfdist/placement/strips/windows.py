"""Layers whose outputs depend on a window: parts get the rows and columns of their neighbors."""

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import tensorflow as tf
from keras import layers

from tfdist.placement.graph import Operation
from tfdist.placement.strips.elements import Values
from tfdist.placement.strips.forward import StripForward
from tfdist.placement.strips.image import Area, Bounds, Pieces, StripedImage, Window, list_areas

if TYPE_CHECKING:
    import keras

Plan: TypeAlias = tuple[
    Area, Callable[[tf.Tensor, Any], tf.Tensor], Callable[[tf.Tensor], tf.Tensor] | None
]
"""How a part is computed: the area of the input that it needs; (this area, the padding for what the
image lacks of it) -> the layer's input; the layer's output -> the part."""


def _compute_parts(
    run: StripForward,
    operation: Operation,
    image: StripedImage,
    bounds: Bounds | None,
    plan: Callable[[Area], Plan],
    **attributes: Any,
) -> list[Any] | None:
    """Returns an image with the given bounds, each part of which is computed as `plan` says."""
    if bounds is None:
        return None
    parts = []
    for device, area in zip(run.devices, list_areas(bounds), strict=True):
        needed, prepare, finish = plan(area)
        pieces = run.take(image, *needed)
        if not pieces.tensors:
            return None
        parts += run.call(
            operation,
            pieces.tensors,
            device=device,
            prepare=functools.partial(_prepare, pieces, prepare),
            finish=finish,
            attributes=attributes,
        )
    return [StripedImage(tuple(parts), bounds)]


def _prepare(
    pieces: Pieces, prepare: Callable[[tf.Tensor, Any], tf.Tensor], *tensors: tf.Tensor
) -> list[tf.Tensor]:
    return [prepare(pieces.join(*tensors), [[0, 0], *pieces.missing, [0, 0]])]


def _slide(
    run: StripForward,
    operation: Operation,
    taken: Values,
    windows: Sequence[Window],
    *,
    fill: Callable[[tf.DType], Any] = lambda _: 0,
    average: bool = False,
) -> list[Any] | None:
    """Elements that depend on a window; `windows` has that of the rows and that of the columns."""
    (image,) = taken
    height, width = map(Window.count_outputs, windows, image.size)

    def plan(area: Area) -> Plan:
        rows, columns = (
            window.find_inputs(*span, length)
            for window, span, length in zip(windows, area, image.size, strict=True)
        )
        counts: list[tf.Tensor] = []

        def prepare(x: tf.Tensor, padding: Sequence[Sequence[int]]) -> tf.Tensor:
            if average and windows[0].is_same:
                shape = [1, tf.shape(x)[1], tf.shape(x)[2], 1]
                ones = tf.pad(tf.ones(shape, x.dtype), padding)
                size, step = zip(*((window.size, window.stride) for window in windows), strict=True)
                counts.append(tf.nn.avg_pool2d(ones, size, step, "VALID"))
            if max(map(max, padding)):
                x = tf.pad(x, padding, constant_values=tf.constant(fill(x.dtype), x.dtype))
            return x

        return (rows, columns), prepare, lambda y: y / counts[0] if counts else y

    bounds = run.find_bounds((height, width))
    return _compute_parts(run, operation, image, bounds, plan, padding="valid")


def convolve(run: StripForward, operation: Operation, taken: Values) -> list[Any] | None:
    """Convolutions of any stride and dilation."""
    layer = operation.layer
    sizes = zip(layer.kernel_size, layer.strides, _pair(layer.dilation_rate), strict=True)
    windows = [
        Window((size - 1) * dilation + 1, stride, layer.padding == "same")
        for size, stride, dilation in sizes
    ]
    return _slide(run, operation, taken, windows)


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else tuple(value)


def _list_pool_windows(layer: "keras.Layer") -> list[Window]:
    pairs = zip(_pair(layer.pool_size), _pair(layer.strides), strict=True)
    return [Window(size, stride, layer.padding == "same") for size, stride in pairs]


def pool_max(run: StripForward, operation: Operation, taken: Values) -> list[Any] | None:
    """The largest elements of windows."""
    windows = _list_pool_windows(operation.layer)
    return _slide(run, operation, taken, windows, fill=lambda dtype: dtype.min)


def pool_average(run: StripForward, operation: Operation, taken: Values) -> list[Any] | None:
    """The means of windows, without what is added at the borders."""
    return _slide(run, operation, taken, _list_pool_windows(operation.layer), average=True)


def shift(run: StripForward, operation: Operation, taken: Values) -> list[Any] | None:
    """Rows and columns are added or removed at the borders."""
    (image,), layer = taken, operation.layer
    name = "padding" if isinstance(layer, layers.ZeroPadding2D) else "cropping"
    sign = 1 if name == "padding" else -1
    added = [(sign * before, sign * after) for before, after in getattr(layer, name)]
    height, width = (length + sum(own) for length, own in zip(image.size, added, strict=True))

    def plan(area: Area) -> Plan:
        rows, columns = (
            (a - before, b - before) for (a, b), (before, _) in zip(area, added, strict=True)
        )
        return (rows, columns), tf.pad, None

    none = {name: ((0, 0), (0, 0))}
    return _compute_parts(run, operation, image, run.find_bounds((height, width)), plan, **none)


def convolve_transposed(run: StripForward, operation: Operation, taken: Values) -> list[Any] | None:
    """Every pixel of the input adds to a window of the output, from which the part is cut."""
    (image,), layer = taken, operation.layer
    if layer.output_padding is not None or _pair(layer.dilation_rate) != (1, 1):
        return None
    is_same = layer.padding == "same"
    windows = list(zip(layer.kernel_size, layer.strides, strict=True))
    removed = [max(0, size - stride) // 2 if is_same else 0 for size, stride in windows]
    height, width = (
        length * stride + (0 if is_same else max(0, size - stride))
        for length, (size, stride) in zip(image.size, windows, strict=True)
    )

    def plan(area: Area) -> Plan:
        needed, cuts = [], []
        for (low, high), length, (size, stride), before in zip(
            area, image.size, windows, removed, strict=True
        ):
            first = min(-(-(low + before - size + 1) // stride), (low + before) // stride)
            first = max(0, first)
            needed.append((first, min(length, (high - 1 + before) // stride + 1)))
            start = low - (first * stride - before)
            cuts.append(slice(start, start + high - low))
        return (needed[0], needed[1]), lambda x, _: x, lambda y: y[:, cuts[0], cuts[1]]

    bounds = run.find_bounds((height, width))
    return _compute_parts(run, operation, image, bounds, plan, padding="valid")


def upsample(run: StripForward, operation: Operation, taken: Values) -> list[Any] | None:
    """Rows and columns repeated, or interpolated between neighbors; beyond a border as at it."""
    (image,), layer = taken, operation.layer
    if layer.interpolation not in ("nearest", "bilinear"):
        return None
    # How many rows and columns of a neighbor are needed.
    reach = [int(layer.interpolation == "bilinear" and count > 1) for count in run.grid]
    if any(own and times & (times - 1) for own, times in zip(reach, layer.size, strict=True)):
        return None  # TensorFlow rounds other positions to float32, which depends on the first row
    rows, columns = (
        tuple(bound * times for bound in own)
        for own, times in zip(image.bounds, layer.size, strict=True)
    )

    def plan(area: Area) -> Plan:
        own = [(a // times, b // times) for (a, b), times in zip(area, layer.size, strict=True)]
        rows, columns = ((a - r, b + r) for (a, b), r in zip(own, reach, strict=True))

        def finish(y: tf.Tensor) -> tf.Tensor:
            kept = (
                slice(r * times, (r + b - a) * times)
                for (a, b), r, times in zip(own, reach, layer.size, strict=True)
            )
            return y[:, *kept]

        return (rows, columns), functools.partial(tf.pad, mode="SYMMETRIC"), finish

    return _compute_parts(run, operation, image, (rows, columns), plan)
