"""Turns options into the objects that commands use."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import keras

from tfdist import devices
from tfdist.runs.options import TrainOptions
from tfdist.tasks.base import Task
from tfdist.training.checkpoint.initial_weights import InitialWeights
from tfdist.training.fit.averaging import average_statistics
from tfdist.training.optimizers import make_optimizer
from tfdist.training.options import TrainingOptions


def resolve_options(options: TrainOptions) -> TrainOptions:
    """Returns the options with everything resolved that depends on the machine."""
    precision = devices.choose_precision(options.training.precision)
    return dataclasses.replace(
        options, training=dataclasses.replace(options.training, precision=precision)
    )


def configure_process(options: TrainOptions) -> None:
    """Sets up devices, memory, precision and seeds; must run before anything else is made."""
    devices.configure_devices(options.strategy.virtual_devices)
    devices.configure_precision(options.training.precision)
    devices.configure_determinism(
        options.training.seed, deterministic=options.training.deterministic
    )


def make_build_model(
    task: Task,
    training: TrainingOptions,
    info: Mapping[str, Any],
    *,
    total_steps: int,
    initial: InitialWeights | None = None,
) -> Callable[[], keras.Model]:
    """Returns a function that builds and compiles a run's model.

    Args:
      task: the task that defines the model.
      training: the training options.
      info: what the model must know about the data.
      total_steps: the number of steps of the run.
      initial: the weights to start from, instead of the task's own.
    """

    def build_model() -> keras.Model:
        model = task.build_model(info, seed=training.seed)
        if initial is not None:
            initial.give_to(model)
        average_statistics(model, training)
        task.compile_model(model, make_optimizer(training, total_steps=total_steps), info)
        return model

    return build_model
