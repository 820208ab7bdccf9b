"""Measures one configuration, in its own process."""

import functools
import itertools
import resource
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist import devices, models
from tfdist.benchmark.configurations import Configuration
from tfdist.benchmark.options import BenchmarkOptions, MeasuredModelOptions
from tfdist.models.layers import FusedBatchNormalization
from tfdist.models.portable import to_keras_layers
from tfdist.runs import processes
from tfdist.runs.clock import Clock
from tfdist.runs.flops import TRAINING_PASSES, count_flops, measure_convolutions
from tfdist.runs.options import TrainOptions
from tfdist.strategies.options import make_strategy_options
from tfdist.strategies.registry import STRATEGIES
from tfdist.strategies.servers import run_server
from tfdist.tasks.base import Task
from tfdist.tasks.data import Data, to_sources
from tfdist.tasks.registry import select_task
from tfdist.training.fit.trainer import Trainer
from tfdist.training.options import TrainingOptions

BATCHES = 4  # kept in memory and used again and again


def measure_task(task: dict[str, Any]) -> dict[str, Any] | None:
    """Measures the configuration in a task that `tfdist.benchmark.runs` made."""
    configuration = Configuration(**task["configuration"])
    options = BenchmarkOptions.from_dict(task["options"])
    if configuration.kind == "ceiling":
        return measure_ceilings(configuration, options)
    return measure(configuration, options)


def measure(configuration: Configuration, options: BenchmarkOptions) -> dict[str, Any] | None:
    """Trains a configuration for some steps.

    Returns:
      `examples_per_second` over the measured steps, `first_step_s` (tracing included), and
      `peak_memory_bytes` and `cpu_s` of this process; None in a process that is not the chief.
    """
    train_options = _make_train_options(configuration, options)
    config = None
    if configuration.kind == "trainer":
        train_options, config = processes.start_process(train_options)
    else:  # a baseline runs without what tfdist configures
        devices.configure_precision(configuration.precision)
    if config and not config.is_chief and STRATEGIES[configuration.strategy].traits.has_servers:
        run_server(config)
        return None
    clock = Clock()
    batch, chosen = options.model.global_batch_size, options.contest
    steps = chosen.warmup_steps + chosen.steps
    examples = make_batches(options.model)
    if configuration.kind == "loop":
        run_loop(options.model, examples, steps, lambda loss: clock.on_train_batch_end(float(loss)))
    elif configuration.kind == "trainer":
        trainer = Trainer(
            lambda: build_model(options.model), strategy=processes.build_strategy(train_options)
        )
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(examples)
        trainer.fit(
            x,
            y,
            sample_weight=sample_weight,
            global_batch_size=batch,
            max_steps=steps,
            callbacks=[clock],
            verbose=0,
        )
    else:
        own = configuration.kind == "keras_fit"
        # Keras's `fit` uses XLA on a GPU unless it is told not to.
        jit = bool(tf.config.list_physical_devices("GPU"))
        model = build_model(options.model, keras_layers=not own, jit_compile=jit)
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(examples)
        model.fit(
            x,
            y,
            sample_weight=sample_weight,
            batch_size=batch,
            epochs=-(-steps // (len(keras.tree.flatten(x)[0]) // batch)),
            callbacks=[clock],
            verbose=0,
        )
    if config and not config.is_chief:
        return None
    return {
        "examples_per_second": clock.measure_rate(chosen.warmup_steps, steps) * batch,
        "first_step_s": clock.first_step_s,
        "peak_memory_bytes": devices.measure_peak_memory(),
        "cpu_s": sum(resource.getrusage(resource.RUSAGE_SELF)[:2]),
    }


def measure_ceilings(configuration: Configuration, options: BenchmarkOptions) -> dict[str, Any]:
    """Measures the machine with the model's convolutions, at a configuration's precision.

    Returns:
      Operations per second: `flops_per_second` of the fastest convolution, and
      `own_flops_per_second` of all together; `flops_per_example` of a training step.
    """
    processes.configure_process(_make_train_options(configuration, options))
    model = build_model(options.model)
    if not model.built:
        x = make_batches(options.model)[0]
        model(keras.tree.map_structure(lambda part: part[:1], x))
    fastest, together = measure_convolutions(model, batch_size=options.model.global_batch_size)
    return {
        "flops_per_second": fastest,
        "own_flops_per_second": together,
        "flops_per_example": TRAINING_PASSES * count_flops(model),
    }


def run_loop(
    options: MeasuredModelOptions,
    examples: tuple[Any, ...],
    steps: int | None,
    end_step: Callable[[tf.Tensor], object],
) -> None:
    """Trains with a loop as one would write it by hand; calls `end_step` with each loss."""
    model = build_model(options)
    optimizer, loss_of = model.optimizer, model.loss

    @tf.function
    def step(batch: tuple[Any, ...]) -> tf.Tensor:
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
        with tf.GradientTape() as tape:
            y_pred = model(x, training=True)
            if isinstance(loss_of, keras.losses.Loss):
                loss = loss_of(y, y_pred, sample_weight)
            else:
                loss = model.compute_loss(x, y, y_pred, sample_weight)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    data = tf.data.Dataset.from_tensor_slices(examples).repeat()
    batches = iter(data.batch(options.global_batch_size, drop_remainder=True).prefetch(2))
    if not model.built:
        model(keras.tree.map_structure(lambda part: part[:1], examples[0]))
    optimizer.build(model.trainable_variables)
    for _ in itertools.count() if steps is None else range(steps):
        end_step(step(next(batches)))


def _make_train_options(configuration: Configuration, options: BenchmarkOptions) -> TrainOptions:
    accelerators = len(tf.config.list_physical_devices("GPU"))
    split = configuration.replicas if accelerators < configuration.replicas > 1 else 0
    names = tuple(f"{'GPU' if accelerators else 'CPU'}:{i}" for i in range(configuration.replicas))
    return TrainOptions(
        strategy=make_strategy_options(
            strategy=configuration.strategy,
            virtual_devices=split,
            devices=names if configuration.workers == 1 else (),
        ),
        training=TrainingOptions(
            precision=configuration.precision, global_batch_size=options.model.global_batch_size
        ),
    )


def build_model(
    options: MeasuredModelOptions, *, keras_layers: bool = False, jit_compile: bool = False
) -> keras.Model:
    """Returns the compiled model that all configurations train.

    Args:
      keras_layers: whether to use Keras's own batch normalization instead of tfdist's.
      jit_compile: whether Keras compiles its step with XLA; a task decides by itself.
    """
    optimizer = keras.optimizers.Adam(1e-3)
    if options.task:
        task, data = _read_task(options)
        model = task.build_model(data.info, seed=0)
        model = _use_keras_layers(model) if keras_layers else model
        task.compile_model(model, optimizer, data.info)
        return model
    model = models.make_model(
        options.model,
        image_size=options.image_size,
        num_classes=options.num_classes,
        base_filters=options.base_filters,
        depth=options.depth,
        norm=options.norm,
    )
    if keras_layers:
        model = _use_keras_layers(model)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, jit_compile=jit_compile)
    return model


def make_batches(options: MeasuredModelOptions, count: int = BATCHES) -> tuple[Any, ...]:
    """Returns the examples of `count` batches for `fit`: `(x, y)` or `(x, y, sample_weight)`.

    They are the task's first training examples, or noise: images, float32 in [0, 255], and the
    class of each pixel, int32.
    """
    num_examples = count * options.global_batch_size
    if options.task:
        source = to_sources(_read_task(options)[1]).train
        places = tf.range(num_examples, dtype=tf.int64) % source.num_examples
        examples = source.load_batch(places)
        return tuple(tf.nest.map_structure(np.asarray, examples))
    random = np.random.default_rng(0)
    shape = (num_examples, *options.image_size)
    images = random.uniform(0, 255, (*shape, 3)).astype(np.float32)
    return images, random.integers(0, options.num_classes, shape, np.int32)


@functools.cache
def _read_task(options: MeasuredModelOptions) -> tuple[Task, Data]:
    task = select_task(options)
    return task, task.make_data(seed=0, quiet=True)


def _use_keras_layers(model: keras.Model) -> keras.Model:
    is_fused = any(isinstance(each, FusedBatchNormalization) for each in model._flatten_layers())
    return to_keras_layers(model) if is_fused else model
