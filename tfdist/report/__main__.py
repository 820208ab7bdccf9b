"""`python -m tfdist.report`: writes the report of a run, or compares several runs.

python -m tfdist.report RUN
python -m tfdist.report --output=FILE RUN RUN ...
"""

import functools
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from tfdist.cli.command import EXIT_BAD_INPUT, run_command
from tfdist.cli.flags import split_command
from tfdist.cli.quiet import start_tensorflow_quietly
from tfdist.errors import TfdistError
from tfdist.named_code import trust_option
from tfdist.options import CommandOptions, OptionGroup, option


@dataclass(frozen=True, kw_only=True)
class ReportRunOptions(OptionGroup):
    """Output."""

    output: str = option(
        "",
        "file of the report; RUN/report.html by default, comparison.html for several runs",
        metavar="FILE",
    )
    trust_task: bool = trust_option()
    quiet: bool = option(False, "print nothing but errors")
    verbose_tensorflow: bool = option(False, "show TensorFlow's own messages")


@dataclass(frozen=True, kw_only=True)
class ReportOptions(CommandOptions):
    """The options of `python -m tfdist.report`."""

    rest: ClassVar[str] = " RUN [RUN ...]"

    run: ReportRunOptions = ReportRunOptions()


def main() -> int:
    """Runs the command line and returns the exit status."""
    flags, paths = _split(sys.argv[1:])
    return run_command(
        "tfdist.report",
        functools.partial(run_report, paths=paths),
        flags,
        options_class=ReportOptions,
        needs_tensorflow=False,
        check=lambda options: _check_given(paths),
    )


def run_report(options: ReportOptions, *, paths: Sequence[str]) -> int:
    """Writes a report."""
    from tfdist.records.recorded_run import read_recorded_run
    from tfdist.report.comparison import make_comparison
    from tfdist.runs.reporting import list_pictures, naming_damage, write_page, write_report

    runs, is_bad = [], False
    for path in paths:
        try:
            runs.append(read_recorded_run(os.path.expanduser(path).rstrip("/") or "/"))
        except TfdistError as error:
            print(f"tfdist: {error}", file=sys.stderr)
            is_bad = True
    if is_bad:
        return EXIT_BAD_INPUT
    if len(runs) == 1:
        name = (runs[0].options.get("task") or {}).get("task")
        if ":" in str(name) and not options.run.verbose_tensorflow:
            start_tensorflow_quietly()  # which the task's code may import
        written = write_report(runs[0], options.run.output, trust_task=options.run.trust_task)
    else:
        with naming_damage("One of the runs"):
            page = make_comparison(runs, pictures=list_pictures(runs[0]))
        written = write_page(options.run.output or "comparison.html", page)
    if not options.run.quiet:
        print(f"The report is in {written}.")
    return 0


def _check_given(paths: Sequence[str]) -> None:
    if not paths:
        raise TfdistError("No run is given. Run python -m tfdist.report RUN [RUN ...].")


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the flags and the other arguments, in any order."""
    flags: list[str] = []
    paths: list[str] = []
    rest = list(arguments)
    while rest:
        found, rest = split_command(ReportOptions, rest)
        flags += found
        paths += rest[:1]
        rest = rest[1:]
    return flags, paths


if __name__ == "__main__":
    sys.exit(main())
