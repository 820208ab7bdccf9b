"""Measures one contestant, in a process of its own."""

import resource
import time
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist import assembly, devices, models
from tfdist.benchmark.contestants import Contestant
from tfdist.benchmark.options import BenchmarkOptions, MeasuredModelOptions
from tfdist.models.layers import FusedBatchNormalization
from tfdist.runs import processes
from tfdist.runs.options import TrainOptions
from tfdist.strategies.options import make_strategy_options
from tfdist.strategies.registry import STRATEGIES
from tfdist.strategies.servers import run_server
from tfdist.training.flops import TRAINING_PASSES, count_flops, measure_convolutions
from tfdist.training.options import TrainingOptions
from tfdist.training.trainer import Trainer

_BATCHES = 4  # that are kept in memory and seen again and again


def measure(contestant: Contestant, options: BenchmarkOptions) -> dict[str, Any] | None:
    """Trains a contestant for some steps.

    Returns:
      `images_per_second` over the measured steps, `first_step_s` (tracing included), and
      `peak_memory_bytes` of this process; None in a process that is not the chief.
    """
    train_options = _make_train_options(contestant, options)
    config = None
    if contestant.workers > 1:
        config = processes.join_cluster(train_options)
    if contestant.kind == "trainer":
        assembly.configure_process(train_options)
    else:  # as its user would have it, without what tfdist sets up
        devices.configure_precision(contestant.precision)
    if config and not config.is_chief and STRATEGIES[contestant.strategy].traits.has_servers:
        run_server(config)
        return None
    clock = Clock()
    batch, chosen = options.model.global_batch_size, options.contest
    steps = chosen.warmup_steps + chosen.steps
    x, y = make_batches(options.model)
    if contestant.kind == "loop":
        _run_loop(options.model, x, y, steps, clock)
    elif contestant.kind == "trainer":
        trainer = Trainer(
            lambda: build_model(options.model), strategy=processes.build_strategy(train_options)
        )
        trainer.fit(x, y, global_batch_size=batch, max_steps=steps, callbacks=[clock], verbose=0)
    else:
        own = contestant.kind == "keras_fit"
        model = build_model(options.model, keras_layers=not own)
        epochs = -(-steps // _BATCHES)
        model.fit(x, y, batch_size=batch, epochs=epochs, callbacks=[clock], verbose=0)
    if config and not config.is_chief:
        return None
    return {
        "images_per_second": clock.measure_rate(chosen.warmup_steps, steps) * batch,
        "first_step_s": clock.first_step_s,
        "peak_memory_bytes": devices.measure_peak_memory(),
        "cpu_s": sum(resource.getrusage(resource.RUSAGE_SELF)[:2]),
    }


def measure_ceilings(contestant: Contestant, options: BenchmarkOptions) -> dict[str, Any]:
    """Measures the machine with the model's convolutions, at a contestant's precision.

    Returns:
      Operations a second: `flops_per_second` of the fastest convolution, and
      `own_flops_per_second` of all together; `flops_per_image` of a training step.
    """
    assembly.configure_process(_make_train_options(contestant, options))
    model = build_model(options.model)
    fastest, together = measure_convolutions(model, batch_size=options.model.global_batch_size)
    return {
        "flops_per_second": fastest,
        "own_flops_per_second": together,
        "flops_per_image": TRAINING_PASSES * count_flops(model),
    }


def build_model(options: MeasuredModelOptions, *, keras_layers: bool = False) -> keras.Model:
    """Returns the compiled model that all contestants train.

    Args:
      options: its size.
      keras_layers: with Keras's own batch normalisation instead of tfdist's.
    """
    model = models.make_model(
        options.model,
        image_size=options.image_size,
        num_classes=options.num_classes,
        base_filters=options.base_filters,
        depth=options.depth,
        norm=options.norm,
    )
    if keras_layers:
        model = keras.models.clone_model(model, clone_function=_use_keras_layer)
    # "auto" would take XLA, which is slower on CPUs.
    jit = bool(tf.config.list_physical_devices("GPU"))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-3), loss, jit_compile=jit)
    return model


def make_batches(options: MeasuredModelOptions) -> tuple[np.ndarray, np.ndarray]:
    """Returns images, float32 in [0, 255], and masks, int32, that are noise."""
    random = np.random.default_rng(0)
    shape = (_BATCHES * options.global_batch_size, *options.image_size)
    images = random.uniform(0, 255, (*shape, 3)).astype(np.float32)
    return images, random.integers(0, options.num_classes, shape, np.int32)


class Clock(keras.callbacks.Callback):
    """Notes when each step ended."""

    def __init__(self):
        super().__init__()
        self._began = time.perf_counter()
        self._ends: list[float] = []

    @property
    def first_step_s(self) -> float:
        """From when it was made to the end of the first step."""
        return self._ends[0] - self._began

    def on_train_batch_end(self, batch, logs=None):
        self._ends.append(time.perf_counter())

    def measure_rate(self, first: int, last: int) -> float:
        """Returns steps a second, from the end of one step to that of another."""
        return (last - first) / (self._ends[last - 1] - self._ends[first - 1])


def _run_loop(
    options: MeasuredModelOptions, x: np.ndarray, y: np.ndarray, steps: int, clock: Clock
) -> None:
    """Trains as one would by hand, on one device."""
    model = build_model(options)
    optimizer, loss_of = model.optimizer, model.loss
    optimizer.build(model.trainable_variables)

    @tf.function
    def step(images: tf.Tensor, masks: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(masks, model(images, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    data = tf.data.Dataset.from_tensor_slices((x, y)).repeat()
    batches = iter(data.batch(options.global_batch_size, drop_remainder=True).prefetch(2))
    for number in range(steps):
        float(step(*next(batches)))
        clock.on_train_batch_end(number)


def _use_keras_layer(layer: keras.layers.Layer) -> keras.layers.Layer:
    if not isinstance(layer, FusedBatchNormalization):
        return layer.__class__.from_config(layer.get_config())
    return keras.layers.BatchNormalization(
        momentum=layer.momentum, epsilon=layer.epsilon, name=layer.name
    )


def _make_train_options(contestant: Contestant, options: BenchmarkOptions) -> TrainOptions:
    accelerators = len(tf.config.list_physical_devices("GPU"))
    split = contestant.replicas if accelerators < contestant.replicas > 1 else 0
    names = tuple(f"{'GPU' if accelerators else 'CPU'}:{i}" for i in range(contestant.replicas))
    return TrainOptions(
        strategy=make_strategy_options(
            strategy=contestant.strategy,
            virtual_devices=split,
            devices=names if contestant.workers == 1 else (),
        ),
        training=TrainingOptions(
            precision=contestant.precision, global_batch_size=options.model.global_batch_size
        ),
    )
