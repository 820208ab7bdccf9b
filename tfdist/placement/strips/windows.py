"""Layers whose outputs depend on a window: parts get the rows and columns of their neighbors."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from keras import layers

from tfdist.placement.graph import Operation
from tfdist.placement.strips.elements import Values
from tfdist.placement.strips.forward import StripForward
from tfdist.placement.strips.image import Pieces, StripedImage, Window, list_areas


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
    if (bounds := run.find_bounds((height, width))) is None:
        return None
    parts = []
    for device, area in zip(run.devices, list_areas(bounds), strict=True):
        needed = [
            window.find_inputs(*span, length)
            for window, span, length in zip(windows, area, image.size, strict=True)
        ]
        pieces = run.take(image, *needed)
        if not pieces.tensors:
            return None
        padding = [[0, 0], *pieces.missing, [0, 0]]
        counts: list[tf.Tensor] = []

        def prepare(
            *tensors: tf.Tensor,
            pieces: Pieces = pieces,
            padding: Any = padding,
            counts: Any = counts,
        ) -> list[tf.Tensor]:
            x = pieces.join(*tensors)
            if average and windows[0].is_same:
                shape = [1, tf.shape(x)[1], tf.shape(x)[2], 1]
                ones = tf.pad(tf.ones(shape, x.dtype), padding)
                size, step = zip(*((window.size, window.stride) for window in windows), strict=True)
                counts.append(tf.nn.avg_pool2d(ones, size, step, "VALID"))
            if max(map(max, padding)):
                x = tf.pad(x, padding, constant_values=tf.constant(fill(x.dtype), x.dtype))
            return [x]

        def finish(y: tf.Tensor, counts: Any = counts) -> tf.Tensor:
            return y / counts[0] if counts else y

        parts += run.call(
            operation,
            pieces.tensors,
            device=device,
            prepare=prepare,
            finish=finish,
            attributes={"padding": "valid"},
        )
    return [StripedImage(tuple(parts), bounds)]


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


def _list_pool_windows(layer: Any) -> list[Window]:
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
    if (bounds := run.find_bounds((height, width))) is None:
        return None
    parts = []
    for device, area in zip(run.devices, list_areas(bounds), strict=True):
        needed = [(a - before, b - before) for (a, b), (before, _) in zip(area, added, strict=True)]
        pieces = run.take(image, *needed)
        if not pieces.tensors:
            return None

        def prepare(*tensors: tf.Tensor, pieces: Pieces = pieces) -> list[tf.Tensor]:
            return [tf.pad(pieces.join(*tensors), [[0, 0], *pieces.missing, [0, 0]])]

        parts += run.call(
            operation,
            pieces.tensors,
            device=device,
            prepare=prepare,
            attributes={name: ((0, 0), (0, 0))},
        )
    return [StripedImage(tuple(parts), bounds)]


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
    if (bounds := run.find_bounds((height, width))) is None:
        return None
    parts = []
    for device, area in zip(run.devices, list_areas(bounds), strict=True):
        needed, cuts = [], []
        for (low, high), length, (size, stride), before in zip(
            area, image.size, windows, removed, strict=True
        ):
            first = min(-(-(low + before - size + 1) // stride), (low + before) // stride)
            first = max(0, first)
            needed.append((first, min(length, (high - 1 + before) // stride + 1)))
            start = low - (first * stride - before)
            cuts.append(slice(start, start + high - low))
        pieces = run.take(image, *needed)

        def prepare(*tensors: tf.Tensor, pieces: Pieces = pieces) -> list[tf.Tensor]:
            return [pieces.join(*tensors)]

        def finish(y: tf.Tensor, cuts: Any = cuts) -> tf.Tensor:
            return y[:, cuts[0], cuts[1]]

        parts += run.call(
            operation,
            pieces.tensors,
            device=device,
            prepare=prepare,
            finish=finish,
            attributes={"padding": "valid"},
        )
    return [StripedImage(tuple(parts), bounds)]


def upsample(run: StripForward, operation: Operation, taken: Values) -> list[Any] | None:
    """Rows and columns repeated, or interpolated between neighbors; beyond a border as at it."""
    (image,), layer = taken, operation.layer
    if layer.interpolation not in ("nearest", "bilinear"):
        return None
    # How many rows and columns of a neighbor are needed.
    reach = [int(layer.interpolation == "bilinear" and count > 1) for count in run.grid]
    if any(own and times & (times - 1) for own, times in zip(reach, layer.size, strict=True)):
        return None  # TensorFlow rounds other positions to float32, which depends on the first row
    parts = []
    for device, area in zip(run.devices, image.areas, strict=True):
        pieces = run.take(image, *((a - r, b + r) for (a, b), r in zip(area, reach, strict=True)))

        def prepare(*tensors: tf.Tensor, pieces: Pieces = pieces) -> list[tf.Tensor]:
            padding = [[0, 0], *pieces.missing, [0, 0]]
            return [tf.pad(pieces.join(*tensors), padding, mode="SYMMETRIC")]

        def finish(y: tf.Tensor, area: Any = area) -> tf.Tensor:
            rows, columns = (
                slice(r * times, (r + b - a) * times)
                for (a, b), r, times in zip(area, reach, layer.size, strict=True)
            )
            return y[:, rows, columns]

        parts += run.call(operation, pieces.tensors, device=device, prepare=prepare, finish=finish)
    rows, columns = (
        tuple(bound * times for bound in own)
        for own, times in zip(image.bounds, layer.size, strict=True)
    )
    return [StripedImage(tuple(parts), (rows, columns))]
