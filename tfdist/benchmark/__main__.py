"""`python -m tfdist.benchmark`: compares the speed of strategies, precisions and baselines.

Every configuration runs in its own processes, in turns, on the same batches in memory.
"""

import datetime
import json
import sys
import time
from typing import Any

from tfdist.benchmark.configurations import Configuration, list_configurations
from tfdist.benchmark.options import BenchmarkOptions
from tfdist.cli.command import EXIT_FAILED, run_command
from tfdist.launch.machine import describe_machine
from tfdist.records.durable_files import write_output
from tfdist.runs.options import TrainOptions


def main() -> int:
    """Runs the command line and returns the exit status."""
    return run_command(
        "tfdist.benchmark",
        run_benchmark,
        options_class=BenchmarkOptions,
        others=(TrainOptions,),
        needs_tensorflow=False,
    )


def run_benchmark(options: BenchmarkOptions) -> int:
    """Measures the configurations, prints a table, and returns whether one of them failed."""
    from tfdist.benchmark import runs, table

    configurations = list_configurations(options)
    began = time.monotonic()
    if not options.run.quiet:
        print(_describe(options, configurations), flush=True)
    done = 0

    def report(number: int, configuration: Configuration, finding: dict[str, Any]) -> None:
        nonlocal done
        done += 1
        if not options.run.quiet:
            ceilings = sum(c.kind == "ceiling" for c in configurations)
            total = len(configurations) * options.contest.rounds + ceilings
            rate = finding.get("examples_per_second")
            text = finding.get("error") or (f"{rate:.2f} examples/s" if rate else "measured")
            print(
                f"[{done}/{total}, round {number}] {configuration.name}, "
                f"{configuration.precision}: {text}",
                file=sys.stderr,
                flush=True,
            )

    found = runs.run_rounds(configurations, options, report)
    rows = table.make_rows(found)
    print("", table.format_table(rows), f"{time.monotonic() - began:.0f} s", sep="\n")
    if options.run.output:
        output = options.run.output.rstrip("/")
        about = {
            "date": datetime.date.today().isoformat(),
            "machine": describe_machine(),
            "options": options.to_dict(),
        }
        content = json.dumps(about | table.to_json(found), indent=2)
        write_output(f"{output}/results.json", content + "\n")
        write_output(f"{output}/results.html", table.make_page(rows))
    return EXIT_FAILED if any(row.error for row in rows) else 0


def _describe(options: BenchmarkOptions, configurations: list[Configuration]) -> str:
    model, contest = options.model, options.contest
    height, width = model.image_size
    subject = model.task or (
        f"{model.model} with {model.base_filters} filters, depth {model.depth}, {height}x{width}x3"
    )
    return (
        f"{subject}, batches of {model.global_batch_size}; {len(configurations)} "
        f"configurations, {contest.rounds} rounds of {contest.steps} steps; {describe_machine()}."
    )


if __name__ == "__main__":
    sys.exit(main())
