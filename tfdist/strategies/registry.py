"""The table of strategies: name -> factory, and what `auto` chooses.

To add a strategy: its factory in a file of its own, and one row in `STRATEGIES`. The
conformance tests and `--help` take their lists from here.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from tfdist.cluster import choose_cluster_strategy, parse_tf_config, read_environment
from tfdist.devices import ACCELERATORS, list_devices
from tfdist.errors import TfdistError, make_unknown_name_error
from tfdist.strategies.central_storage import make_central_storage
from tfdist.strategies.local_sgd import make_local_sgd
from tfdist.strategies.mirrored import make_mirrored
from tfdist.strategies.multi_worker_mirrored import make_multi_worker_mirrored
from tfdist.strategies.one_device import make_one_device
from tfdist.strategies.parameter_server import make_parameter_server
from tfdist.strategies.tpu import make_tpu


@dataclass(frozen=True)
class StrategyEntry:
    """One row of the table.

    Attributes:
      make: the factory, with keyword arguments only.
      arguments: the factory's arguments, with their defaults.
      summary: what it is for, in a few words.
    """

    make: Callable[..., tf.distribute.Strategy]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    summary: str = ""


STRATEGIES: dict[str, StrategyEntry] = {
    "one_device": StrategyEntry(make_one_device, {"devices": None}, "one device"),
    "mirrored": StrategyEntry(
        make_mirrored, {"devices": None, "all_reduce": "auto"}, "several devices of one machine"
    ),
    "central_storage": StrategyEntry(
        make_central_storage,
        {"devices": None, "parameter_device": "CPU:0"},
        "variables on the CPU, computation on the accelerators",
    ),
    "parameter_server": StrategyEntry(
        make_parameter_server,
        {"worker_timeout_s": 600.0},
        "parameters on some tasks, asynchronous workers on others",
    ),
    "multi_worker_mirrored": StrategyEntry(
        make_multi_worker_mirrored,
        {
            "collective": "auto",
            "bytes_per_pack": 4 * 2**20,
            "worker_timeout_s": 600.0,
            "alike": None,
        },
        "the devices of several workers",
    ),
    "local_sgd": StrategyEntry(
        make_local_sgd,
        {
            "collective": "auto",
            "worker_timeout_s": 600.0,
            "alike": None,
            "sync_every": 8,
            "average_optimizer": True,
            "outer_learning_rate": 1.0,
            "outer_momentum": 0.0,
        },
        "workers that train by themselves and average their weights every few steps",
    ),
    "tpu": StrategyEntry(make_tpu, {"tpu": ""}, "the cores of a TPU"),
}
"""Name, as `--strategy` takes it -> entry."""


def make_strategy(name: str, **arguments: Any) -> tf.distribute.Strategy:
    """Builds a strategy by name.

    Args:
      name: a key of `STRATEGIES`, or `auto`: in a cluster the one that its roles are for,
        else mirrored where there are two or more accelerators, else one device.
      **arguments: the factories' arguments. One that the chosen strategy does not take may
        be given only with its default value (None, or as in `STRATEGIES`).

    Raises:
      TfdistError: an unknown name, or an argument that the strategy does not take.
    """
    if name == "auto":
        name = choose_strategy()
    if name not in STRATEGIES:
        raise make_unknown_name_error("--strategy", name, ["auto", *STRATEGIES])
    entry = STRATEGIES[name]
    for argument, value in arguments.items():
        if argument not in entry.arguments and value != _find_default(argument):
            takers = [other for other, row in STRATEGIES.items() if argument in row.arguments]
            raise TfdistError(
                f"--strategy={name} does not take --{argument} (given: {value}). "
                f"Leave it out, or take --strategy={' or '.join(takers)}."
            )
    return entry.make(**{key: value for key, value in arguments.items() if key in entry.arguments})


def choose_strategy() -> str:
    """Returns the name that `auto` stands for: in TF_CONFIG's cluster, or on this machine."""
    config = parse_tf_config(read_environment().get("TF_CONFIG", ""))
    return choose_cluster_strategy(config) or choose_local_strategy()


def choose_local_strategy() -> str:
    """Returns the name that `auto` stands for on one machine."""
    accelerators = [name for name in list_devices() if name.partition(":")[0] in ACCELERATORS]
    return "mirrored" if len(accelerators) > 1 else "one_device"


def _find_default(argument: str) -> Any:
    for entry in STRATEGIES.values():
        if argument in entry.arguments:
            return entry.arguments[argument]
    raise TypeError(f"no strategy takes an argument {argument!r}")
