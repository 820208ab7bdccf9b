"""How long training stands still for a checkpoint.

    python -m benchmarks.checkpoint_stall [--megabytes=30,1000] [--rounds=3] [--steps=20]
    python -m benchmarks.checkpoint_stall --megabytes=30 --steps=8 --step_s=1

Trains a model whose checkpoint has so many megabytes: steps alone, and with a checkpoint after each
of them, in turns. The stall is what a step takes longer; the copy of the variables is a part of it.
With `--step_s`, each step waits so long besides, in which the last checkpoint is written. Beside it
is the time of a copy in memory. Prints a Markdown table of medians over rounds.
Measure with nothing beside it, and with room for four checkpoints on the disk.
"""

import argparse
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass

import numpy as np

from tfdist.cli.quiet import start_tensorflow_quietly
from tfdist.launch.machine import describe_machine

_OUTPUTS = 1024
_BYTES = 3 * 4  # of each weight and Adam's two moments
_FIRST = 3  # steps that are not measured


@dataclass(frozen=True)
class Stall:
    """Seconds of a step, and of a checkpoint.

    Attributes:
      step_s: of a step without a checkpoint.
      stall_s: what a step with a checkpoint takes longer.
      save_s: the part of it in which variables are copied and the writer is waited for.
      copy_s: of a copy of as many bytes in memory.
    """

    step_s: float
    stall_s: float
    save_s: float
    copy_s: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--megabytes", default="30,1000")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--step_s", type=float, default=0.0)
    flags = parser.parse_args()
    start_tensorflow_quietly()
    sizes = [float(text) for text in flags.megabytes.split(",")]
    found: dict[float, list[Stall]] = {size: [] for size in sizes}
    for _ in range(flags.rounds):
        for size in sizes:
            found[size].append(measure(size, steps=flags.steps, step_s=flags.step_s))
    print(f"{describe_machine()}, medians of {flags.rounds} rounds\n")
    print("| checkpoint, MB | step, s | lost per checkpoint, s | of it in `save`, s | a copy, s |")
    print("|---|---|---|---|---|")
    for size, stalls in found.items():
        cells = [
            statistics.median(getattr(stall, name) for stall in stalls)
            for name in ("step_s", "stall_s", "save_s", "copy_s")
        ]
        print(f"| {size:g} | {' | '.join(f'{cell:.4f}' for cell in cells)} |")
    return 0


def measure(megabytes: float, *, steps: int, step_s: float = 0.0) -> Stall:
    """Returns one measurement of a model whose checkpoint has so many megabytes."""
    plain_s, _ = _time_steps(megabytes, steps=steps, step_s=step_s, checkpoint_every=0)
    with_s, save_s = _time_steps(megabytes, steps=steps, step_s=step_s, checkpoint_every=1)
    values = np.ones(round(megabytes * 1e6 / 4), np.float32)
    copy = np.empty_like(values)
    np.copyto(copy, values)  # its pages are there
    began = time.perf_counter()
    np.copyto(copy, values)
    copy_s = time.perf_counter() - began
    return Stall(step_s=plain_s, stall_s=with_s - plain_s, save_s=save_s, copy_s=copy_s)


def _time_steps(
    megabytes: float, *, steps: int, checkpoint_every: int, step_s: float = 0.0
) -> tuple[float, float]:
    """Returns the seconds of a step, and those in `Recovery.save` for each of its checkpoints."""
    import keras

    from tfdist.runs.clock import Clock
    from tfdist.training.fit.trainer import Trainer

    inputs = max(1, round(megabytes * 1e6 / _BYTES / _OUTPUTS))

    def build() -> keras.Model:
        model = keras.Sequential([keras.Input((inputs,)), keras.layers.Dense(_OUTPUTS)])
        model.compile("adam", "mse")
        return model

    count = steps + _FIRST
    with tempfile.TemporaryDirectory() as directory:
        trainer = Trainer(build, strategy="one_device", checkpoint_dir=directory)
        clock = Clock()
        wait = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: time.sleep(step_s)
        )
        trainer.fit(
            np.ones((count, inputs), np.float32),
            np.ones((count, _OUTPUTS), np.float32),
            batch_size=1,
            callbacks=[wait, clock],
            verbose=0,
            checkpoint_every=checkpoint_every,
        )
        assert trainer.recovery is not None
        return clock.measure_seconds(_FIRST, count) / steps, trainer.recovery.save_s / count


if __name__ == "__main__":
    sys.exit(main())
