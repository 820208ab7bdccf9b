"""A fault-injection campaign: kills in runs of all strategies, compared with undisturbed runs.

    python -m benchmarks.faults [--seed=N] [--kills=60] [--minutes=20] [--strategies=a,b]

Prints the seed and a table. The exit status is 1 if a run ended differently from its undisturbed
twin, hung, or left a process behind.
"""

import argparse
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

from tests.fault_campaign import CASES, Findings, run_twin, run_with_faults

MAX_STEPS = 48


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--kills", type=int, default=60, help="in all (default: 60)")
    parser.add_argument("--minutes", type=float, default=20, help="starts no strategy after this")
    parser.add_argument("--strategies", default=",".join(case.name for case in CASES))
    parser.add_argument("--keep", default="", metavar="DIR", help="keeps the runs here")
    flags = parser.parse_args()
    print(f"seed {flags.seed}", flush=True)
    chosen = [case for case in CASES if case.name in flags.strategies.split(",")]
    shares = sum(case.share for case in chosen)
    began = time.monotonic()
    findings: dict[str, Findings] = {}
    with tempfile.TemporaryDirectory(prefix="tfdist faults ") as temporary:
        directory = Path(flags.keep or temporary)
        for case in chosen:
            if time.monotonic() - began > 60 * flags.minutes:
                print(f"no time for {case.name}")
                continue
            kills = -(-flags.kills * case.share // shares)
            rng = random.Random(f"{flags.seed} {case.name}")
            expected = run_twin(case, directory, max_steps=MAX_STEPS)
            found = run_with_faults(
                case, directory, expected, kills=kills, max_steps=MAX_STEPS, rng=rng
            )
            findings[case.name] = found
            for problem in found.problems:
                print(f"{case.name}: {problem} (after: {', '.join(found.faults)})", flush=True)
            print(f"{case.name}: {', '.join(found.faults)}", flush=True)
    _print_table(findings)
    print(f"{time.monotonic() - began:.0f} s, seed {flags.seed}")
    return int(any(f.problems for f in findings.values()) or len(findings) < len(chosen))


def _print_table(findings: dict[str, Findings]) -> None:
    print("| strategy | faults | survived | seconds to continue: median, max | repeated steps |")
    print("|---|---|---|---|---|")
    for name, found in findings.items():
        seconds = found.continue_s or [0.0]
        print(
            f"| {name} | {len(found.faults)} | {found.survived} | "
            f"{statistics.median(seconds):.1f}, {max(seconds):.1f} | {found.lost_steps} |"
        )


if __name__ == "__main__":
    sys.exit(main())
