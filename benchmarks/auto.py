"""Compares what `--strategy=auto` chooses with a longer measurement of all candidates.

    python -m benchmarks.auto [--models=unet,mlp,...] [--rounds=7]

Each model runs on two virtual devices, and on four that share one core. Its trials choose; then
another process measures all candidates in turns. Prints a Markdown table, and fails if a chosen
strategy has less than 0.95 of the speed of the fastest, by the median of the rounds' ratios.
"""

import argparse
import os
import statistics
import sys

from benchmarks.plan_accuracy import MODELS as OF_PLAN
from tfdist.auto.candidates import list_candidates
from tfdist.auto.trials import run_trials
from tfdist.cli.flags import parse_flags
from tfdist.cli.quiet import start_tensorflow_quietly
from tfdist.launch.machine import describe_machine
from tfdist.memory import find_free_memory
from tfdist.runs.batch_size.trials import run_trial
from tfdist.runs.options import TrainOptions
from tfdist.tasks.data import to_sources

MODELS = {
    **OF_PLAN,
    "transformer": (
        "--task=benchmarks/transformer_task.py:Transformer",
        "--global_batch_size=32",
    ),
    "recurrent": (
        "--task=benchmarks/recurrent_task.py:Recurrent",
        "--global_batch_size=64",
    ),
}
# Its operations use one core each, so that two replicas are faster than one.
MODELS["recurrent_fused"] = (*MODELS["recurrent"], "--fused_layers")
LEAST = 0.95


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--devices", default="2,4")
    flags = parser.parse_args()
    start_tensorflow_quietly()
    from tfdist import devices

    # The names of devices are all that this process needs, and they cannot change.
    devices.set_virtual_devices(4)
    cores = sorted(os.sched_getaffinity(0))
    print(describe_machine())
    print("| model | devices | chosen | after | of the fastest | of each of the others |")
    print("|---|---|---|---|---|---|", flush=True)
    worst = 1.0
    for model in flags.models.split(","):
        for count in map(int, flags.devices.split(",")):
            os.sched_setaffinity(0, cores if count == 2 else cores[:1])
            worst = min(worst, compare(model, count, rounds=flags.rounds))
            os.sched_setaffinity(0, cores)
    print(f"The worst choice has {worst:.2f} of the speed of the fastest.")
    return int(worst < LEAST)


def compare(model: str, count: int, *, rounds: int) -> float:
    """Prints a model's row, and returns the chosen speed, relative to that of the fastest."""
    names = ",".join(f"CPU:{index}" for index in range(count))
    given = ("--strategy=one_device", f"--virtual_devices={count}", f"--devices={names}")
    options = parse_flags(TrainOptions, [*MODELS[model], *given])
    candidates = list_candidates(options)
    data = to_sources(options.task.select().make_data(seed=0, quiet=True))
    found = run_trials(options, candidates, data=data, together=True, say=_say)
    chosen = found.choose()
    _say(found.describe())
    trial = run_trial(
        options,
        options.training.global_batch_size,
        data=data,
        free=find_free_memory(),
        measure="tfdist.auto.measuring",
        arguments={
            "names": list(candidates),
            "predicted": dict.fromkeys(candidates, 1.0),  # none is left out
            "rounds": rounds,
            "most_s": 3600,
        },
    )
    if trial.usage is None:
        raise SystemExit(f"{model}: {trial.problem}")
    _say(str(trial.found))
    rates = trial.found["rates"]
    ratios = {
        name: statistics.median(a / b for a, b in zip(rates[chosen], rates[name], strict=True))
        for name in rates
        if name != chosen
    }
    least = min(1.0, *ratios.values())
    others = ", ".join(f"{name}: {ratio:.2f}" for name, ratio in ratios.items())
    where = f"{count} on {len(os.sched_getaffinity(0))} cores"
    print(
        f"| {model} | {where} | {chosen} | {found.seconds:.0f} s | {least:.2f} | {others} |",
        flush=True,
    )
    return least


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
