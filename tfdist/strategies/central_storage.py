"""CentralStorageStrategy: one copy of the variables, computation on every device."""

from collections.abc import Sequence

import tensorflow as tf

from tfdist.devices import resolve_devices


def make_central_storage(
    *, devices: Sequence[str] | None = None, parameter_device: str = "CPU:0"
) -> tf.distribute.experimental.CentralStorageStrategy:
    """Builds a CentralStorageStrategy: for models whose variables do not fit every device.

    Args:
      devices: the devices that compute; all accelerators by default, or all logical CPUs.
      parameter_device: where the variables live.

    Returns:
      A `tf.distribute.experimental.CentralStorageStrategy`.

    Raises:
      TfdistError: a device that is not there.

    Source:
      https://www.tensorflow.org/guide/distributed_training#centralstoragestrategy
    """
    purpose = "CentralStorageStrategy"
    return tf.distribute.experimental.CentralStorageStrategy(
        compute_devices=list(resolve_devices(devices, purpose=purpose)),
        parameter_device=resolve_devices([parameter_device], purpose=purpose)[0],
    )
