"""Predicts class probabilities of images of any size, in windows, on a strategy's replicas."""

import math
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import keras
import numpy as np
import tensorflow as tf

from tfdist.errors import TfdistError
from tfdist.tasks.images.reading import resize_image
from tfdist.tasks.segmentation.inference.windows import Canvas, check_overlap, make_weights

Key = TypeVar("Key")


class Predictor:
    """Applies a segmentation model to images of any size.

    An image is cut into windows of the size that the model was trained on, and the windows'
    probabilities are blended. The windows of all images share batches of one shape, which are
    split over the strategy's replicas, so that only one step is compiled.

    Example:

        run = tfdist.load_run("runs/demo")
        predictor = tfdist.Predictor(run.model, window=run.image_size)
        mask = predictor.predict_mask(image)

    Args:
      model: maps float [batch, height, width, channels], in [0, 255], to logits
        [batch, height, width, classes]; created in the strategy's scope.
      window: (height, width) in pixels.
      overlap: the fraction in [0, 1) of a window that the next one overlaps.
      zoom: images are resized by this factor, or these two for the height and the width, before
        they are cut into windows; None resizes every image to one window.
      tta: whether to average with the prediction for the mirror image.
      global_batch_size: windows per step, over all replicas.
      strategy: its replicas share the windows; the current strategy by default.

    Raises:
      TfdistError: the overlap, the zoom or the batch size is out of range.
    """

    def __init__(
        self,
        model: keras.Model,
        *,
        window: tuple[int, int],
        overlap: float = 0.5,
        zoom: float | tuple[float, float] | None = 1.0,
        tta: bool = False,
        global_batch_size: int = 16,
        strategy: tf.distribute.Strategy | None = None,
    ):
        check_overlap(overlap)
        factors = (zoom, zoom) if isinstance(zoom, float | int) else zoom
        if factors is not None and not all(0 < factor < math.inf for factor in factors):
            raise TfdistError(f"Cannot resize images by {zoom}: give a `zoom` above 0.")
        if global_batch_size < 1:
            raise TfdistError(
                f"Cannot take {global_batch_size} windows per step: give a `global_batch_size` of "
                "at least 1."
            )
        self.num_classes = int(model.output_shape[-1])
        self._channels = model.inputs[0].shape[-1] or 3
        self._window = window
        self._overlap = overlap
        self._factors = factors
        self._weights = make_weights(window)
        self._strategy = strategy or tf.distribute.get_strategy()
        replicas = self._strategy.num_replicas_in_sync
        self._rows = -(-global_batch_size // replicas)
        self._batch = self._rows * replicas
        self._step = _make_step(model, self._strategy, tta=tta)

    def predict_mask(self, image: np.ndarray) -> np.ndarray:
        """Returns the most probable class of every pixel: uint8 [height, width].

        Args:
          image: uint8 or float32 [height, width, channels], in [0, 255].
        """
        ((_, mask),) = self.predict_masks([(None, image)])
        return mask

    def predict_masks(
        self, images: Iterable[tuple[Key, np.ndarray]]
    ) -> Iterator[tuple[Key, np.ndarray]]:
        """Yields (key, mask uint8 [height, width]) for each (key, image), in order."""
        for key, probabilities in self.predict_probabilities(images):
            yield key, np.argmax(probabilities, -1).astype(np.uint8)

    def predict_probabilities(
        self, images: Iterable[tuple[Key, np.ndarray]]
    ) -> Iterator[tuple[Key, np.ndarray]]:
        """Yields (key, probabilities float32 [height, width, classes]) for each image, in order.

        Args:
          images: (key, image uint8 or float32 [height, width, channels]); the key is returned with
            the result.

        Raises:
          TfdistError: an image has another dtype.
        """
        started: deque[tuple[Key, tuple[int, ...], Canvas]] = deque()
        waiting: list[tuple[Canvas, tuple[int, int]]] = []
        for key, image in images:
            canvas = self._make_canvas(image)
            started.append((key, image.shape[:2], canvas))
            for place in canvas.places:
                waiting.append((canvas, place))
                if len(waiting) == self._batch:
                    self._run(waiting)
                    waiting = []
            while started and started[0][2].is_complete:
                yield self._finish(*started.popleft())
        if waiting:
            self._run(waiting)
        while started:
            yield self._finish(*started.popleft())

    def _make_canvas(self, image: np.ndarray) -> Canvas:
        if image.dtype not in (np.uint8, np.float32):
            raise TfdistError(
                f"Cannot predict an image of {image.dtype}: the model expects uint8 or float32, 0 "
                "to 255. Scale and convert it."
            )
        if image.shape[-1] != self._channels:
            raise TfdistError(
                f"Cannot predict an image of {image.shape[-1]} channels: the model expects "
                f"{self._channels}."
            )
        size = self._window
        if self._factors is not None:
            height, width = (
                max(1, round(n * factor))
                for n, factor in zip(image.shape[:2], self._factors, strict=True)
            )
            size = (height, width)
        if size != image.shape[:2]:
            image = resize_image(image, size)
        return Canvas(
            image, window=self._window, overlap=self._overlap, num_classes=self.num_classes
        )

    def _run(self, waiting: list[tuple[Canvas, tuple[int, int]]]) -> None:
        dtype = np.result_type(*(canvas.dtype for canvas, _ in waiting))
        windows = np.zeros((self._batch, *self._window, self._channels), dtype)
        for row, (canvas, place) in enumerate(waiting):
            windows[row] = canvas.cut(place)
        values = self._strategy.experimental_distribute_values_from_function(
            lambda context: tf.constant(self._select_rows(windows, context))
        )
        outputs = self._strategy.experimental_local_results(self._step(values))
        probabilities = np.concatenate([output.numpy() for output in outputs])
        for (canvas, place), window in zip(waiting, probabilities, strict=False):
            canvas.add(place, window, self._weights)

    def _select_rows(
        self, windows: np.ndarray, context: tf.distribute.experimental.ValueContext
    ) -> np.ndarray:
        first = context.replica_id_in_sync_group * self._rows
        return windows[first : first + self._rows]

    def _finish(self, key: Key, size: tuple[int, ...], canvas: Canvas) -> tuple[Key, np.ndarray]:
        probabilities = canvas.blend()
        if probabilities.shape[:2] != size:
            probabilities = tf.image.resize(probabilities, size).numpy()
        return key, probabilities


def _make_step(model: keras.Model, strategy: tf.distribute.Strategy, *, tta: bool) -> Any:
    """Returns a compiled function from the replicas' windows to their probabilities."""

    def compute(windows: tf.Tensor) -> tf.Tensor:
        logits = model(tf.cast(windows, model.inputs[0].dtype), training=False)
        return tf.nn.softmax(tf.cast(logits, tf.float32))

    def replica_step(windows: tf.Tensor) -> tf.Tensor:
        probabilities = compute(windows)
        if tta:
            mirrored = compute(tf.reverse(windows, [2]))
            probabilities = (probabilities + tf.reverse(mirrored, [2])) / 2
        return probabilities

    @tf.function
    def step(windows: tf.Tensor) -> Any:
        return strategy.run(replica_step, args=(windows,))

    return step
