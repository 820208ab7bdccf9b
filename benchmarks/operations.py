"""Shows how a training step spends its time, by kind of operation.

    python -m benchmarks.operations [--precision=mixed_bfloat16]

Trains the network of the other benchmarks on one device under TensorFlow's profiler, and prints
a Markdown table of the kinds of operations, with the number per step and the time for which they
keep the processor busy.
"""

import argparse
import collections
import sys
import tempfile
from pathlib import Path

from tfdist.benchmark.options import MeasuredModelOptions
from tfdist.cli.quiet import start_tensorflow_quietly
from tfdist.launch.machine import describe_machine

FIRST, LAST = 5, 8  # the profiled steps
LEAST = 0.01  # the share of time below which a kind is not listed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--precision", default="mixed_bfloat16")
    flags = parser.parse_args()
    start_tensorflow_quietly()
    with tempfile.TemporaryDirectory(prefix="tfdist-profile-") as directory:
        train(flags.precision, directory)
        (path,) = Path(directory).rglob("*.xplane.pb")
        seconds, counts = sum_by_kind(path)
    total, steps = sum(seconds.values()), LAST - FIRST + 1
    print(f"{describe_machine()}, {flags.precision}, {steps} steps\n")
    print("| operation | per step | busy, ms per step | share |\n|---|---|---|---|")
    for kind, busy in sorted(seconds.items(), key=lambda item: -item[1]):
        if busy / total >= LEAST:
            ms = busy / steps * 1e3
            print(f"| {kind} | {counts[kind] // steps} | {ms:.0f} | {busy / total:.1%} |")
    return 0


def train(precision: str, directory: str) -> None:
    """Trains a few steps and writes a profile of the last ones to a directory."""
    import keras
    import tensorflow as tf

    from tfdist.benchmark.measuring import build_model, make_batches
    from tfdist.runs import processes
    from tfdist.runs.options import TrainOptions
    from tfdist.strategies.options import make_strategy_options
    from tfdist.training.fit.trainer import Trainer
    from tfdist.training.options import TrainingOptions

    options = TrainOptions(
        strategy=make_strategy_options(strategy="one_device"),
        training=TrainingOptions(precision=precision),
    )
    processes.configure_process(options)
    model_options = MeasuredModelOptions(global_batch_size=16)
    x, y = make_batches(model_options)

    class Profile(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch + 1 == FIRST:
                tf.profiler.experimental.start(directory)

        def on_train_batch_end(self, batch, logs=None):
            if batch + 1 == LAST:
                tf.profiler.experimental.stop()

    strategy = processes.build_strategy(options)
    trainer = Trainer(lambda: build_model(model_options), strategy=strategy)
    trainer.fit(
        x,
        y,
        global_batch_size=model_options.global_batch_size,
        epochs=1,
        steps_per_epoch=LAST,
        callbacks=[Profile()],
        verbose=0,
    )


def sum_by_kind(path: Path) -> tuple[dict[str, float], dict[str, int]]:
    """Returns the seconds and the number of events of each kind of operation in a trace."""
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    space = xplane_pb2.XSpace()
    space.ParseFromString(path.read_bytes())
    seconds: dict[str, float] = collections.defaultdict(float)
    counts: dict[str, int] = collections.defaultdict(int)
    for plane in space.planes:
        if not plane.name.startswith("/host:CPU"):
            continue
        for line in plane.lines:
            for event in line.events:
                name, _, kind = plane.event_metadata[event.metadata_id].name.rpartition(":")
                # Operations are named node:kind; the executor's own events are class::method.
                if name and not name.endswith(":") and kind.isidentifier():
                    seconds[kind] += event.duration_ps * 1e-12
                    counts[kind] += 1
    return seconds, counts


if __name__ == "__main__":
    sys.exit(main())
