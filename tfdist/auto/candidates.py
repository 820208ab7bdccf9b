"""The strategies among which `auto` may choose: all of them give the result of one device."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from tfdist.devices import resolve_devices
from tfdist.errors import TfdistError
from tfdist.placement.options import NONE
from tfdist.plan.hardware import load_hardware
from tfdist.plan.setup import Setup, list_setups
from tfdist.plan.workload import Workload
from tfdist.runs.options import TrainOptions


def list_candidates(options: TrainOptions) -> dict[str, Setup]:
    """Returns name -> setup for this machine's devices, or for those that the options name.

    Placements are not among them, nor is `shard_optimizer` unless it is given: they save memory.
    """
    workload = Workload(layers=(), global_batch_size=options.training.global_batch_size)
    count = len(find_devices(options))
    setups = list_setups(load_hardware("cpu"), workload, workers=1, devices=count)
    return {
        name_candidate(setup): setup
        for setup in setups
        if setup.placement == NONE
        and setup.shards_optimizer == options.step.shard_optimizer
        and _is_accepted(options, setup)
    }


def name_candidate(setup: Setup) -> str:
    """Returns the name of a setup in what `auto` says.

    >>> name_candidate(Setup(strategy="mirrored", replicas=2))
    'mirrored on 2 devices'
    """
    return f"{setup.name} on {setup.devices} devices" if setup.devices > 1 else setup.name


def find_devices(options: TrainOptions) -> Sequence[str]:
    """Returns the devices that the options name, or else all of this process."""
    named: Any = options.strategy
    return resolve_devices(named.devices, purpose="the strategy")


def apply(options: TrainOptions, setup: Setup) -> TrainOptions:
    """Returns the options that train with a setup of `list_candidates`."""
    values: dict[str, Any] = {
        "strategy": setup.strategy,
        "devices": tuple(find_devices(options)[: setup.replicas]),
    }
    return dataclasses.replace(options, strategy=dataclasses.replace(options.strategy, **values))


def _is_accepted(options: TrainOptions, setup: Setup) -> bool:
    """Returns whether a setup's strategy takes the strategy's options that are given."""
    try:
        apply(options, setup).strategy.select()
    except TfdistError:
        return False
    return True
