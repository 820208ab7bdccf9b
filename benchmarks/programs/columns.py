"""The strategies in the columns of the table."""

from typing import Any

STRATEGIES = ("one", "mirrored2", "mirrored3", "central2", "workers2", "servers")
# Keras alone: unchanged, and three times with weights that are perturbed by their rounding.
KERAS, MOVED = "keras", ("moved1", "moved2", "moved3")
# What `tfdist.launch` starts for a strategy of several processes.
CLUSTERS = {"workers2": ("--workers=2",), "servers": ("--workers=1", "--ps=1")}


def make_strategy(name: str) -> Any:
    """Builds the strategy of a column, on logical CPUs or for this task of its cluster.

    Raises:
      ValueError: no strategy has this name.
    """
    import tensorflow as tf

    from tfdist.strategies.builtin.multi_worker_mirrored import make_multi_worker_mirrored
    from tfdist.strategies.builtin.parameter_server import make_parameter_server

    if name == "one":
        return tf.distribute.OneDeviceStrategy("CPU:0")
    if name.startswith("mirrored"):
        return tf.distribute.MirroredStrategy(_list_cpus(int(name.removeprefix("mirrored"))))
    if name.startswith("central"):
        devices = _list_cpus(int(name.removeprefix("central")))
        return tf.distribute.experimental.CentralStorageStrategy(devices, "CPU:0")
    if name == "workers2":
        return make_multi_worker_mirrored()
    if name == "servers":
        return make_parameter_server()
    raise ValueError(f"Unknown strategy {name!r}. Valid: {', '.join(STRATEGIES)}.")


def _list_cpus(count: int) -> list[str]:
    return [f"CPU:{index}" for index in range(count)]
