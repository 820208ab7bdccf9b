"""Compares synchronous, local and asynchronous training with slow workers, measured and simulated.

    python -m benchmarks.stragglers [--workers=3] [--seconds=30] [--record=FILE]

Each process is real, and its steps sleep for most of their time, so that several of them run on a
few cores as on machines of their own. The simulation of `tfdist.plan` knows nothing of these
runs but the steps of one process alone. Prints a Markdown table, and writes a JSON file, from which
`python -m benchmarks.figures` draws. Fails if a simulated throughput is off by more than 15 %.
"""

import argparse
import dataclasses
import itertools
import json
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfdist.launch.call import call_in_cluster
from tfdist.launch.machine import describe_machine
from tfdist.plan.simulation import Workers, run_asynchronous, run_synchronous

RECORD = Path(__file__).with_name("stragglers.json")
ROWS = 16  # the examples of a worker in a synchronous step
EXAMPLE_MS = 6.25  # 100 ms for them
SLOWNESS = 4.0
STRAGGLER_SHARE = 0.1
SYNC_EVERY = 8
WARMUP_STEPS = 8
TOLERANCE = 0.15
_TIMEOUT_S = 400.0
_POINTS = 100  # of a stored curve


@dataclass(frozen=True, kw_only=True)
class Case:
    """A way to train.

    Attributes:
      strategy: a strategy of `tfdist.train`.
      flags: its options.
      ahead: the steps in flight for each worker; 0 for tfdist's default.
    """

    strategy: str
    flags: dict[str, Any] = dataclasses.field(default_factory=dict)
    ahead: int = 0


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """How slow the workers are.

    Attributes:
      slowest: how many times as long every step of the last worker takes.
      share: the share of all workers' steps that take `SLOWNESS` times as long.
    """

    slowest: float = 1.0
    share: float = 0.0


CASES = {
    "multi_worker_mirrored": Case(strategy="multi_worker_mirrored"),
    f"local_sgd, --sync_every={SYNC_EVERY}": Case(
        strategy="local_sgd", flags={"sync_every": SYNC_EVERY}
    ),
    "parameter_server": Case(strategy="parameter_server"),
    "parameter_server, 8 steps in flight per worker": Case(strategy="parameter_server", ahead=8),
}
SCENARIOS = {
    "equal workers": Scenario(),
    f"one worker {SLOWNESS:g} times as slow": Scenario(slowest=SLOWNESS),
    f"one step in {1 / STRAGGLER_SHARE:g} is {SLOWNESS:g} times as slow": Scenario(
        share=STRAGGLER_SHARE
    ),
}


@dataclass(frozen=True, kw_only=True)
class Alone:
    """The steps of one process alone.

    Attributes:
      step_s: their mean.
      jitter: their standard deviation, relative to it.
    """

    step_s: float
    jitter: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=30.0, help="of a run, about")
    parser.add_argument("--record", type=Path, default=RECORD, metavar="FILE")
    flags = parser.parse_args()
    alone = {
        rows: measure_alone(rows, steps=round(flags.seconds / (rows * EXAMPLE_MS / 1e3) / 3))
        for rows in (ROWS, ROWS * flags.workers)
    }
    _say(f"alone: {alone}")
    print("| | | examples/s, measured | simulated | error | staleness, simulated |")
    print("|---|---|---|---|---|---|", flush=True)
    results = []
    for title, scenario in SCENARIOS.items():
        for name, case in CASES.items():
            result = compare(case, scenario, alone, workers=flags.workers, seconds=flags.seconds)
            results.append({"scenario": title, "training": name, **result})
            print(format_row(results[-1]), flush=True)
    record = {
        "machine": describe_machine(),
        "workers": flags.workers,
        "alone": {rows: dataclasses.asdict(found) for rows, found in alone.items()},
        "results": results,
    }
    flags.record.write_text(json.dumps(record, separators=(",", ":")) + "\n")
    return int(any(abs(result["error"]) > TOLERANCE for result in results))


def simulate(
    case: Case, scenario: Scenario, alone: dict[int, Alone], *, workers: int, steps: int
) -> tuple[float, float]:
    """Returns what the simulation expects of a way to train.

    Args:
      case: how to train.
      scenario: how slow the workers are.
      alone: examples of a step -> the steps of one process.
      workers: their number.
      steps: the steps to simulate.

    Returns:
      (examples per second, mean staleness).
    """
    batch = ROWS * workers
    found = alone[batch if case.strategy == "parameter_server" else ROWS]
    simulated = Workers(
        count=workers,
        step_s=found.step_s,
        jitter=found.jitter,
        straggler_share=scenario.share,
        straggler_factor=SLOWNESS,
        slowness=(1.0,) * (workers - 1) + (scenario.slowest,),
    )
    if case.strategy == "parameter_server":
        served = run_asynchronous(simulated, steps=steps, in_flight=case.ahead * workers)
        return served.steps_per_s * batch, float(served.staleness.mean())
    every = case.flags.get("sync_every", 1)
    return batch / run_synchronous(simulated, steps=steps // every * every, sync_every=every), 0.0


def compare(
    case: Case, scenario: Scenario, alone: dict[int, Alone], *, workers: int, seconds: float
) -> dict[str, Any]:
    """Returns the measured and the simulated throughput, and the loss over the time."""
    batch = ROWS * workers
    expected, staleness = simulate(case, scenario, alone, workers=workers, steps=4096)
    steps = WARMUP_STEPS + round(seconds * expected / batch / SYNC_EVERY) * SYNC_EVERY
    found = _run(
        strategy=case.strategy,
        flags=case.flags,
        batch=batch,
        steps=steps,
        workers=workers,
        ps=int(case.strategy == "parameter_server"),
        slowness=[1.0] * (workers - 1) + [scenario.slowest],
        straggler_share=scenario.share,
        max_in_flight=case.ahead * workers,
    )
    # While the last steps are in flight, some workers have nothing to do.
    last = steps - (case.ahead or 1) * workers if case.strategy == "parameter_server" else steps
    measured = measure_rate(found["times"], WARMUP_STEPS, last) * batch
    return {
        "measured": measured,
        "simulated": expected,
        "error": expected / measured - 1,
        "staleness": found["summary"].get("staleness_mean", 0.0),
        "simulated_staleness": staleness,
        "curve": thin(found["times"], found["losses"]),
    }


def measure_alone(rows: int, *, steps: int) -> Alone:
    """Returns the steps of one process with so many examples."""
    found = _run(strategy="one_device", batch=rows, steps=WARMUP_STEPS + steps)
    times = found["times"][WARMUP_STEPS - 1 :]
    each = [end - begin for begin, end in itertools.pairwise(times)]
    mean = statistics.fmean(each)
    return Alone(step_s=mean, jitter=statistics.stdev(each) / mean)


def measure_rate(times: list[float], first: int, last: int) -> float:
    """Returns steps per second, from the end of one step to the end of another."""
    return (last - first) / (times[last - 1] - times[first - 1])


def thin(times: list[float], losses: list[float]) -> list[tuple[float, float]]:
    """Returns a curve with few points, the means of neighbors: seconds since the first, loss."""
    size = -(-len(times) // _POINTS)
    parts = [slice(begin, begin + size) for begin in range(0, len(times), size)]
    return [
        (
            round(statistics.fmean(times[part]) - times[0], 3),
            round(statistics.fmean(losses[part]), 5),
        )
        for part in parts
    ]


def format_row(result: dict[str, Any]) -> str:
    """Returns a row of the table."""
    has_staleness = result["simulated_staleness"] > 0
    staleness = f"{result['staleness']:.1f}, {result['simulated_staleness']:.1f}"
    return (
        f"| {result['scenario']} | {result['training']} | {result['measured']:.0f} "
        f"| {result['simulated']:.0f} | {result['error']:+.1%} "
        f"| {staleness if has_staleness else ''} |"
    )


def _run(*, workers: int = 1, ps: int = 0, **task: Any) -> dict[str, Any]:
    defaults = {"flags": {}, "slowness": [1.0], "straggler_share": 0.0, "max_in_flight": 0}
    always = {"example_ms": EXAMPLE_MS, "straggler_factor": SLOWNESS}
    _say(str(task))
    found = call_in_cluster(
        {**defaults, **always, **task},
        [sys.executable, "-m", "benchmarks.slow_worker"],
        workers=workers,
        ps=ps,
        timeout_s=_TIMEOUT_S,
    )
    if "error" in found:
        raise SystemExit(f"Cannot train with {task}: {found['error']}")
    return found


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
