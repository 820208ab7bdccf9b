"""Shows within eight minutes what a machine's GPU does: equality, throughput, memory.

    python -m benchmarks.gpu [--python=PATH] [--output=DIR]

Runs one command after the other, each with a limit of time, and writes `results.json` after each of
them. `--python` is an interpreter with PyTorch. The exit status is 1 if one of them failed.
`--image_size=32 --base_filters=4` tries the commands on a machine without a GPU.
"""

import argparse
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import against_pytorch as pytorch
from tfdist.benchmark.machine import describe_machine
from tfdist.benchmark.options import BenchmarkOptions, ContestOptions, MeasuredModelOptions

LIST = (
    "import tensorflow as tf; print([tf.config.experimental.get_device_details(g) for g in "
    "tf.config.list_physical_devices('GPU')], tf.sysconfig.get_build_info())"
)
EQUAL_LOSS = 1e-3  # between runs with and without XLA, relative


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--python", default="", help="an interpreter with PyTorch")
    parser.add_argument("--output", default="gpu", metavar="DIR", help="directory of the results")
    parser.add_argument("--image_size", type=int, default=256, help="height and width in pixels")
    parser.add_argument("--base_filters", type=int, default=32)
    parser.add_argument("--global_batch_size", type=int, default=32)
    flags = parser.parse_args()
    output = Path(flags.output)
    output.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {"machine": describe_machine()}
    for name, run in list_measurements(flags, output).items():
        began = time.monotonic()
        try:
            results[name] = run()
        except (subprocess.SubprocessError, AssertionError, OSError) as error:
            results[name] = {"error": str(error), "output": getattr(error, "output", None)}
        results[name]["seconds"] = round(time.monotonic() - began, 1)
        print(name, {k: v for k, v in results[name].items() if k != "output"}, flush=True)
        (output / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    return int(any("error" in result for result in results.values() if isinstance(result, dict)))


def list_measurements(
    flags: argparse.Namespace, output: Path
) -> dict[str, Callable[[], dict[str, Any]]]:
    """Returns name -> a function that measures, and returns what it found."""
    size, filters = flags.image_size, flags.base_filters
    model = f"--image_size={size},{size} --base_filters={filters}"
    batch = f"--global_batch_size={flags.global_batch_size}"
    verify = "tfdist.verify --strategies=mirrored --optimizer=sgd --steps=10 --precision="
    found: dict[str, Callable[[], dict[str, Any]]] = {
        "devices": lambda: run_python(["-c", LIST], limit_s=60),
        "two replicas, float64": lambda: run_module(f"{verify}float64", 60),
        "two replicas, mixed_bfloat16": lambda: run_module(f"{verify}mixed_bfloat16", 60),
        "deterministic": lambda: compare_runs(
            output, [f"{model} {batch} --deterministic"] * 2, key="weights_sha256"
        ),
        "XLA": lambda: compare_runs(
            output,
            [f"{model} {batch} --norm=group {xla}" for xla in ("", "--jit_compile")],
            key="loss",
        ),
        "mixed_float16": lambda: compare_runs(
            output, [f"{model} {batch} --precision=mixed_float16"], key="loss"
        ),
        "throughput": lambda: run_module(
            f"tfdist.benchmark --strategies=one_device --rounds=1 {model} {batch} "
            f"--output={shlex.quote(str(output / 'throughput'))}",
            240,
        ),
        "largest batch": lambda: compare_runs(
            output,
            [f"{model} --global_batch_size=auto --train_examples=2048"],
            key="global_batch_size",
        ),
    }
    if flags.python:
        found["PyTorch"] = lambda: measure_pytorch(flags)
    return found


def run_python(arguments: list[str], *, limit_s: float) -> dict[str, Any]:
    """Runs an interpreter, and returns the end of its output."""
    done = subprocess.run(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=limit_s,
        check=True,
    )
    return {"output": done.stdout[-4000:]}


def run_module(command: str, limit_s: float) -> dict[str, Any]:
    """Runs a command of tfdist, and returns the end of its output."""
    return run_python(["-m", *shlex.split(command)], limit_s=limit_s)


def compare_runs(output: Path, flags: list[str], *, key: str) -> dict[str, Any]:
    """Trains once for each set of flags, and compares an entry of the summaries."""
    found = []
    for number, own in enumerate(flags):
        run_dir = output / f"{key}-{time.time_ns()}-{number}"
        run_module(
            f"tfdist.train --strategy=one_device --train_examples=256 --val_examples=32 "
            f"--max_steps=8 --quiet {own} --run_dir={shlex.quote(str(run_dir))}",
            90,
        )
        summary = json.loads((run_dir / "summary.json").read_text())
        found.append(summary[key])
    first = found[0]
    if isinstance(first, float):
        assert all(abs(value / first - 1) < EQUAL_LOSS for value in found), found
    else:
        assert all(value == first for value in found), found
    return {key: found, "examples_per_second": summary["examples_per_second"]}


def measure_pytorch(flags: argparse.Namespace) -> dict[str, Any]:
    """Measures the same U-Net in PyTorch, eager and compiled, in both precisions."""
    size = (flags.image_size, flags.image_size)
    options = BenchmarkOptions(
        contest=ContestOptions(timeout_s=90.0),
        model=MeasuredModelOptions(
            base_filters=flags.base_filters,
            image_size=size,
            global_batch_size=flags.global_batch_size,
        ),
    )
    configurations = [*pytorch.EAGER.values(), *pytorch.COMPILED.values()]
    return {
        f"{c.kind}, {c.precision}": pytorch.run_pytorch(c, options, flags.python)
        for c in configurations
    }


if __name__ == "__main__":
    sys.exit(main())
