"""Measures the memory of training steps, in a process of its own."""

import dataclasses

import tensorflow as tf
from tensorflow.python.client import device_lib

from tfdist import assembly, devices, memory
from tfdist.data.source import BatchSource
from tfdist.runs import processes
from tfdist.runs.options import TrainOptions
from tfdist.training.trainer import Trainer

_STEPS = 3  # the first traces and plans, the others are as all that follow


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class MadeUpSource(BatchSource):
    """Noise: examples as a run's, of which only the shapes are true.

    Attributes:
      image_size: height and width.
    """

    image_size: tuple[int, int]

    @property
    def element_spec(self) -> tuple[tf.TensorSpec, tf.TensorSpec]:
        """An image and its mask."""
        return (
            tf.TensorSpec((*self.image_size, 3), tf.float32),
            tf.TensorSpec(self.image_size, tf.int32),
        )

    def load_batch(self, indices: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns images, float32 in [0, 255], and masks, int32, for `indices` (int64 [batch])."""
        shape = [tf.shape(indices)[0], *self.image_size]
        images = tf.random.uniform([*shape, 3], 0.0, 255.0)
        return images, tf.random.uniform(shape, 0, self.num_classes, tf.int32)


def measure(
    options: TrainOptions, global_batch_size: int, *, num_classes: int
) -> dict[str, int | None]:
    """Trains a few steps and returns the memory that they took, in bytes.

    Returns:
      `peak`, the most in use of the GPU that had most, or of this process where it computes on
      CPUs; `gpu_limit`, what TensorFlow may take of the smallest GPU, or None.

    Raises:
      tf.errors.ResourceExhaustedError, MemoryError: it does not fit.
      TfdistError: what training would refuse.
    """
    assembly.configure_process(options)
    strategy = processes.build_strategy(options)
    gpu_limit = _find_gpu_limit(strategy)
    trainer = Trainer(
        assembly.make_build_model(
            assembly.leave_out_pretrained(options),
            num_classes=num_classes,
            class_names=tuple(map(str, range(num_classes))),
            class_weights=None if options.data.class_weights == "none" else [1.0] * num_classes,
            total_steps=options.training.max_steps or 1000,
        ),
        strategy=strategy,
        seed=options.training.seed,
        step_options=options.step,
    )
    source = MadeUpSource(
        num_examples=_STEPS * global_batch_size,
        num_classes=num_classes,
        ignore_label=options.data.ignore_label,
        image_size=options.data.image_size,
    )
    trainer.fit(
        source,
        global_batch_size=global_batch_size,
        augmentation=assembly.build_augmentation(options),
        verbose=0,
    )
    measure_peak = memory.measure_peak_memory if gpu_limit is None else devices.measure_peak_memory
    return {"peak": measure_peak(), "gpu_limit": gpu_limit}


def _find_gpu_limit(strategy: tf.distribute.Strategy) -> int | None:
    """Returns what TensorFlow may take of the smallest GPU; None if it computes on none."""
    if not any("GPU" in name for name in strategy.extended.worker_devices):
        return None
    found = device_lib.list_local_devices()
    return min(device.memory_limit for device in found if device.device_type == "GPU")
