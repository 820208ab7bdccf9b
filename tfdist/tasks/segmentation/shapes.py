"""`shapes`: procedural pictures of circles, squares and triangles, with their masks."""

import dataclasses
import math
import zlib
from typing import Any

import tensorflow as tf

from tfdist.data.seeds import hash_uniform
from tfdist.data.source import BatchSource
from tfdist.errors import TfdistError
from tfdist.tasks.segmentation.examples import ImagesAndMasks

CLASS_NAMES = ("background", "circle", "square", "triangle")
DEFAULT_NUM_EXAMPLES = {"train": 2000}
DEFAULT_NUM_OTHER_EXAMPLES = 200

_MIN_SIDE = 16
_MAX_SHAPES = 4
# The probability of each shape; the first two are always there.
_PRESENT = (1.0, 1.0, 0.5, 0.3)
# The radius of a circle of the same area as a shape, as a fraction of the image's shorter side.
_RADIUS = (0.1, 0.22)
# Half the side of a square, and the inradius of a triangle, with the area of the unit circle.
_SQUARE = math.sqrt(math.pi) / 2
_TRIANGLE = math.sqrt(math.pi / (3 * math.sqrt(3)))
# The fraction of the shapes that have the tint of their class.
_TINTED = 0.95
_GRID = 5
_GRAIN_SIDE = 128
_DRAWS_PER_SHAPE = 12
_DRAWS = 8 + _MAX_SHAPES * _DRAWS_PER_SHAPE + _GRID * _GRID * 3


def make_shapes(
    split: str = "train",
    image_size: tuple[int, int] = (96, 96),
    num_examples: int | None = None,
    seed: int = 0,
) -> "ShapesSource":
    """Returns the `shapes` data, which is drawn as it is read, without files or downloads.

    Overlapping, anti-aliased shapes of random position, size, rotation, color and shading
    lie on a mottled background under noise. Classes: 0 background, 1 circle, 2 square,
    3 triangle.

    Args:
      split: any name; different names give different pictures.
      num_examples: by default 2000 for "train" and 200 for any other split.

    Raises:
      TfdistError: a side is shorter than 16 pixels, or `num_examples` is below 1.
    """
    if min(image_size) < _MIN_SIDE:
        raise TfdistError(
            f"Cannot draw shapes on {image_size[0]}x{image_size[1]} pixels: `image_size` must "
            f"be at least {_MIN_SIDE},{_MIN_SIDE}."
        )
    if num_examples is None:
        num_examples = DEFAULT_NUM_EXAMPLES.get(split, DEFAULT_NUM_OTHER_EXAMPLES)
    if num_examples < 1:
        raise TfdistError(
            f"Cannot make the {split!r} split of shapes: it must have at least 1 example, "
            f"found {num_examples}."
        )
    return ShapesSource(
        num_examples=num_examples,
        num_classes=len(CLASS_NAMES),
        class_names=CLASS_NAMES,
        image_size=(int(image_size[0]), int(image_size[1])),
        split=split,
        seed=seed,
    )


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class ShapesSource(ImagesAndMasks, BatchSource):
    """The source that `make_shapes` returns.

    An example is a pure function of (seed, split, index), to the last bit. Pixels are
    computed by sums, products and comparisons only. Sums of sums are written as differences,
    because Grappler re-associates sums depending on the shapes of their operands, so that
    rounding would depend on the batch.
    """

    split: str
    seed: int

    def make_fingerprint(self) -> dict[str, Any]:
        """Returns everything that determines the pictures."""
        header = self._make_header("shapes")
        return {**header, "split": self.split, "seed": self.seed}

    @tf.autograph.experimental.do_not_convert
    def load_batch(self, indices: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the pictures and masks at `indices` (int64 [batch])."""
        indices = tf.cast(indices, tf.int64)
        key = tf.fill(tf.shape(indices), tf.constant(self._get_key(), tf.int64))
        images, masks = _draw(tf.stack([key, indices], axis=-1), *self.image_size)
        batch = indices.shape[:1]
        return (
            tf.ensure_shape(images, [*batch, *self.image_size, 3]),
            tf.ensure_shape(masks, [*batch, *self.image_size]),
        )

    def _get_key(self) -> int:
        return (self.seed << 32) % 2**63 | zlib.crc32(self.split.encode())


# One trace for all splits and batches: tracing takes longer than drawing a small data set.
@tf.function(autograph=False, reduce_retracing=True)
def _draw(keys: tf.Tensor, height: int, width: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the pictures and masks of `keys` (int64 [batch, 2])."""
    draws = hash_uniform(keys, _DRAWS)
    scene, per_shape, grid = tf.split(
        draws, [8, _MAX_SHAPES * _DRAWS_PER_SHAPE, _GRID * _GRID * 3], axis=-1
    )
    per_shape = tf.reshape(per_shape, [-1, _MAX_SHAPES, _DRAWS_PER_SHAPE])
    # Mostly gray, so that a tint stands out.
    base = _lerp(80.0, 150.0, scene[:, 3:4]) - _lerp(-30.0, 30.0, scene[:, :3])
    # Channels first while painting: broadcasting a plane over channels is three times faster
    # than broadcasting a number over them.
    images = tf.transpose(_draw_background(base, scene, grid, (height, width)), [0, 3, 1, 2])
    masks = tf.zeros([tf.shape(keys)[0], height, width], tf.int32)
    for slot in range(_MAX_SHAPES):
        present = tf.constant(_PRESENT[slot])
        images, masks = _draw_shape(images, masks, base, per_shape[:, slot], present)
    images = tf.transpose(images, [0, 2, 3, 1])
    grain = _make_grain(scene[:, 3:6], (height, width))
    grain *= _lerp(3.0, 14.0, scene[:, 6])[:, None, None, None]
    # Whole numbers, as in a photograph, so that a cache of bytes holds the same values.
    return tf.round(tf.clip_by_value(images - grain, 0.0, 255.0)), masks


def _make_grain(draws: tf.Tensor, size: tuple[int, int]) -> tf.Tensor:
    """Returns unit noise [batch, height, width, 3]: a tile, shifted, with permuted columns."""
    height, width = size
    tile = tf.random.stateless_normal([_GRAIN_SIDE * _GRAIN_SIDE, 3], [11, 7])
    offset = tf.cast(draws[:, :2] * _GRAIN_SIDE, tf.int32)
    rows = (tf.range(height) + offset[:, :1]) % _GRAIN_SIDE
    # An odd step visits every column of the tile, in an order that depends on the step.
    step = 2 * tf.cast(draws[:, 2:] * (_GRAIN_SIDE // 2), tf.int32) + 1
    columns = (tf.range(width) * step + offset[:, 1:]) % _GRAIN_SIDE
    return tf.gather(tile, rows[:, :, None] * _GRAIN_SIDE + columns[:, None, :])


def _draw_background(
    base: tf.Tensor, scene: tf.Tensor, grid: tf.Tensor, size: tuple[int, int]
) -> tf.Tensor:
    coarse = tf.reshape(grid, [-1, _GRID, _GRID, 3]) - 0.5
    coarse *= _lerp(30.0, 90.0, scene[:, 7])[:, None, None, None]
    return tf.image.resize(base[:, None, None, :] - coarse, size)


@tf.function(autograph=False)
def _draw_shape(
    images: tf.Tensor, masks: tf.Tensor, base: tf.Tensor, draws: tf.Tensor, present: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Paints one shape over each image.

    Args:
      images: float32 [batch, 3, height, width].
      masks: int32 [batch, height, width].
      base: float32 [batch, 3], the background's mean color.
      draws: float32 [batch, _DRAWS_PER_SHAPE], in [0, 1).
      present: float32, the probability that there is a shape.
    """
    height, width = images.shape[2:]
    short = float(min(height, width))
    label = 1 + tf.cast(draws[:, 0] * 3.0, tf.int32)
    radius = _lerp(*_RADIUS, draws[:, 1]) * short
    y0 = _lerp(0.1, 0.9, draws[:, 2]) * height
    x0 = _lerp(0.1, 0.9, draws[:, 3]) * width
    ys = tf.range(height, dtype=tf.float32) + 0.5 - y0[:, None]
    xs = tf.range(width, dtype=tf.float32) + 0.5 - x0[:, None]
    distance = _get_distance(label, radius, draws[:, 4], ys, xs)
    distance = tf.where((draws[:, 5] < present)[:, None, None], distance, 1.0)

    shade_y, shade_x = (
        _lerp(-0.7, 0.7, draws[:, column])[:, None] * axis * (30.0 / short)
        for column, axis in ((6, ys), (7, xs))
    )
    color = _make_colors(label, base, draws[:, 8:12])[:, :, None, None]
    paint = color - (shade_y[:, :, None] + shade_x[:, None, :])[:, None]
    cover = tf.clip_by_value(0.5 - distance, 0.0, 1.0)[:, None]
    images += (paint - images) * cover
    masks = tf.where(distance < 0.0, label[:, None, None], masks)
    return images, masks


def _get_distance(
    label: tf.Tensor, radius: tf.Tensor, turn: tf.Tensor, ys: tf.Tensor, xs: tf.Tensor
) -> tf.Tensor:
    """Returns the signed distance to the shape's edge, in pixels, [batch, height, width].

    The distance to a polygon is the largest of the distances to its sides, each of which is the
    sum of one number per row and one per column. So is (d^2 - r^2) / 2r for a circle, which
    equals the distance to first order at the edge. One formula thus serves all three.
    """
    circle, square = label == 1, label == 2
    inner = radius * tf.where(square, _SQUARE, _TRIANGLE)
    # In float64: the last bit of a sine may depend on the position in the batch.
    turn = tf.cast(turn, tf.float64) * (2.0 * math.pi)
    sides = tf.where(square, tf.constant(4.0, tf.float64), tf.constant(3.0, tf.float64))
    distance = None
    for side in range(4):
        # A triangle's fourth side is its first again.
        angle = turn + (side * 2.0 * math.pi) / sides
        sine, cosine = (tf.cast(f(angle), tf.float32)[:, None] for f in (tf.sin, tf.cos))
        diameter = 2.0 * radius[:, None]
        row = tf.where(circle[:, None], ys * ys / diameter, ys * sine)
        column = tf.where(circle[:, None], xs * xs / diameter, xs * cosine)
        row -= tf.where(circle, radius / 2.0, inner)[:, None]
        edge = row[:, :, None] + column[:, None, :]
        distance = edge if distance is None else tf.maximum(distance, edge)
    return distance


def _make_colors(label: tf.Tensor, base: tf.Tensor, draws: tf.Tensor) -> tf.Tensor:
    """Returns a color [batch, 3] that stands out from the background's mean.

    Nineteen shapes out of twenty have the tint of their class (circles red, squares green,
    triangles blue), which makes them quick to learn. The others have any color, so that only
    the outline reliably tells the classes apart.
    """
    tinted = draws[:, :1] < _TINTED
    high = tf.one_hot(label - 1, 3) > 0.0
    tint = tf.where(high, _lerp(170.0, 250.0, draws[:, 1:4]), _lerp(10.0, 100.0, draws[:, 1:4]))
    signs = tf.cast(draws[:, :1] * 1024.0, tf.int32)
    signs = tf.bitwise.bitwise_and(signs, [1, 2, 4]) > 0
    step = _lerp(45.0, 110.0, draws[:, 1:4])
    color = base + tf.where(signs, step, -step)
    # Beyond black or white, step the other way instead.
    inside = (color >= 0.0) & (color <= 255.0)
    return tf.where(tinted, tint, tf.where(inside, color, 2.0 * base - color))


def _lerp(low: float, high: float, share: tf.Tensor) -> tf.Tensor:
    return low - (low - high) * share
