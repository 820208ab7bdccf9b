"""Measures the memory of training steps, in a separate process."""

import contextlib
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tensorflow as tf

from tfdist import devices, memory
from tfdist.cli.command import EXIT_BAD_INPUT
from tfdist.errors import TfdistError
from tfdist.imports import import_named
from tfdist.internals import device_lib
from tfdist.runs import processes
from tfdist.runs.batch_size.trials import RepeatedSource, load_examples
from tfdist.runs.options import TrainOptions
from tfdist.training.fit.trainer import Trainer

_STEPS = 3  # the first one traces and plans; the others are like all later ones


def measure_trial(task: dict[str, Any]) -> dict[str, Any]:
    """Runs a trial of `tfdist.runs.batch_size.trials`, which this process does not outlive.

    Returns:
      What the trial's function measured; or only `problem`, why the batch does not fit, or
      `refusal`, why training would refuse the options.
    """
    _end_first()
    try:
        return import_named("measure", task["measure"])(
            TrainOptions.from_dict(task["options"]),
            task["size"],
            info=task["info"],
            examples=load_examples(Path(task["examples"])),
            **task["arguments"],
        )
    except (tf.errors.ResourceExhaustedError, MemoryError):
        return {"problem": "an allocation failed"}
    except TfdistError as error:
        if error.exit_status != EXIT_BAD_INPUT:
            raise
        return {"refusal": " ".join(str(error).split())}


def _end_first() -> None:
    """Makes this process end with its parent, and be killed first if the memory is full."""

    def watch() -> None:
        # Not through sys.stdin, whose lock would be held when the interpreter exits.
        os.read(0, 1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def measure(
    options: TrainOptions, global_batch_size: int, *, info: Mapping[str, Any], examples: Any
) -> dict[str, int | None]:
    """Trains a few steps and returns the memory that they used, in bytes.

    Args:
      examples: a structure of arrays: some of the run's examples.

    Returns:
      `peak`, the peak memory of the GPU that used most, or of this process if it computes on CPUs;
      `gpu_limit`, the memory that TensorFlow may use of the smallest GPU, or None.

    Raises:
      tf.errors.ResourceExhaustedError, MemoryError: the batch does not fit.
    """
    options, _ = processes.start_process(options)
    trainer = make_trainer(options, info)
    trainer.fit(
        RepeatedSource(examples, num_examples=_STEPS * global_batch_size),
        global_batch_size=global_batch_size,
        augmentation=options.task.select().make_augmentation(info),
        verbose=0,
    )
    return measure_memory(trainer.strategy)


def make_trainer(options: TrainOptions, info: Mapping[str, Any]) -> Trainer:
    """Returns a trainer for a run's model, in a process that the options have configured."""
    return Trainer(
        processes.make_build_model(
            options.task.select().without_downloads(),
            options.training,
            info,
            total_steps=options.training.max_steps or 1000,
        ),
        strategy=processes.build_strategy(options),
        seed=options.training.seed,
        step_options=options.step,
        placement=options.placement.select(),
    )


def measure_memory(strategy: tf.distribute.Strategy) -> dict[str, int | None]:
    """Returns the memory used so far, as `measure` does."""
    gpu_limit = _find_gpu_limit(strategy)
    measure_peak = memory.measure_peak_memory if gpu_limit is None else devices.measure_peak_memory
    return {"peak": measure_peak(), "gpu_limit": gpu_limit}


def _find_gpu_limit(strategy: tf.distribute.Strategy) -> int | None:
    """Returns the memory that TensorFlow may use of the smallest GPU; None without GPUs."""
    if not any("GPU" in name for name in strategy.extended.worker_devices):
        return None
    found = device_lib.list_local_devices()
    return min(device.memory_limit for device in found if device.device_type == "GPU")
