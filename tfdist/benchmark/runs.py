"""Runs the configurations in turns, each time in new processes."""

import dataclasses
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tfdist import cluster
from tfdist.benchmark.configurations import Configuration
from tfdist.benchmark.options import BenchmarkOptions
from tfdist.launch import run_local_cluster
from tfdist.launch.logs import last_lines
from tfdist.strategies.registry import STRATEGIES

_GRACE_S = 10.0

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
      configurations: the configurations to measure.
      options: the options of the benchmark.
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
    """Measures one configuration once.

    Returns:
      The result of `measure` or `measure_ceilings`, or only `error`, one line, if it failed.
    """
    return run_task(
        {"configuration": dataclasses.asdict(configuration), "options": options.to_dict()},
        [sys.executable, "-m", "tfdist.benchmark.worker"],
        workers=configuration.workers,
        ps=int(STRATEGIES[configuration.strategy].traits.has_servers),
        timeout_s=options.contest.timeout_s,
    )


def run_task(
    task: dict[str, Any],
    command: Sequence[str],
    *,
    workers: int = 1,
    ps: int = 0,
    timeout_s: float,
) -> dict[str, Any]:
    """Runs a command in one process or in a cluster of them, without showing its output.

    Args:
      task: the contents of `task.json` in a directory, which is the command's last argument.
      command: the command and its other arguments.
      workers, ps: the number of workers and of parameter servers.
      timeout_s: the seconds until the command counts as failed.

    Returns:
      The contents of `result.json` in the directory, or only `error`, one line, if it failed.
    """
    with tempfile.TemporaryDirectory(prefix="tfdist-benchmark-") as directory:
        (Path(directory) / "task.json").write_text(json.dumps(task))
        result = run_local_cluster(
            workers=workers,
            ps=ps,
            command=[*command, directory],
            run_dir=directory,
            timeout_s=timeout_s,
            grace_s=_GRACE_S,
            stream=False,
            environ=dict(cluster.read_environment()) | {"TF_CPP_MIN_LOG_LEVEL": "3"},
        )
        if result.timed_out:
            return {"error": f"not finished after {timeout_s:g} s (--timeout_s)"}
        if result.status:
            task_result = next(t for t in result.tasks if t.name == result.first_failed)
            said = last_lines(task_result.log.read_bytes()) or ["it printed nothing"]
            return {"error": f"{task_result.name}: {said[-1]}"}
        return json.loads((Path(directory) / "result.json").read_text())


def median_of(findings: Sequence[dict[str, Any]], key: str) -> float | None:
    """Returns the median of a value over the rounds, or None if no round has it."""
    values = [finding[key] for finding in findings if key in finding]
    return statistics.median(values) if values else None
