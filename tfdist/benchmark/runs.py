"""Runs the configurations in turns, each time in new processes."""

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from tfdist.benchmark.configurations import Configuration
from tfdist.benchmark.options import BenchmarkOptions
from tfdist.launch.call import call_in_cluster, make_command
from tfdist.strategies.registry import STRATEGIES

Findings = dict[Configuration, list[dict[str, Any]]]
Measure = Callable[[Configuration, BenchmarkOptions], dict[str, Any]]


def run_rounds(
    configurations: Sequence[Configuration],
    options: BenchmarkOptions,
    report: Callable[[int, Configuration, dict[str, Any]], None],
    *,
    measure: Measure | None = None,
) -> Findings:
    """Measures every configuration once per round, in reverse order in every other round.

    The ceilings, which measure the machine itself, are measured once more at the end.

    Args:
      report: called with each finding as soon as it is known, and its round, counted from 1.
      measure: measures one configuration once; `run_configuration` by default.

    Returns:
      The findings of each configuration: one per round, and one more of a ceiling. A finding with
      `error` failed, and its configuration is not measured again.
    """
    measure = measure or run_configuration
    found: Findings = {configuration: [] for configuration in configurations}
    for number in range(1, options.contest.rounds + 1):
        for configuration in configurations if number % 2 else reversed(configurations):
            if any("error" in finding for finding in found[configuration]):
                continue
            finding = measure(configuration, options)
            found[configuration].append(finding)
            report(number, configuration, finding)
    for configuration in configurations:
        if configuration.kind == "ceiling" and not any("error" in f for f in found[configuration]):
            found[configuration].append(measure(configuration, options))
            report(options.contest.rounds, configuration, found[configuration][-1])
    return found


def run_configuration(configuration: Configuration, options: BenchmarkOptions) -> dict[str, Any]:
    """Returns what `measure` or `measure_ceilings` returns, or only `error`, if it failed."""
    return call_in_cluster(
        {
            "configuration": dataclasses.asdict(configuration),
            "options": options.to_dict(),
            "cores": configuration.cores,
        },
        make_command("tfdist.benchmark.measuring:measure_task"),
        workers=configuration.workers,
        ps=int(STRATEGIES[configuration.strategy].traits.has_servers),
        timeout_s=options.contest.timeout_s,
    )


def median_of(findings: Sequence[dict[str, Any]], key: str) -> float | None:
    """Returns the median of a value over the rounds, or None if no round has it."""
    values = [finding[key] for finding in findings if key in finding]
    return statistics.median(values) if values else None
