"""Trains a small model whose steps sleep, in one process of `benchmarks.stragglers`.

    python -m benchmarks.slow_worker DIRECTORY

`task.json` in the directory says what to train. The chief writes `result.json`.
"""

import json
import os
import sys
import time
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from tfdist.runs import processes
from tfdist.runs.options import TrainOptions
from tfdist.strategies.options import make_strategy_options
from tfdist.strategies.servers import run_server
from tfdist.training.fit.trainer import Trainer
from tfdist.training.step_options import StepOptions

WIDTH = 32
_PACE = "pace"  # in the directory in which a process runs


class Sleep(keras.layers.Layer):
    """Returns its input after some milliseconds for each example.

    How slow a process is, is in a file of the directory in which it runs, because all workers of
    a parameter server run the same graph: how many times as long every step takes, and the share
    of steps that take `straggler_factor` times as long.

    Args:
      example_ms: the milliseconds.
      straggler_factor: see there.
    """

    def __init__(self, example_ms: float, straggler_factor: float, **options):
        super().__init__(**options)
        self.example_ms, self.straggler_factor = example_ms, straggler_factor

    def call(self, inputs):
        # If the name were a constant, the chief would read its own file for all workers.
        is_odd = tf.reduce_any(tf.math.is_nan(inputs))
        text = tf.io.read_file(tf.where(is_odd, "", _PACE))
        slowness, share = tf.unstack(tf.strings.to_number(tf.strings.split(text)[:2]), 2)
        # As good as random: the digits of the clock below a millisecond.
        is_late = tf.math.floormod(tf.timestamp() * 1e3, 1.0) < tf.cast(share, tf.float64)
        factor = slowness * tf.where(is_late, self.straggler_factor, 1.0)
        rows = tf.cast(tf.shape(inputs)[0], tf.float32)
        micros = tf.cast(1e3 * self.example_ms * rows * factor, tf.int64)
        with tf.control_dependencies([sleep(micros)]):
            return tf.identity(inputs)


def sleep(micros: tf.Tensor) -> tf.Tensor:
    """Waits in a thread of TensorFlow, without using a core."""
    # Half of it before the element, and half before the end, which is looked for.
    variant = tf.raw_ops.SleepDataset(
        input_dataset=tf.data.experimental.to_variant(tf.data.Dataset.from_tensors(0)),
        sleep_microseconds=micros // 2,
        output_types=[tf.int32],
        output_shapes=[[]],
    )
    return tf.raw_ops.DatasetToSingleElement(
        dataset=variant, output_types=[tf.int32], output_shapes=[[]]
    )[0]


class Recorder(keras.callbacks.Callback):
    """Records when each step ends, and the mean loss until then."""

    def __init__(self):
        super().__init__()
        self.times: list[float] = []
        self.losses: list[float] = []

    def on_train_batch_end(self, batch, logs=None):
        self.times.append(time.perf_counter())
        self.losses.append(float((logs or {})["loss"]))


def build_model(example_ms: float, straggler_factor: float) -> keras.Model:
    """Returns an MLP that sleeps."""
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [
            keras.Input((WIDTH,)),
            Sleep(example_ms, straggler_factor),
            keras.layers.Dense(64, "tanh"),
            keras.layers.Dense(1),
        ]
    )
    model.compile(keras.optimizers.SGD(0.01), "mse")
    return model


def make_examples(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns examples of a function of `WIDTH` numbers, the same for all counts."""
    random = np.random.default_rng(0)
    weights = random.normal(size=(WIDTH, 1)) / 3
    x = random.normal(size=(count, WIDTH)).astype("float32")
    return x, np.tanh(x @ weights).astype("float32")


def main(directory: str) -> int:
    """Trains what `task.json` says; the chief writes the ends of the steps and their losses."""
    task = json.loads((Path(directory) / "task.json").read_text())
    options, config = processes.start_process(
        TrainOptions(strategy=make_strategy_options(strategy=task["strategy"], **task["flags"]))
    )
    name = f"{config.role}-{config.index}" if config else "worker-0"
    own = Path(directory) / f"of {name}"
    own.mkdir()
    slowness = task["slowness"][config.index] if config and config.role == "worker" else 1.0
    (own / _PACE).write_text(f"{slowness} {task['straggler_share']}")
    os.chdir(own)
    if config and not config.is_chief and task["strategy"] == "parameter_server":
        run_server(config)
        return 0
    trainer = Trainer(
        lambda: build_model(task["example_ms"], task["straggler_factor"]),
        strategy=processes.build_strategy(options),
        step_options=StepOptions(max_in_flight=task["max_in_flight"]),
    )
    recorder = Recorder()
    x, y = make_examples(task["steps"] * task["batch"])
    trainer.fit(x, y, global_batch_size=task["batch"], callbacks=[recorder], verbose=0)
    if config is None or config.is_chief:
        found = {"times": recorder.times, "losses": recorder.losses}
        found |= {"summary": trainer.engine.summarize()}
        (Path(directory) / "result.json").write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
