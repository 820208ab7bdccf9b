"""The simulated part of a plan's answer."""

import dataclasses
from typing import Any

from tfdist.plan.estimate import Estimate
from tfdist.plan.hardware import Hardware
from tfdist.plan.options import SimulationOptions
from tfdist.plan.simulation.failures import (
    Failures,
    find_best_interval,
    find_interval_of_daly,
    find_interval_of_young,
    run_failures,
)
from tfdist.plan.simulation.training import (
    STRAGGLER_FACTOR,
    STRAGGLER_SHARE,
    Workers,
    run_asynchronous,
    run_synchronous,
)
from tfdist.plan.workload import Workload

_STEPS = 512


def simulate(
    options: SimulationOptions, best: Estimate, workload: Workload, hardware: Hardware
) -> dict[str, Any]:
    """Returns what stragglers and failures do to the recommended setup, and to other strategies.

    Returns:
      `stragglers`, `staleness`, `failures`: dictionaries of numbers; and `text`, title -> line.
    """
    devices = best.setup.devices
    busy = best.step_s - best.wait_s - best.input_s
    jitter = options.jitter or hardware.jitter
    steady = Workers(count=devices, step_s=busy, jitter=jitter)
    uneven = dataclasses.replace(
        steady,
        straggler_share=STRAGGLER_SHARE,
        slowness=(1.0,) * (devices - 1) + (options.slow_worker,),
    )
    every = workload.sync_every
    rates = {
        "even": run_synchronous(steady, steps=_STEPS) / busy,
        "stragglers": run_synchronous(uneven, steps=_STEPS) / busy,
        "local_sgd": run_synchronous(uneven, steps=_STEPS // every * every, sync_every=every)
        / busy,
    }
    steps = max(_STEPS, 8 * devices)
    served = run_asynchronous(uneven, steps=steps)
    ahead = run_asynchronous(uneven, steps=steps, in_flight=2 * devices)
    rates["asynchronous"] = devices / (served.steps_per_s * busy)
    rates["asynchronous, twice in flight"] = devices / (ahead.steps_per_s * busy)
    staleness = {"mean": float(served.staleness.mean()), "highest": int(served.staleness.max())}
    failures = Failures(
        machines=best.setup.workers + best.setup.servers,
        mtbf_s=options.mtbf_h * 3600,
        checkpoint_s=options.checkpoint_s,
        restart_s=options.restart_s,
    )
    interval, goodput = find_best_interval(failures)
    young, daly = find_interval_of_young(failures), find_interval_of_daly(failures)
    found = {
        "interval_s": interval,
        "goodput": goodput,
        "young_s": young,
        "daly_s": daly,
        "goodput_daly": run_failures(failures, daly),
    }
    always = (
        f" and one worker always {options.slow_worker:g} times" if options.slow_worker > 1 else ""
    )
    text = {
        "Stragglers": (
            f"a synchronous step takes {rates['even']:.3f} times a single worker's if steps vary "
            f"by {jitter:.0%}, and {rates['stragglers']:.2f} times if 1 of "
            f"{1 / STRAGGLER_SHARE:.0f} takes {STRAGGLER_FACTOR:g} times{always} as long; "
            f"{rates['local_sgd']:.2f} times with local SGD of {every} steps, "
            f"{rates['asynchronous']:.2f} times with parameter servers, whose gradients are "
            f"{staleness['mean']:.1f} updates old, at most {staleness['highest']}; "
            f"{rates['asynchronous, twice in flight']:.2f} times with "
            f"--max_in_flight={2 * devices}."
        ),
        "Failures": (
            f"with one in {options.mtbf_h:g} hours for each machine and checkpoints of "
            f"{options.checkpoint_s:g} s, {found['goodput_daly']:.2%} of the time is progress "
            f"with --checkpoint_every={daly:.0f}s (Daly's interval; Young's: {young:.0f} s). The "
            f"best of 17 simulated intervals, {interval:.0f} s, reaches {goodput:.2%}."
        ),
    }
    return {"stragglers": rates, "staleness": staleness, "failures": found, "text": text}
