"""Draws the figures of docs/choosing.md into docs/images.

    python -m benchmarks.figures

Lines are the formulas of `tfdist.plan`, dots its simulations; `stragglers.svg` also has what
`python -m benchmarks.stragglers` measured and recorded. Prints some of the numbers. Needs
matplotlib, which the `dev` extra installs.
"""

import json
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import numpy as np

from benchmarks.plan_checks import (
    estimate_goodput,
    run_reduction_to_one,
    run_ring,
    run_servers,
    run_tree,
)
from benchmarks.stragglers import RECORD
from tfdist.plan.collectives import (
    Path,
    make_path,
    time_hierarchical,
    time_reduction_to_one,
    time_ring,
    time_servers,
    time_tree,
)
from tfdist.plan.hardware import load_hardware
from tfdist.plan.simulation import (
    Failures,
    find_interval_of_daly,
    run_failures,
)

IMAGES = pathlib.Path(__file__).parents[1] / "docs" / "images"
HARDWARE = load_hardware("l4")
NETWORK = make_path(HARDWARE, HARDWARE.between)
PCIE = make_path(HARDWARE, HARDWARE.inside)
DEVICES = HARDWARE.devices_per_machine
COUNTS = [2**power for power in range(1, 11)]
SIZES = {"the gradient of a ResNet-50, 102 MB": 25.6e6 * 4, "the moments of a layer, 1 kB": 1e3}
WORKERS_PER_SERVER = 4
# To be read on white and on black, and the same file every time.
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "tfdist",
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "axes.prop_cycle": matplotlib.cycler(
        color=["#3388cc", "#d55e00", "#009e73", "#cc79a7", "#e69f00"]
    ),
    "text.color": "#8a8a8a",
    "axes.labelcolor": "#8a8a8a",
    "axes.edgecolor": "#8a8a8a",
    "xtick.color": "#8a8a8a",
    "ytick.color": "#8a8a8a",
}

Seconds = Callable[[int, float], float]
"""(workers, bytes) -> seconds."""


def main() -> int:
    with plt.rc_context(STYLE):
        draw_reductions()
        draw_failures()
        draw_stragglers(json.loads(RECORD.read_text()))
    return 0


def list_reductions() -> dict[str, tuple[Seconds, Seconds]]:
    """Returns name -> (its formula, its simulation)."""
    return {
        "ring": (
            lambda n, size: time_ring(n, size, NETWORK),
            lambda n, size: run_ring(np.zeros(n), size, NETWORK).max(),
        ),
        "two trees": (
            lambda n, size: time_tree(n, size, NETWORK),
            lambda n, size: _run_best_tree(n, size, NETWORK),
        ),
        f"hierarchical, {DEVICES} GPUs a machine": (_time_machines, _run_machines),
        "one parameter server": (
            lambda n, size: time_reduction_to_one(n + 1, size, NETWORK),
            lambda n, size: run_reduction_to_one(np.zeros(n + 1), size, NETWORK).max(),
        ),
        f"a server for {WORKERS_PER_SERVER} workers": (
            lambda n, size: time_servers(n, _count_servers(n), size, NETWORK),
            lambda n, size: run_servers(n, _count_servers(n), size, NETWORK),
        ),
    }


def draw_reductions() -> None:
    """Draws how long sums take, against the number of workers."""
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for axis, (title, size) in zip(axes, SIZES.items(), strict=True):
        print(f"\n| {title}, ms | {' | '.join(map(str, COUNTS[::3]))} |")
        for name, (formula, simulation) in list_reductions().items():
            times = [1e3 * formula(count, size) for count in COUNTS]
            (line,) = axis.plot(COUNTS, times, label=name)
            dots = [1e3 * simulation(count, size) for count in COUNTS]
            axis.plot(COUNTS, dots, ".", color=line.get_color())
            print(f"| {name} | {' | '.join(f'{time:.3g}' for time in times[::3])} |")
        axis.set(xscale="log", yscale="log", title=title, xlabel="workers", ylabel="ms")
        axis.set_xticks([2, 8, 64, 1024], ["2", "8", "64", "1024"])
        axis.minorticks_off()
    axes[1].legend()
    _save(figure, "reductions")


def draw_failures() -> None:
    """Draws the share of the time that is progress, against the interval between checkpoints."""
    figure, axis = plt.subplots(figsize=(6, 3.4), layout="constrained")
    print("\n| what must not fail | best interval, min | progress | every 6 h |")
    kinds = {f"all-reduce on {count} machines": count for count in (8, 64, 512)}
    kinds["4 parameter servers and a chief, 512 workers"] = 5
    for name, machines in kinds.items():
        failures = Failures(machines=machines, mtbf_s=1000 * 3600, checkpoint_s=30, restart_s=300)
        intervals = np.geomspace(60, 6 * 3600, 60)
        goodput = [100 * estimate_goodput(failures, interval) for interval in intervals]
        (line,) = axis.plot(intervals / 60, goodput, label=name)
        color = line.get_color()
        some = intervals[::6]
        simulated = [100 * run_failures(failures, x, segments=4000) for x in some]
        axis.plot(some / 60, simulated, ".", color=color)
        best = find_interval_of_daly(failures)
        reached = 100 * estimate_goodput(failures, best)
        axis.plot(best / 60, reached, "*", color=color, markersize=11)
        print(f"| {name} | {best / 60:.0f} | {reached:.1f} % | {goodput[-1]:.1f} % |")
    axis.set(xscale="log", xlabel="minutes between checkpoints", ylabel="progress, % of the time")
    axis.set_xticks([1, 10, 60, 360], ["1", "10", "60", "360"])
    axis.minorticks_off()
    axis.set_ylim(0, 102)
    axis.legend(loc="lower left")
    _save(figure, "failures")


def draw_stragglers(record: dict[str, Any]) -> None:
    """Draws the throughput that `benchmarks.stragglers` recorded, and the loss if it did."""
    scenarios = list(dict.fromkeys(result["scenario"] for result in record["results"]))
    rows = 2 if all(result["curve"] for result in record["results"]) else 1
    figure, axes = plt.subplots(
        rows,
        len(scenarios),
        figsize=(9, 2.7 * rows),
        sharex="row",
        sharey="row",
        layout="constrained",
        squeeze=False,
    )
    for column, scenario in enumerate(scenarios):
        results = [r for r in record["results"] if r["scenario"] == scenario]
        for place, result in enumerate(results):
            label = result["training"]
            axes[0, column].barh(place, result["measured"], height=0.7, label=label)
            axes[0, column].plot(result["simulated"], place, "|", color="#8a8a8a", markersize=18)
            for axis in axes[1:, column]:
                axis.plot(*zip(*result["curve"], strict=True), label=label, linewidth=1)
                axis.set(xlabel="seconds", yscale="log", ylabel="mean loss until then")
        axes[0, column].set(title=scenario, xlabel="examples/s", yticks=[])
    axes[0, 0].invert_yaxis()  # of all, which share it
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    _save(figure, "stragglers")


def _time_machines(workers: int, num_bytes: float) -> float:
    devices, machines = min(workers, DEVICES), max(1, workers // DEVICES)
    return time_hierarchical(devices, machines, num_bytes, PCIE, NETWORK)


def _run_machines(workers: int, num_bytes: float) -> float:
    devices, machines = min(workers, DEVICES), max(1, workers // DEVICES)
    return sum(
        min(
            run_ring(np.zeros(count), num_bytes, path).max(),
            _run_best_tree(count, num_bytes, path),
        )
        for count, path in ((devices, PCIE), (machines, NETWORK))
        if count > 1
    )


def _count_servers(workers: int) -> int:
    return max(1, workers // WORKERS_PER_SERVER)


def _run_best_tree(count: int, num_bytes: float, path: Path) -> float:
    """Returns the seconds with the best number of pieces, each of which is a message."""
    return min(
        run_tree(np.zeros(count), num_bytes, path, pieces=2**power).max() for power in range(9)
    )


def _save(figure: Any, name: str) -> None:
    figure.savefig(IMAGES / f"{name}.svg", transparent=True, metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
