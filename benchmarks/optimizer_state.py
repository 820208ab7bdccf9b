"""Compares the step of `mirrored` and `multi_worker_mirrored` with and without `--shard_optimizer`.

    python -m benchmarks.optimizer_state [--rounds=5]

Trains the U-Net in alternated pairs, each run in its own processes. Prints a Markdown table of the
medians over the rounds, and of the ratio within each pair.
"""

import argparse
import statistics
import sys

from tfdist.launch.machine import describe_machine
from tfdist.plan.calibrate import run

MODEL = (
    "--dataset=shapes",
    "--image_size=128,128",
    "--base_filters=32",
    "--depth=4",
    "--train_examples=64",
    "--val_examples=16",
    "--global_batch_size=16",
)


def _list_devices(count: int) -> tuple[str, ...]:
    names = ",".join(f"CPU:{number}" for number in range(count))
    return ("--strategy=mirrored", f"--virtual_devices={count}", f"--devices={names}")


SETUPS = {
    "`mirrored`, 2 devices": (_list_devices(2), 1),
    "`mirrored`, 4 devices": (_list_devices(4), 1),
    "`multi_worker_mirrored`, 2 workers": (("--strategy=multi_worker_mirrored",), 2),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    print(f"{describe_machine()}, medians of {rounds} rounds\n")
    print("| setup | step, ms | with `--shard_optimizer` | ratio of a pair | range |")
    print("|---|---|---|---|---|", flush=True)
    for name, (flags, workers) in SETUPS.items():
        pairs = []
        for number in range(rounds):
            order = (False, True) if number % 2 == 0 else (True, False)
            found = {}
            for divided in order:
                extra = ("--shard_optimizer",) if divided else ()
                arguments = [*MODEL, *flags, *extra]
                found[divided] = run("steps", arguments, workers=workers)["step_s"]
            print(name, found, file=sys.stderr, flush=True)
            pairs.append((found[False], found[True]))
        whole, divided_s = (statistics.median(each) * 1e3 for each in zip(*pairs, strict=True))
        ratios = [with_parts / without for without, with_parts in pairs]
        print(
            f"| {name} | {whole:.0f} | {divided_s:.0f} | {statistics.median(ratios):.3f} "
            f"| {min(ratios):.3f}-{max(ratios):.3f} |",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
