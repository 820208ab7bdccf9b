"""OneDeviceStrategy: everything on one device; what every other strategy is compared with."""

from collections.abc import Sequence

import tensorflow as tf

from tfdist.devices import resolve_devices
from tfdist.errors import TfdistError


def make_one_device(*, devices: Sequence[str] | None = None) -> tf.distribute.OneDeviceStrategy:
    """Builds a OneDeviceStrategy.

    Args:
      devices: at most one device name, such as `GPU:0`; the first accelerator by default,
        or the CPU.

    Returns:
      A `tf.distribute.OneDeviceStrategy`.

    Raises:
      TfdistError: a device that is not there, or more than one.

    Source:
      https://www.tensorflow.org/api_docs/python/tf/distribute/OneDeviceStrategy
    """
    names = resolve_devices(devices, purpose="OneDeviceStrategy")
    if devices and len(names) > 1:
        raise TfdistError(
            f"Cannot build OneDeviceStrategy: --devices names {len(names)} devices "
            f"({', '.join(names)}). Name one, or take --strategy=mirrored."
        )
    return tf.distribute.OneDeviceStrategy(names[0])
