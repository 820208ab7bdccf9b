"""Exports a finished run as a SavedModel for plain TensorFlow and TensorFlow Serving."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.records.durable_files import temporary_directory
from tfdist.tasks.divided_signature import DividedSignature
from tfdist.tasks.images.reading import DEEP_IMAGE, PNG_BITS_OFFSET, PNG_SIGNATURE
from tfdist.tasks.segmentation.inference.run import TrainedRun
from tfdist.tasks.segmentation.inference.warmup import encode_predict_request

ENCODED_SIGNATURE = "serving_default"
TENSOR_SIGNATURE = "tensors"

Answer = Callable[[tf.Tensor], dict[str, tf.Tensor]]


def save_servable(run: TrainedRun, path: str) -> None:
    """Writes a run's model to a directory on this machine, for TensorFlow Serving.

    Both signatures resize the images to the size that the model was trained on, in the same way
    as the training data, and return `mask`, int32 [batch, height, width], and `probabilities`,
    float32 [batch, height, width, classes], of that size. They also return the masks at the
    images' original sizes, for which the probabilities are resized:

    - `serving_default`: `image_bytes`, string [batch], JPEG, PNG, BMP or GIF files -> `mask_png`,
      string [batch], a PNG for each image, whose pixel values are classes.
    - `tensors`: `images`, float32 [batch, any height, any width, 3], in [0, 255] ->
      `original_mask`, int32 [batch, any height, any width].

    The asset `class_names.txt` holds the names of the classes, one per line; `assets.extra` holds
    a warm-up request for each signature.

    Source: https://www.tensorflow.org/tfx/serving/saved_model_warmup
    """
    answer = _make_answer(run.model, run.image_size)
    encoded = _make_encoded_signature(answer, run.image_size)
    with temporary_directory() as directory:
        names = Path(directory) / "class_names.txt"
        names.write_text("".join(f"{name}\n" for name in run.class_names), encoding="utf-8")
        tf.saved_model.save(
            _Servable(run.model.weights, tf.saved_model.Asset(str(names)), encoded),
            path,
            signatures={
                encoded.name: encoded.whole,
                TENSOR_SIGNATURE: _make_tensor_signature(answer, run.image_size),
            },
        )
    _write_warmup(path, run.image_size)


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


def _make_answer(model: keras.Model, image_size: tuple[int, int]) -> Answer:
    def answer(images: tf.Tensor) -> dict[str, tf.Tensor]:
        images = tf.ensure_shape(images, [None, *image_size, 3])
        logits = model(tf.cast(images, model.inputs[0].dtype), training=False)
        return {
            "mask": tf.argmax(logits, -1, output_type=tf.int32),
            "probabilities": tf.nn.softmax(tf.cast(logits, tf.float32)),
        }

    return answer


def _make_encoded_signature(answer: Answer, image_size: tuple[int, int]) -> DividedSignature:
    @tf.function(input_signature=[tf.TensorSpec([], tf.string, name="image_bytes")])
    def read(image_bytes: tf.Tensor) -> dict[str, tf.Tensor]:
        with tf.control_dependencies([_check_bits(image_bytes)]):
            image = tf.io.decode_image(image_bytes, channels=3, expand_animations=False)
        image = tf.ensure_shape(image, [None, None, 3])
        pixels = tf.cast(_resize(image, image_size), tf.uint8)  # exact, and small in queues
        return {"image": pixels, "size": tf.shape(image)[:2]}

    def encode_mask(probabilities_and_size: tuple[tf.Tensor, tf.Tensor]) -> tf.Tensor:
        probabilities, size = probabilities_and_size
        mask = _find_classes(probabilities[None], size)[0]
        return tf.io.encode_png(tf.cast(mask, tf.uint8)[..., None])

    @tf.function(
        input_signature=[
            tf.TensorSpec([None, *image_size, 3], tf.uint8, name="image"),
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


def _check_bits(image_bytes: tf.Tensor) -> tf.Operation:
    """Returns the operation that refuses a PNG file of 16 bits, as `decode_image` does."""
    head = tf.strings.substr(image_bytes, 0, PNG_BITS_OFFSET + 1)
    bits = tf.io.decode_raw(head, tf.uint8)[PNG_BITS_OFFSET:]  # empty if the file is shorter
    is_png = tf.strings.substr(head, 0, len(PNG_SIGNATURE)) == PNG_SIGNATURE
    return tf.debugging.Assert(tf.reduce_all(bits <= 8) | ~is_png, [DEEP_IMAGE])


def _make_tensor_signature(answer: Answer, image_size: tuple[int, int]) -> Any:
    @tf.function(input_signature=[tf.TensorSpec([None, None, None, 3], tf.float32, name="images")])
    def answer_tensors(images: tf.Tensor) -> dict[str, tf.Tensor]:
        answers = answer(_resize(images, image_size))
        size = tf.shape(images)[1:3]
        answers["original_mask"] = _find_classes(answers["probabilities"], size)
        return answers

    return answer_tensors


def _resize(images: tf.Tensor, image_size: tuple[int, int]) -> tf.Tensor:
    """Resizes as `tfdist.tasks.images.reading.resize_image` does."""
    resized = tf.image.resize(images, image_size, method="bilinear", antialias=True)
    return tf.round(tf.clip_by_value(resized, 0.0, 255.0))


def _find_classes(probabilities: tf.Tensor, size: tf.Tensor) -> tf.Tensor:
    """Returns the masks, int32 [batch, *size], of probabilities of the model's size."""
    return tf.argmax(tf.image.resize(probabilities, size), -1, output_type=tf.int32)


def _write_warmup(path: str, image_size: tuple[int, int]) -> None:
    image = np.zeros((*image_size, 3), np.uint8)
    encoded = np.array([tf.io.encode_png(image).numpy()], object)
    requests = [
        (ENCODED_SIGNATURE, {"image_bytes": encoded}),
        (TENSOR_SIGNATURE, {"images": image[None].astype(np.float32)}),
    ]
    tf.io.gfile.makedirs(f"{path}/assets.extra")
    with tf.io.TFRecordWriter(f"{path}/assets.extra/tf_serving_warmup_requests") as writer:
        for signature, inputs in requests:
            writer.write(encode_predict_request(signature, inputs))
