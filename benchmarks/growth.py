"""How the cost grows with the image size, the batch, the workers and the data set.

    python -m benchmarks.growth [--rounds=3]

Prints a Markdown table. Times are medians over rounds, each of which measures every row. Workers
share the cores if there are more workers than cores; the table then shows each worker's overhead.
"""

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tfdist.benchmark.configurations import Configuration
from tfdist.benchmark.options import BenchmarkOptions, ContestOptions, MeasuredModelOptions
from tfdist.benchmark.runs import run_configuration
from tfdist.launch.machine import describe_machine

SMALL = MeasuredModelOptions(image_size=(64, 64), base_filters=16, depth=3, global_batch_size=16)
EXAMPLES = (10_000, 1_000_000)
WORKERS = (1, 2, 3, 4)

Row = tuple[str, str]  # what grows, and its value
Case = Callable[[], dict[str, Any]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    flags = parser.parse_args()
    cases = make_cases()
    found: dict[Row, list[dict[str, Any]]] = {row: [] for row in cases}
    for number in range(flags.rounds):
        for row in list(cases)[:: 1 if number % 2 == 0 else -1]:
            finding = cases[row]()
            found[row].append(finding)
            print(*row, finding, sep="; ", file=sys.stderr, flush=True)
    print(f"{describe_machine()}, medians of {flags.rounds} rounds\n")
    print("| grows | | examples/s | step, ms | memory, MiB | first step after, s |")
    print("|---|---|---|---|---|---|")
    for (what, value), findings in found.items():
        cells = (
            format_median(findings, "examples_per_second", 1, "{:.1f}"),
            format_median(findings, "step_s", 1e3, "{:.0f}"),
            format_median(findings, "peak_memory_bytes", 2**-20, "{:.0f}"),
            format_median(findings, "first_step_s", 1, "{:.1f}"),
        )
        print(f"| {what} | {value} | {' | '.join(cells)} |")
    return int(any("error" in finding for findings in found.values() for finding in findings))


def make_cases() -> dict[Row, Case]:
    """Returns row -> function that measures it once."""
    cases: dict[Row, Case] = {}
    for size in (64, 128):
        model = dataclasses.replace(SMALL, image_size=(size, size))
        cases["image", f"{size}x{size}"] = _make_case(Configuration(), model)
    for batch in (16, 64):
        model = dataclasses.replace(SMALL, global_batch_size=batch)
        cases["global batch", str(batch)] = _make_case(Configuration(), model)
    for workers in WORKERS:
        # One worker needs no cluster.
        strategy = "multi_worker_mirrored" if workers > 1 else "one_device"
        configuration = Configuration(strategy=strategy, workers=workers)
        cases["workers", str(workers)] = _make_case(configuration, SMALL)
    for examples in EXAMPLES:
        cases["training examples", f"{examples:,}"] = lambda n=examples: measure_run(n)
    return cases


def _make_case(configuration: Configuration, model: MeasuredModelOptions) -> Case:
    options = BenchmarkOptions(contest=ContestOptions(), model=model)

    def measure() -> dict[str, Any]:
        finding = run_configuration(configuration, options)
        if "examples_per_second" in finding:
            finding["step_s"] = model.global_batch_size / finding["examples_per_second"]
        return finding

    return measure


def measure_run(num_examples: int) -> dict[str, Any]:
    """Trains ten steps on `shapes`, which generates its examples as they are read."""
    with tempfile.TemporaryDirectory(prefix="tfdist-growth-") as directory:
        flags = ["--dataset=shapes", "--image_size=64,64", "--base_filters=16", "--depth=3"]
        flags += ["--strategy=one_device", "--val_examples=16", "--max_steps=10", "--quiet"]
        flags += [f"--train_examples={num_examples}", f"--run_dir={directory}/run"]
        subprocess.run([sys.executable, "-m", "tfdist.train", *flags], check=True)
        summary = json.loads((Path(directory) / "run" / "summary.json").read_text())
    names = ("examples_per_second", "peak_memory_bytes", "first_step_s")
    return {name: summary[name] for name in names if name in summary}


def format_median(findings: list[dict[str, Any]], key: str, factor: float, form: str) -> str:
    """Returns the median of a key times a factor, or `-` where there is none."""
    values = [finding[key] for finding in findings if key in finding]
    return form.format(statistics.median(values) * factor) if values else "-"


if __name__ == "__main__":
    sys.exit(main())
