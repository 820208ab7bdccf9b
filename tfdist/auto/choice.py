"""Chooses the fastest strategy for `--strategy=auto`: by the run, the cache or trials."""

import dataclasses
from collections.abc import Mapping

from tfdist.auto.cache import Cache
from tfdist.auto.candidates import apply, find_devices, list_candidates
from tfdist.auto.trials import Findings, run_trials
from tfdist.placement.options import NONE
from tfdist.plan.setup import Setup
from tfdist.runs.options import TrainOptions
from tfdist.runs.plan import LEAST_STEPS, Plan, count_steps, read_data
from tfdist.tasks.data import SourceData


def choose_strategy(plan: Plan) -> tuple[Plan, SourceData | None]:
    """Returns the plan with the fastest strategy, if `auto` leaves it open.

    All candidates give the same result. A run that began keeps its strategy if it still can. A new
    one uses what trials found before, or else tries each candidate for some seconds.

    Returns:
      (the plan, the data of the run if they had to be read).
    """
    if not plan.is_open:
        return plan, None
    candidates = list_candidates(plan.options)
    known = _recall(plan, candidates)
    if len(candidates) == 1:
        (known,) = candidates.values()
    if known is not None:
        return _use(plan, known), None
    data = read_data(plan)
    default = f"{plan.options.strategy.strategy}, as the devices suggest"
    _, steps = count_steps(plan.options.training, data.train.num_examples)
    if steps < LEAST_STEPS:
        _say(plan.options, f"{default}: trials would not pay for a run of {steps} steps.")
        return plan, data
    found = _find(plan, candidates, data)
    if not found.rates:
        _say(plan.options, f"{default}: no trial succeeded; {found.describe_problems()}.")
        return plan, data
    return _use(plan, candidates[found.choose()]), data


def _find(plan: Plan, candidates: Mapping[str, Setup], data: SourceData) -> Findings:
    """Returns what trials found, now or before."""
    options = plan.options
    devices = find_devices(options)
    cache = Cache.find(plan, data, devices)
    before = cache.read()
    if before is not None and before.rates.keys() <= candidates.keys():
        _say(options, f"{before.describe()}; from the trials in {cache.path}.")
        return before
    found = run_trials(
        options,
        candidates,
        data=data,
        together=all(device.startswith("CPU") for device in devices),
        say=lambda text: _say(options, text),
    )
    if found.rates:
        problem = cache.write(found)
        kept = f"not cached, because of an error: {problem}" if problem else "cached"
        _say(options, f"{found.describe()}; chosen in {found.seconds:.0f} s; {kept}.")
    return found


def _recall(plan: Plan, candidates: Mapping[str, Setup]) -> Setup | None:
    """Returns the candidate with which the run in the run directory began, if it is one."""
    began = plan.run.read_options() or {}
    strategy, placement = began.get("strategy", {}), began.get("placement", {})
    before = (strategy.get("strategy"), began.get("devices"), placement.get("placement"))
    devices = list(find_devices(plan.options))
    return next(
        (s for s in candidates.values() if before == (s.strategy, devices[: s.replicas], NONE)),
        None,
    )


def _use(plan: Plan, setup: Setup) -> Plan:
    options = apply(plan.options, setup)
    return dataclasses.replace(plan, options=options, traits=options.strategy.select().traits)


def _say(options: TrainOptions, text: str) -> None:
    if not options.run.quiet:
        print(f"--strategy=auto: {text}", flush=True)
