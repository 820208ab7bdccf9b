"""Layers whose outputs depend on a window of rows: strips get the rows of their neighbors."""

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import tensorflow as tf
from keras import layers

from tfdist.placement.graph import Operation
from tfdist.placement.strips.elements import Values
from tfdist.placement.strips.image import StripedImage, Window, divide_rows

if TYPE_CHECKING:
    from tfdist.placement.strips.call import Pass


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


def convolve(run: "Pass", operation: Operation, taken: Values) -> list[Any] | None:
    """Convolutions of any stride and dilation."""
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


def pool_max(run: "Pass", operation: Operation, taken: Values) -> list[Any] | None:
    """The largest elements of windows."""
    windows = _list_pool_windows(operation.layer)
    return _slide(run, operation, taken, *windows, fill=lambda dtype: dtype.min)


def pool_average(run: "Pass", operation: Operation, taken: Values) -> list[Any] | None:
    """The means of windows, without what is added at the borders."""
    return _slide(run, operation, taken, *_list_pool_windows(operation.layer), average=True)


def shift(run: "Pass", operation: Operation, taken: Values) -> list[Any] | None:
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


def convolve_transposed(run: "Pass", operation: Operation, taken: Values) -> list[Any] | None:
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


def upsample(run: "Pass", operation: Operation, taken: Values) -> list[Any] | None:
    """Rows and columns repeated, or interpolated between neighbors; beyond a border as at it."""
    (strips,), layer = taken, operation.layer
    reach, times = {"nearest": 0, "bilinear": 1}.get(layer.interpolation), layer.size[0]
    if reach is None or (reach and times & (times - 1)):
        return None  # TensorFlow rounds other positions to float32, which depends on the first row
    parts = []
    for place, (low, high) in enumerate(itertools.pairwise(strips.bounds)):
        pieces, missing = run.take_rows(strips, low - reach, high + reach)

        def prepare(*pieces: tf.Tensor, missing: Any = missing) -> list[tf.Tensor]:
            padding = [[0, 0], missing, [0, 0], [0, 0]]
            return [tf.pad(tf.concat(pieces, 1), padding, mode="SYMMETRIC")]

        def finish(y: tf.Tensor, rows: int = high - low) -> tf.Tensor:
            return y[:, reach * times : (reach + rows) * times]

        parts += run.call(
            operation, pieces, device=run.devices[place], prepare=prepare, finish=finish
        )
    return [StripedImage(tuple(parts), tuple(bound * times for bound in strips.bounds))]
