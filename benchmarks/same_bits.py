"""Whether logical replicas end with the same bits in every arrangement, for programs of many kinds.

    python -m benchmarks.same_bits [--steps=30] [--count=4] [--precisions=a,b] [--programs=a,b]

Trains each program on one device, under `mirrored`, `central_storage`, and on 2 to `--count`
workers. Prints a Markdown table: the hash of the weights, and where another one was found. Weights,
the optimizer's state, the history, an evaluation and predictions are compared.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from tests.strategies.logical_task import PROGRAMS, run_alone, run_workers


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=30, help="a multiple of 3 (default: 30)")
    parser.add_argument("--count", type=int, default=4, help="logical replicas (default: 4)")
    parser.add_argument("--precisions", default="float32,float64,mixed_bfloat16")
    parser.add_argument("--programs", default=",".join(PROGRAMS))
    flags = parser.parse_args()
    programs = flags.programs.split(",")
    others = ["mirrored", "central_storage", *range(2, flags.count + 1)]
    print(f"| program | precision | weights on one device | the same: {flags.steps} steps |")
    print("|---|---|---|---|", flush=True)
    num_equal = 0
    for precision in flags.precisions.split(","):
        arguments = (str(flags.count), precision, str(flags.steps), *programs)
        with tempfile.TemporaryDirectory(prefix="tfdist-bits-") as directory:
            expected = run_alone(Path(directory, "one"), "one_device", *arguments)
            found = {
                name: run_alone(Path(directory, name), name, *arguments)
                if isinstance(name, str)
                else run_workers(Path(directory, f"{name}"), name, *arguments)
                for name in others
            }
        for program in programs:
            equal = [n for n in others if found[n][program] == expected[program]]
            texts = [f"{n} workers" if isinstance(n, int) else n for n in equal]
            weights = expected[program]["weights"][:16]
            print(f"| {program} | {precision} | {weights} | {', '.join(texts)} |", flush=True)
            num_equal += len(equal)
    expected_equal = len(others) * len(programs) * len(flags.precisions.split(","))
    print(f"\n{num_equal} of {expected_equal} ended with the bits of one device.")
    return 0 if num_equal == expected_equal else 1


if __name__ == "__main__":
    sys.exit(main())
