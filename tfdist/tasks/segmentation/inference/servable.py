"""Exports a finished run as a SavedModel for plain TensorFlow and TensorFlow Serving."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.records.durable_files import temporary_directory
from tfdist.tasks.divided_signature import DividedSignature
from tfdist.tasks.images.pixels import PixelFormat
from tfdist.tasks.images.reading import DEEP_IMAGE, PNG_BITS_OFFSET, PNG_SIGNATURE
from tfdist.tasks.segmentation.inference.run import TrainedRun
from tfdist.tasks.segmentation.inference.warmup import encode_predict_request

ENCODED_SIGNATURE = "serving_default"
TENSOR_SIGNATURE = "tensors"

_ENCODED_TYPES = ("uint8", "uint16")
_SHALLOW_IMAGE = "it is no PNG of 16 bits per channel, as the training images: send it as they are"

Answer = Callable[[tf.Tensor], dict[str, tf.Tensor]]


def save_servable(run: TrainedRun, path: str) -> None:
    """Writes a run's model to a directory on this machine, for TensorFlow Serving.

    Both signatures resize the images to the size that the model was trained on, in the same way
    as the training data, and return `mask`, int32 [batch, height, width], and `probabilities`,
    float32 [batch, height, width, classes], of that size. They also return the masks at the
    images' original sizes, for which the probabilities are resized:

    - `serving_default`: `image_bytes`, string [batch], JPEG, PNG, BMP or GIF files -> `mask_png`,
      string [batch], a PNG for each image, whose pixel values are classes.
    - `tensors`: `images`, float32 [batch, any height, any width, channels], of the values that
      files like those of the training store, such as 0 to 255 -> `original_mask`, int32 [batch,
      any height, any width].

    A model of images of 16 bits takes PNG files of 16 bits; one of other channels than three, or
    of other types, only numbers.

    The asset `class_names.txt` holds the names of the classes, one per line; `assets.extra` holds
    a warm-up request for each signature.

    Source: https://www.tensorflow.org/tfx/serving/saved_model_warmup
    """
    answer = _make_answer(run.model, run.image_size, run.pixels.channels)
    encoded = _make_encoded_signature(answer, run.image_size, run.pixels)
    with temporary_directory() as directory:
        names = Path(directory) / "class_names.txt"
        names.write_text("".join(f"{name}\n" for name in run.class_names), encoding="utf-8")
        tf.saved_model.save(
            _Servable(run.model.weights, tf.saved_model.Asset(str(names)), encoded),
            path,
            signatures={
                encoded.name: encoded.whole,
                TENSOR_SIGNATURE: _make_tensor_signature(answer, run.image_size, run.pixels),
            },
        )
    _write_warmup(path, run.image_size, run.pixels)


class _Servable(tf.Module):
    """Holds what the signatures use where `tf.saved_model.save` finds it."""

    def __init__(
        self,
        weights: Sequence[keras.Variable],
        class_names: tf.saved_model.Asset,
        encoded: DividedSignature,
    ):
        super().__init__()
        self.weights = [weight.value for weight in weights]
        self.class_names = class_names
        for name, function in encoded.functions.items():
            setattr(self, name, function)


def _make_answer(model: keras.Model, image_size: tuple[int, int], channels: int) -> Answer:
    def answer(images: tf.Tensor) -> dict[str, tf.Tensor]:
        images = tf.ensure_shape(images, [None, *image_size, channels])
        logits = model(tf.cast(images, model.inputs[0].dtype), training=False)
        return {
            "mask": tf.argmax(logits, -1, output_type=tf.int32),
            "probabilities": tf.nn.softmax(tf.cast(logits, tf.float32)),
        }

    return answer


def _make_encoded_signature(
    answer: Answer, image_size: tuple[int, int], pixels: PixelFormat
) -> DividedSignature:
    kind = tf.uint8 if pixels.is_kept else tf.float32

    @tf.function(input_signature=[tf.TensorSpec([], tf.string, name="image_bytes")])
    def read(image_bytes: tf.Tensor) -> dict[str, tf.Tensor]:
        image = _decode(image_bytes, pixels)
        # Whole numbers are exact, and small in queues.
        resized = tf.cast(_resize(_scale(image, pixels), image_size, pixels), kind)
        return {"image": resized, "size": tf.shape(image)[:2]}

    def encode_mask(probabilities_and_size: tuple[tf.Tensor, tf.Tensor]) -> tf.Tensor:
        probabilities, size = probabilities_and_size
        mask = _find_classes(probabilities[None], size)[0]
        return tf.io.encode_png(tf.cast(mask, tf.uint8)[..., None])

    @tf.function(
        input_signature=[
            tf.TensorSpec([None, *image_size, pixels.channels], kind, name="image"),
            tf.TensorSpec([None, 2], tf.int32, name="size"),
        ]
    )
    def answer_read(image: tf.Tensor, size: tf.Tensor) -> dict[str, tf.Tensor]:
        answers = answer(image)
        # One after the other: the probabilities of a large image need much memory.
        answers["mask_png"] = tf.map_fn(
            encode_mask,
            (answers["probabilities"], size),
            fn_output_signature=tf.TensorSpec([], tf.string),
            parallel_iterations=1,
        )
        return answers

    return DividedSignature(ENCODED_SIGNATURE, read, answer_read)


def _decode(image_bytes: tf.Tensor, pixels: PixelFormat) -> tf.Tensor:
    """Returns the stored values of a file, [height, width, channels], and refuses other values."""
    if pixels.channels != 3 or pixels.dtype not in _ENCODED_TYPES:
        text = (
            f"the model takes images of {pixels.channels} channels of {pixels.dtype}: send them as "
            f"numbers, to the signature {TENSOR_SIGNATURE}"
        )
        with tf.control_dependencies([tf.debugging.Assert(tf.constant(False), [text])]):
            return tf.zeros([1, 1, pixels.channels]) + 0.0
    with tf.control_dependencies([_check_bits(image_bytes, pixels)]):
        if pixels.dtype == "uint16":
            image = tf.io.decode_png(image_bytes, channels=3, dtype=tf.uint16)
        else:
            image = tf.io.decode_image(image_bytes, channels=3, expand_animations=False)
    return tf.ensure_shape(image, [None, None, 3])


def _check_bits(image_bytes: tf.Tensor, pixels: PixelFormat) -> tf.Operation:
    """Returns the operation that refuses other bits, as reading the training images does."""
    head = tf.strings.substr(image_bytes, 0, PNG_BITS_OFFSET + 1)
    bits = tf.io.decode_raw(head, tf.uint8)[PNG_BITS_OFFSET:]  # empty if the file is shorter
    is_png = tf.strings.substr(head, 0, len(PNG_SIGNATURE)) == PNG_SIGNATURE
    if pixels.dtype == "uint16":
        return tf.debugging.Assert(tf.reduce_all(bits == 16) & is_png, [_SHALLOW_IMAGE])
    return tf.debugging.Assert(tf.reduce_all(bits <= 8) | ~is_png, [DEEP_IMAGE])


def _scale(images: tf.Tensor, pixels: PixelFormat) -> tf.Tensor:
    """Returns images in [0, 255], as `PixelFormat.convert` does."""
    if pixels.is_kept:
        return images
    low, high = pixels.value_range
    scaled = (tf.cast(images, tf.float32) - low) * np.float32(255.0 / (high - low))
    scaled = tf.where(tf.math.is_nan(scaled), 0.0, scaled)
    return tf.clip_by_value(scaled, 0.0, 255.0)


def _make_tensor_signature(answer: Answer, image_size: tuple[int, int], pixels: PixelFormat) -> Any:
    spec = tf.TensorSpec([None, None, None, pixels.channels], tf.float32, name="images")

    @tf.function(input_signature=[spec])
    def answer_tensors(images: tf.Tensor) -> dict[str, tf.Tensor]:
        answers = answer(_resize(_scale(images, pixels), image_size, pixels))
        size = tf.shape(images)[1:3]
        answers["original_mask"] = _find_classes(answers["probabilities"], size)
        return answers

    return answer_tensors


def _resize(images: tf.Tensor, image_size: tuple[int, int], pixels: PixelFormat) -> tf.Tensor:
    """Resizes as `tfdist.tasks.images.reading.resize_image` does."""
    resized = tf.image.resize(images, image_size, method="bilinear", antialias=True)
    resized = tf.clip_by_value(resized, 0.0, 255.0)
    return tf.round(resized) if pixels.is_kept else resized


def _find_classes(probabilities: tf.Tensor, size: tf.Tensor) -> tf.Tensor:
    """Returns the masks, int32 [batch, *size], of probabilities of the model's size."""
    return tf.argmax(tf.image.resize(probabilities, size), -1, output_type=tf.int32)


def _write_warmup(path: str, image_size: tuple[int, int], pixels: PixelFormat) -> None:
    image = np.zeros((*image_size, pixels.channels), np.float32)
    requests: list[Any] = [(TENSOR_SIGNATURE, {"images": image[None]})]
    if pixels.channels == 3 and pixels.dtype in _ENCODED_TYPES:
        file = tf.io.encode_png(image.astype(pixels.dtype)).numpy()
        requests.insert(0, (ENCODED_SIGNATURE, {"image_bytes": np.array([file], object)}))
    tf.io.gfile.makedirs(f"{path}/assets.extra")
    with tf.io.TFRecordWriter(f"{path}/assets.extra/tf_serving_warmup_requests") as writer:
        for signature, inputs in requests:
            writer.write(encode_predict_request(signature, inputs))
