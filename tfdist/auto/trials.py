"""Trials of the candidates, in processes that may run out of memory."""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tfdist.auto.candidates import find_devices
from tfdist.auto.prediction import MOST_S, explain_omission, order
from tfdist.errors import TfdistError
from tfdist.memory import find_free_memory
from tfdist.plan.setup import Setup
from tfdist.runs.batch_size.trials import Trial, run_trial
from tfdist.runs.options import TrainOptions
from tfdist.tasks.data import SourceData

_SAME = 0.97  # of the fastest measured speed: the first of these candidates is chosen


@dataclass
class Findings:
    """What trials found.

    Attributes:
      rates: candidate -> examples per second, in its fastest round.
      problems: candidate -> why it was left out.
    """

    rates: dict[str, float] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    def choose(self) -> str:
        """Returns the first candidate that is about as fast as the fastest.

        >>> Findings({"one_device": 40.0, "mirrored on 2 devices": 41.0}).choose()
        'one_device'
        """
        fastest = max(self.rates.values())
        return next(name for name, rate in self.rates.items() if rate >= _SAME * fastest)

    def describe(self) -> str:
        """Returns the chosen candidate, the speed of each, and what was left out, in a line."""
        chosen = self.choose()
        others = [f"{name}: {rate:.4g}" for name, rate in self.rates.items() if name != chosen]
        text = "; ".join([f"{chosen}: {self.rates[chosen]:.4g} examples/s", *others])
        return f"{text}; {self.describe_problems()}" if self.problems else text

    def describe_problems(self) -> str:
        """Returns which candidates were left out, and why."""
        return "; ".join(f"not {name}: {problem}" for name, problem in self.problems.items())


def run_trials(
    options: TrainOptions,
    candidates: Mapping[str, Setup],
    *,
    data: SourceData,
    together: bool,
    say: Callable[[str], None],
) -> Findings:
    """Returns the speed of the candidates.

    One process tries all of them in turns, which is faster, and fair while other programs run. If
    it fails, each of them has a process of its own, so that one that does not fit ends alone.

    Args:
      together: whether to try one process first. On GPUs, a process keeps the memory that it once
        used, and the collectives of several strategies disturb one another.
    """
    began = time.monotonic()
    found = Findings()
    devices: dict[str, Any] = {"devices": tuple(find_devices(options))}
    options = dataclasses.replace(
        options, strategy=dataclasses.replace(options.strategy, **devices)
    )
    free = find_free_memory()
    predicted: dict[str, float] = {}

    def measure(names: Sequence[str]) -> bool:
        say(f"trying {', '.join(names)} ...")
        try:
            trial = run_trial(
                options,
                options.training.global_batch_size,
                data=data,
                free=free,
                measure="tfdist.auto.measuring:measure",
                arguments={"names": list(names), "predicted": predicted},
            )
        except TfdistError as error:
            trial = Trial(None, free, f"refused: {error}")
        if trial.usage is None:
            found.problems[names[0]] = trial.problem
            return False
        found.rates.update({name: max(rates) for name, rates in trial.found["rates"].items()})
        found.problems.update(trial.found["problems"])
        predicted.update(trial.found["predicted"])
        return True

    # One device first, because predictions need it; then the most devices, in case time runs out.
    waiting = sorted(candidates, key=lambda name: _rank(candidates[name]))
    if not (together and measure(waiting)):
        found.problems.clear()
        until = time.monotonic() + MOST_S
        while waiting:
            waiting = order(waiting, predicted)
            name = waiting.pop(0)
            problem = explain_omission(name, predicted, left_s=until - time.monotonic())
            if problem:
                found.problems[name] = problem
            else:
                measure([name])
    rates = {name: found.rates[name] for name in candidates if name in found.rates}
    problems = {name: found.problems[name] for name in candidates if name in found.problems}
    return Findings(rates, problems, time.monotonic() - began)


def _rank(setup: Setup) -> tuple[bool, int]:
    return setup.devices > 1, -setup.devices
