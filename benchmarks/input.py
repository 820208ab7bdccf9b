"""How much of its speed training keeps with real data, and what determinism costs.

    python -m benchmarks.input --data_dir=camvid [--rounds=3] [-- FLAGS OF tfdist.train]

Trains on CamVid (11 classes, void ignored) with every augmentation and each `--cache`, and, for
comparison, on a single batch without augmentation. Prints a Markdown table of medians over rounds.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tfdist.launch.machine import describe_machine

FLAGS = [
    "--strategy=one_device",
    "--dataset=folder",
    "--num_classes=11",
    "--ignore_label=11",
    "--image_size=128,160",
    "--global_batch_size=16",
    "--val_examples=16",
    "--quiet",
]
AUGMENTED = "--flip --scale=0.7,1.6 --color=0.2"
CASES = {
    "one batch, not augmented": "--train_examples=16 --noflip --scale=1,1 --color=0",
    "CamVid, augmented": AUGMENTED,
    "CamVid, augmented, `--cache=disk`": f"{AUGMENTED} --cache=disk",
    "CamVid, augmented, `--cache=none`": f"{AUGMENTED} --cache=none",
    "CamVid, augmented, `--deterministic`": f"{AUGMENTED} --deterministic",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data_dir", required=True, help="CamVid, as tfdist.train reads it")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("flags", nargs="*", help="more flags of tfdist.train")
    given = parser.parse_args()
    common = [*FLAGS, f"--data_dir={given.data_dir}", f"--max_steps={given.steps}", *given.flags]
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in CASES}
    for number in range(given.rounds):
        for name in list(CASES)[:: 1 if number % 2 == 0 else -1]:
            finding = train([*common, *CASES[name].split()])
            found[name].append(finding)
            print(name, finding, sep="; ", file=sys.stderr, flush=True)
    rates = {
        name: statistics.median(finding["examples_per_second"] for finding in findings)
        for name, findings in found.items()
    }
    print(f"{describe_machine()}, {' '.join(given.flags)} medians of {given.rounds} rounds\n")
    print("| | examples/s | relative to one batch | input fraction |\n|---|---|---|---|")
    for name, findings in found.items():
        shares = [f["input_fraction"] for f in findings if f.get("input_fraction") is not None]
        waited = f"{statistics.median(shares):.1%}" if shares else "-"
        share = rates[name] / next(iter(rates.values()))
        print(f"| {name} | {rates[name]:.2f} | {share:.2f} | {waited} |")
    return 0


def train(flags: list[str]) -> dict[str, Any]:
    """Trains a run and returns the entries of its summary about the speed."""
    with tempfile.TemporaryDirectory(prefix="tfdist-input-") as directory:
        command = [sys.executable, "-m", "tfdist.train", *flags, f"--run_dir={directory}/run"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        summary = json.loads((Path(directory) / "run" / "summary.json").read_text())
    return {name: summary.get(name) for name in ("examples_per_second", "input_fraction")}


if __name__ == "__main__":
    sys.exit(main())
