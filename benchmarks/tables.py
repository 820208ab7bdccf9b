"""Measures a table on parameter servers: whole, and divided by rows over the servers.

    python -m benchmarks.tables [--rows=200000] [--units=64] [--workers=1] [--ps=2] [--rounds=3]

Starts a cluster on this machine for each case and round, and prints a Markdown table: the median
time of a step, the bytes that a step sends between the tasks, and the largest memory of a server.
A step has 256 examples of 20 words; word k is 1 / k times as frequent as the first.
"""

import argparse
import json
import os
import pathlib
import resource
import statistics
import sys
import tempfile
import time
from typing import Any

import numpy as np

from tfdist.cli.quiet import start_tensorflow_quietly
from tfdist.cluster import resolve_cluster
from tfdist.launch import run_local_cluster

BATCH, WORDS = 256, 20
WARMUP_STEPS, STEPS = 4, 30
CASES = [(name, divided) for name in ("SGD", "Adam") for divided in (False, True)]


def build(optimizer: str, rows: int, units: int) -> Any:
    """Returns a classifier of texts."""
    import keras

    words = keras.Input((WORDS,), dtype="int32")
    x = keras.layers.GlobalAveragePooling1D()(keras.layers.Embedding(rows, units)(words))
    outputs = keras.layers.Dense(2)(keras.layers.Dense(64, "relu")(x))
    model = keras.Model(words, outputs)
    model.compile(
        getattr(keras.optimizers, optimizer)(0.01),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return model


def measure(optimizer: str, divided: bool, rows: int, units: int) -> dict[str, float]:
    """Trains as the chief; returns the medians of the steps."""
    import keras

    import tfdist

    seen = []

    def note(batch: int, logs: Any) -> None:
        lines = pathlib.Path("/proc/self/net/dev").read_text().splitlines()
        loopback = next(line for line in lines if line.strip().startswith("lo:"))
        seen.append((time.perf_counter(), int(loopback.split()[9])))

    trainer = tfdist.Trainer(
        lambda: build(optimizer, rows, units),
        strategy="parameter_server",
        step_options=tfdist.StepOptions(shard_tables_bytes=1 << 20 if divided else 0),
    )
    frequency = 1 / np.arange(1, rows + 1)
    rng = np.random.default_rng(0)
    x = rng.choice(rows, (BATCH * 32, WORDS), p=frequency / frequency.sum()).astype("int32")
    clock = keras.callbacks.LambdaCallback(on_train_batch_end=note)
    steps = WARMUP_STEPS + STEPS
    trainer.fit(x, x[:, 0] % 2, batch_size=BATCH, max_steps=steps, callbacks=[clock], verbose=0)
    taken = np.diff(np.array(seen[WARMUP_STEPS - 1 :]), axis=0)
    return {"s": float(np.median(taken[:, 0])), "bytes": float(np.median(taken[:, 1]))}


def run_task(arguments: argparse.Namespace) -> int:
    """Runs a task of the cluster; writes what it found."""
    start_tensorflow_quietly()
    from tfdist.strategies import run_server

    config = resolve_cluster()
    assert config is not None
    if config.role == "chief":
        optimizer, divided = CASES[arguments.case]
        found: Any = measure(optimizer, divided, arguments.rows, arguments.units)
    else:
        run_server()
        found = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    (arguments.directory / f"{config.task_name}.json").write_text(json.dumps(found))
    return 0


def run_case(case: int, arguments: argparse.Namespace) -> dict[str, float]:
    """Runs a cluster; returns its chief's numbers, and the largest memory of its servers."""
    with tempfile.TemporaryDirectory() as directory:
        own = [f"--case={case}", f"--directory={directory}"]
        own += [f"--rows={arguments.rows}", f"--units={arguments.units}"]
        result = run_local_cluster(
            workers=arguments.workers,
            ps=arguments.ps,
            command=[sys.executable, "-m", "benchmarks.tables", *own],
            train_flags=(),
            run_dir=pathlib.Path(directory),
            timeout_s=600,
            environ=dict(os.environ),
        )
        files = pathlib.Path(directory)
        if result.status:
            raise SystemExit((files / "logs" / "chief-0.log").read_text()[-3000:])
        found = json.loads((files / "chief-0.json").read_text())
        found["memory"] = max(json.loads(f.read_text()) for f in files.glob("ps-*.json"))
        return found


def main() -> int:
    parser = argparse.ArgumentParser()
    for name, default in (("rows", 200_000), ("units", 64), ("workers", 1), ("ps", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--case", type=int)
    parser.add_argument("--directory", type=pathlib.Path)
    arguments = parser.parse_args()
    if arguments.directory:
        return run_task(arguments)
    rounds = [
        [run_case(case, arguments) for case in range(len(CASES))] for _ in range(arguments.rounds)
    ]
    print(
        "| optimizer | table | step | sent per step | memory of a server |\n|---|---|---|---|---|"
    )
    for case, (optimizer, divided) in enumerate(CASES):
        s, sent, memory = (
            statistics.median(found[case][key] for found in rounds)
            for key in ("s", "bytes", "memory")
        )
        table = "divided" if divided else "whole"
        print(
            f"| {optimizer} | {table} | {s * 1e3:.1f} ms | {sent / 1e6:.2f} MB "
            f"| {memory / 1e6:.0f} MB |"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
