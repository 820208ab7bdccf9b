"""Compares tfdist with PyTorch and Keras on one machine: the same U-Net, batches and optimizer.

    pip install -r benchmarks/requirements-pytorch.txt
    python -m benchmarks.against_pytorch [--rounds=3] [--output=DIR] [--python=PATH]

First checks that both networks have the same number of parameters and, with the same weights, the
same outputs. Then measures all configurations in turn, each in its own processes, and prints a
table and the ratios. The exit status is 1 if a configuration failed or the networks differ.
`--python` is the interpreter that has PyTorch, if it is not this one.
"""

import argparse
import dataclasses
import datetime
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tfdist.benchmark import runs, table
from tfdist.benchmark.configurations import Configuration
from tfdist.benchmark.options import BenchmarkOptions, ContestOptions, MeasuredModelOptions
from tfdist.cli.quiet import start_tensorflow_quietly
from tfdist.launch import call
from tfdist.launch.machine import describe_machine

F32, BF16 = "float32", "mixed_bfloat16"
SCRIPT = Path(__file__).with_name("pytorch_unet.py")
TORCH_EAGER, TORCH_COMPILED = "PyTorch eager", "PyTorch compiled"
OWN_BATCHES = "trainer, --norm=batch"  # as PyTorch, which normalizes each process's own batch
LARGEST_DIFFERENCE = 1e-4  # between the outputs, relative to the largest output

ONE = {precision: Configuration(precision=precision) for precision in (F32, BF16)}
LOOP = {p: Configuration(kind="loop", precision=p) for p in (F32, BF16)}
KERAS = {p: Configuration(kind="keras_layers_fit", precision=p) for p in (F32, BF16)}
EAGER = {p: Configuration(kind=TORCH_EAGER, precision=p) for p in (F32, BF16)}
COMPILED = {p: Configuration(kind=TORCH_COMPILED, precision=p) for p in (F32, BF16)}
MIRRORED = Configuration(strategy="mirrored", replicas=2)
ONE_CORE = Configuration(cores=1)
TWO_WORKERS = Configuration(strategy="multi_worker_mirrored", workers=2)
TWO_OWN = dataclasses.replace(TWO_WORKERS, kind=OWN_BATCHES)
DDP = [Configuration(kind=kind, workers=2) for kind in (TORCH_EAGER, TORCH_COMPILED)]
CONFIGURATIONS = [
    *(Configuration(kind="ceiling", precision=p) for p in (F32, BF16)),
    *(group[p] for p in (F32, BF16) for group in (LOOP, KERAS, EAGER, COMPILED, ONE)),
    MIRRORED,
    ONE_CORE,
    TWO_WORKERS,
    TWO_OWN,
    *DDP,
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    defaults = BenchmarkOptions()
    parser.add_argument("--rounds", type=int, default=defaults.contest.rounds)
    parser.add_argument("--steps", type=int, default=defaults.contest.steps, help="per round")
    parser.add_argument("--base_filters", type=int, default=defaults.model.base_filters)
    parser.add_argument("--image_size", type=int, default=128, help="height and width in pixels")
    parser.add_argument("--python", default=sys.executable, help="the interpreter with PyTorch")
    parser.add_argument("--output", default="", metavar="DIR", help="directory for the results")
    flags = parser.parse_args()
    options = BenchmarkOptions(
        contest=ContestOptions(rounds=flags.rounds, steps=flags.steps),
        model=MeasuredModelOptions(
            base_filters=flags.base_filters, image_size=(flags.image_size, flags.image_size)
        ),
    )
    parameters, difference = compare_networks(options.model, flags.python)
    print(
        f"{describe_machine()}; both networks have {parameters:,} parameters, and their outputs "
        f"differ by at most {difference:.1e} of the largest output.",
        flush=True,
    )

    def measure(configuration: Configuration, options: BenchmarkOptions) -> dict[str, Any]:
        if configuration.kind in (TORCH_EAGER, TORCH_COMPILED):
            return run_pytorch(configuration, options, flags.python)
        if configuration.kind == OWN_BATCHES:
            configuration = dataclasses.replace(configuration, kind="trainer")
            model = dataclasses.replace(options.model, norm="batch")
            options = dataclasses.replace(options, model=model)
        return runs.run_configuration(configuration, options)

    def report(number: int, configuration: Configuration, finding: dict[str, Any]) -> None:
        said = finding.get("error") or f"{finding.get('examples_per_second', 0):.2f} examples/s"
        name = f"{configuration.name}, {configuration.precision}"
        print(f"round {number}: {name}: {said}", file=sys.stderr, flush=True)

    found = runs.run_rounds(CONFIGURATIONS, options, report, measure=measure)
    rows = table.make_rows(found)
    print("", table.format_table(rows), "", *list_ratios(rows), sep="\n")
    if flags.output:
        directory = Path(flags.output)
        directory.mkdir(parents=True, exist_ok=True)
        about = {"date": datetime.date.today().isoformat(), "machine": describe_machine()}
        content = json.dumps(about | table.to_json(found), indent=2)
        (directory / "results.json").write_text(content + "\n")
        (directory / "results.html").write_text(table.make_page(rows), encoding="utf-8")
    return int(difference > LARGEST_DIFFERENCE or any(row.error for row in rows))


def list_ratios(rows: list[table.Row]) -> list[str]:
    """Returns the lines of a Markdown table of the ratios that matter, each with its minimum."""
    of = {row.configuration: row.examples_per_second for row in rows if row.examples_per_second}
    by_configuration = {row.configuration: row for row in rows}
    torch = {p: max((COMPILED[p], EAGER[p]), key=lambda c: of.get(c, 0.0)) for p in (F32, BF16)}
    ddp = max(DDP, key=lambda c: of.get(c, 0.0))
    pairs = [
        ("trainer / loop by hand, float32", ONE[F32], LOOP[F32], 1, 0.99),
        ("trainer / loop by hand, bfloat16", ONE[BF16], LOOP[BF16], 1, 0.99),
        ("trainer / Keras fit, float32", ONE[F32], KERAS[F32], 1, 1.25),
        ("trainer / PyTorch compiled, float32", ONE[F32], COMPILED[F32], 1, 1.25),
        ("trainer / Keras fit, bfloat16", ONE[BF16], KERAS[BF16], 1, 1.30),
        ("trainer / PyTorch's best, bfloat16", ONE[BF16], torch[BF16], 1, 1.15),
        ("trainer bfloat16 / Keras fit float32", ONE[BF16], KERAS[F32], 1, 2.2),
        ("mirrored on 2 virtual devices / one device", MIRRORED, ONE[F32], 1, 0.97),
        ("2 processes / twice one on one core", TWO_WORKERS, ONE_CORE, 2, 0.95),
        ("2 processes / PyTorch DDP's best, gloo", TWO_WORKERS, ddp, 1, 1.15),
        ("2 processes, --norm=batch / PyTorch DDP's best, gloo", TWO_OWN, ddp, 1, 1.15),
    ]
    lines = ["| ratio | measured | at least |", "|---|---|---|"]
    for text, above, below, times, least in pairs:
        if above in of and below in of:
            lines.append(f"| {text} | {of[above] / (times * of[below]):.2f} | {least} |")
    for precision, least in ((F32, 0.78), (BF16, 0.65)):
        row = by_configuration[ONE[precision]]
        if row.of_peak is not None:
            for of_what, share in (("all", row.of_convolutions), ("the fastest", row.of_peak)):
                text = f"MFU relative to {of_what} of its convolutions alone, {precision}"
                lines.append(f"| {text} | {share:.2f} | {least} |")
    return lines


def run_pytorch(
    configuration: Configuration, options: BenchmarkOptions, python: str
) -> dict[str, Any]:
    """Measures PyTorch once, as `tfdist.benchmark.runs.run_configuration` measures tfdist."""
    task = {
        **_describe_model(options.model),
        "compiled": configuration.kind == TORCH_COMPILED,
        "bfloat16": configuration.precision == BF16,
        "global_batch_size": options.model.global_batch_size,
        "warmup_steps": options.contest.warmup_steps,
        "steps": options.contest.steps,
    }
    command = [python, str(SCRIPT), "measure"]
    return call.call_in_cluster(
        task, command, workers=configuration.workers, timeout_s=options.contest.timeout_s
    )


def compare_networks(options: MeasuredModelOptions, python: str) -> tuple[int, float]:
    """Returns the networks' number of parameters, and the largest difference of their outputs.

    Raises:
      SystemExit: PyTorch failed, or its network has another number of parameters.
    """
    start_tensorflow_quietly()
    import numpy as np

    from tfdist.benchmark.measuring import build_model

    model = build_model(options)
    random = np.random.default_rng(0)
    images = random.uniform(0, 255, (2, *options.image_size, 3)).astype(np.float32)
    arrays = {}
    for layer in model.layers:
        for weight in layer.weights:
            # Moving statistics of exactly 0 and 1 would hide a mistake in them.
            value = weight.numpy()
            if value.ndim == 1:
                value = (value + random.uniform(0.5, 1.0, value.shape)).astype(np.float32)
                weight.assign(value)
            arrays[f"{layer.name}/{weight.name}"] = value
    with tempfile.TemporaryDirectory(prefix="tfdist-pytorch-") as directory:
        (Path(directory) / "task.json").write_text(json.dumps(_describe_model(options)))
        outputs = model.predict_on_batch(images)
        np.savez(Path(directory) / "keras.npz", images=images, outputs=outputs, **arrays)
        done = subprocess.run([python, str(SCRIPT), "check", directory], check=False)
        if done.returncode:
            raise SystemExit(
                "PyTorch failed. Run pip install -r benchmarks/requirements-pytorch.txt, or name "
                "an interpreter that has PyTorch with --python."
            )
        found = json.loads((Path(directory) / "result.json").read_text())
    count = sum(int(np.prod(v.shape)) for v in model.trainable_variables)
    if count != found["parameters"]:
        raise SystemExit(f"{count} parameters in Keras, {found['parameters']} in PyTorch.")
    return count, found["relative_difference"]


def _describe_model(options: MeasuredModelOptions) -> dict[str, Any]:
    values = dataclasses.asdict(options)
    names = ("num_classes", "base_filters", "depth")
    return {"model": {n: values[n] for n in names}, "image_size": list(options.image_size)}


if __name__ == "__main__":
    sys.exit(main())
