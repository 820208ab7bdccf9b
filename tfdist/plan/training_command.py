"""The command that trains with a setup."""

import dataclasses
import shlex
from collections.abc import Sequence

from tfdist.cli.flags import drop_flags
from tfdist.placement.options import PlacementOptions
from tfdist.plan.hardware import Hardware
from tfdist.plan.setup import Setup
from tfdist.runs.options import TrainOptions

CHOSEN = {
    "strategy",
    "devices",
    "virtual_devices",
    *(item.name for item in dataclasses.fields(PlacementOptions)),
    "micro_batches",
    "shard_optimizer",
    "dry_run",
}
"""The flags of `tfdist.train` that a plan chooses itself."""

ALONE = {"shard_optimizer", "dry_run"}  # flags without a value


def make_command(
    setup: Setup,
    train: TrainOptions,
    arguments: Sequence[str],
    hardware: Hardware,
    *,
    batch_per_replica: int = 0,
) -> str:
    """Returns the command that trains with a setup.

    Args:
      batch_per_replica: the examples of a replica, if the batch grows with the replicas.
    """
    dropped = set(CHOSEN)
    added = []
    for item in dataclasses.fields(train.strategy):
        if setup.strategy not in item.metadata.get("takers", [setup.strategy]):
            dropped.add(item.name)
    if batch_per_replica:
        dropped.add("global_batch_size")
        added.append(f"--global_batch_size={batch_per_replica * setup.sharing}")
    if hardware.shares_cores and setup.replicas * setup.parts > 1:
        added.append(f"--virtual_devices={setup.replicas * setup.parts}")
    return setup.format_command(shlex.join([*drop_flags(arguments, dropped, ALONE), *added]))
