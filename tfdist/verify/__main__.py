"""`python -m tfdist.verify`: compares a few steps under each strategy with one device.

TensorFlow is imported only when a comparison starts, so that `--help` is fast.
"""

import json
import sys
import time

from tfdist.cli.command import EXIT_FAILED, run_command
from tfdist.data.progress import show_status
from tfdist.errors import TfdistError, make_unknown_name_error
from tfdist.models import MODELS
from tfdist.records.durable_files import write_output
from tfdist.runs.options import TrainOptions
from tfdist.strategies.registry import find_strategy
from tfdist.verify.options import VerifyOptions


def main() -> int:
    """Runs the command line and returns the exit status."""
    return run_command(
        "tfdist.verify",
        run_verification,
        options_class=VerifyOptions,
        others=(TrainOptions,),
        check=check_options,
    )


def run_verification(options: VerifyOptions) -> int:
    """Compares the strategies, prints a table, and returns whether one of them differs."""
    check_options(options)
    if options.verification.bits:
        return _compare_bits(options)
    from tfdist.verify import runs
    from tfdist.verify.table import format_head, format_row, list_notes, to_json

    started = time.perf_counter()
    runs.configure_process(options)
    chosen, total = options.model, options.verification.steps
    head = (
        f"{chosen.task or chosen.model}, {total} steps of {chosen.global_batch_size} examples in "
        f"{chosen.precision}: largest difference from one device, relative to the largest value"
        f"\n\n{format_head()}\n"
    )

    def say(name: str, step: int = 0) -> None:
        if not options.run.quiet:
            show_status(f"{name}: step {step} of {total}" if step else name)

    verdicts: list[runs.Verdict] = []
    for verdict in runs.run_strategies(options, say):
        say("")
        if not options.run.quiet:
            print(("" if verdicts else head) + format_row(verdict), flush=True)
        verdicts.append(verdict)
    if not options.run.quiet:
        print("", *list_notes(verdicts), f"{time.perf_counter() - started:.0f} s", sep="\n")
    if options.run.json:
        write_output(options.run.json, json.dumps(to_json(verdicts), indent=2) + "\n")
    return 0 if all(verdict.holds for verdict in verdicts) else EXIT_FAILED


def _compare_bits(options: VerifyOptions) -> int:
    """Compares the arrangements of logical replicas; returns the exit status."""
    from tfdist.verify.bits import Arrangement, compare_bits

    chosen = options.model
    found: list[Arrangement] = []

    def say(name: str) -> None:
        if not options.run.quiet:
            show_status(name)

    def show(result: Arrangement) -> None:
        if not found and not options.run.quiet:
            print(
                f"{chosen.task or chosen.model}, {options.verification.steps} steps of "
                f"{chosen.global_batch_size} examples in {chosen.precision}, "
                f"{options.verification.logical_replicas} logical replicas\n"
            )
        if not options.run.quiet:
            verdict = result.problem or ("the same bits" if found else "")
            print(f"{result.name:12}{result.sha256:18}{verdict}".rstrip(), flush=True)

    for result in compare_bits(options, say):
        say("")
        show(result)
        found.append(result)
    if options.run.json:
        rows = [{"name": r.name, "sha256": r.sha256, "problem": r.problem} for r in found]
        write_output(options.run.json, json.dumps(rows, indent=2) + "\n")
    return EXIT_FAILED if any(result.problem for result in found) else 0


def check_options(options: VerifyOptions) -> None:
    """Checks that the options name strategies, and a model that exists."""
    names = options.verification.strategies
    if not names:
        raise TfdistError("--strategies is empty. Name one or more, as in --strategies=mirrored.")
    for name in names:
        find_strategy(name)  # an unknown one is refused before the others run
    if options.model.is_own and options.model.model not in MODELS:
        raise make_unknown_name_error("--model", options.model.model, list(MODELS))


if __name__ == "__main__":
    sys.exit(main())
