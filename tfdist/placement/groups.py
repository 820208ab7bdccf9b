"""The devices of each replica."""

from collections.abc import Mapping, Sequence

import tensorflow as tf

from tfdist import devices
from tfdist.errors import TfdistError

_DEFAULT = type(tf.distribute.get_strategy())  # the strategy outside of all scopes


def find_groups(strategy: tf.distribute.Strategy, size: int) -> dict[str, tuple[str, ...]]:
    """Returns the first device of each of this process's replicas -> all devices of the replica.

    Every replica gets its own device first, and then its share of the devices that are left.

    Args:
      size: devices of each replica; 0 for as many as there are.

    Raises:
      TfdistError: there are fewer than two for a replica.
    """
    everything = devices.list_devices()
    if isinstance(strategy, _DEFAULT):
        own = everything[:1]
    else:
        own = tuple(devices.shorten(name) for name in strategy.extended.worker_devices)
    left = [name for name in everything if name not in own]
    each = len(left) // len(own)
    most = 1 + each
    if most < 2 or size > most:
        wanted = max(size, 2) * len(own)
        raise TfdistError(
            f"`placement` needs {max(size, 2)} devices for each of {len(own)} replicas, but there "
            f"are {len(everything)} ({', '.join(everything)}). Give `virtual_devices={wanted}`, or "
            "fewer replicas."
        )
    count = (size or most) - 1
    return {
        name: (name, *left[place * each : place * each + count]) for place, name in enumerate(own)
    }


def find_own_group(groups: Mapping[str, Sequence[str]]) -> Sequence[str]:
    """Returns the devices of the replica that is being traced."""
    with tf.control_dependencies(None):
        here = tf.no_op().device
    return groups.get(devices.shorten(here)) or next(iter(groups.values()))
