"""What logical replicas cost: steps and memory, beside the same strategy without them.

    python -m benchmarks.logical_replicas [--rounds=3] [--count=4] [-- FLAGS OF tfdist.train]

Every measurement is a run of `tfdist.train` of its own, and the forms take turns. Prints a Markdown
table with medians, and whether all runs with logical replicas ended with the same bits.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from tfdist.launch.machine import describe_machine

FLAGS = [
    *("--dataset=shapes", "--image_size=64,64", "--base_filters=16", "--depth=3"),
    *("--train_examples=640", "--val_examples=32", "--global_batch_size=32", "--epochs=2"),
    *("--notensorboard", "--quiet"),
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--count", type=int, default=4, help="logical replicas (default: 4)")
    parser.add_argument("flags", nargs="*", help="flags of tfdist.train, after --")
    given = parser.parse_args()
    logical = f"--logical_replicas={given.count}"
    two = ["-m", "tfdist.launch", "--workers=2", "--"]
    alone = ["-m", "tfdist.train"]
    forms = {
        "one device": [*alone, "--strategy=one_device"],
        "one device, logical": [*alone, "--strategy=one_device", logical],
        "mirrored": [*alone, "--strategy=mirrored", f"--virtual_devices={given.count}"],
        "mirrored, logical": [*alone, "--strategy=mirrored", logical],
        "2 workers": [*two, "--strategy=multi_worker_mirrored"],
        "2 workers, logical": [*two, "--strategy=multi_worker_mirrored", logical],
    }
    found: dict[str, list[dict]] = {name: [] for name in forms}
    for _ in range(given.rounds):
        for name, command in forms.items():
            found[name].append(_train([*command, *FLAGS, *given.flags]))
    print(f"{describe_machine()}\n\n| | examples/s | of the form above | first step (s) | MB |")
    print("|---|---|---|---|---|")
    last = 0.0
    for name, summaries in found.items():
        rate = _median(summaries, "examples_per_second")
        ratio = f"{rate / last:.2f}" if name.endswith("logical") else ""
        memory = _median(summaries, "peak_memory_bytes") / 1e6
        first = _median(summaries, "first_step_s")
        print(f"| {name} | {rate:.1f} | {ratio} | {first:.1f} | {memory:.0f} |")
        last = rate
    hashes = {s["weights_sha256"] for n, rows in found.items() for s in rows if "logical" in n}
    print(f"\nThe runs with logical replicas ended with {len(hashes)} set(s) of bits.")
    return 0 if len(hashes) == 1 else 1


def _median(summaries: list[dict], name: str) -> float:
    return statistics.median(summary[name] for summary in summaries)


def _train(command: list[str]) -> dict:
    with tempfile.TemporaryDirectory(prefix="tfdist-logical-") as directory:
        environ = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"}
        command = [sys.executable, *command, f"--run_dir={directory}"]
        run = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
        if run.returncode:
            raise RuntimeError(run.stdout[-2000:] + run.stderr[-2000:])
        return json.loads(Path(directory, "summary.json").read_text())


if __name__ == "__main__":
    sys.exit(main())
