"""MirroredStrategy: one copy of the model a device, gradients all-reduced every step."""

from collections.abc import Callable, Sequence

import tensorflow as tf

from tfdist.devices import resolve_devices
from tfdist.errors import TfdistError, make_unknown_name_error

_ALL_REDUCE: dict[str, Callable[[], tf.distribute.CrossDeviceOps] | None] = {
    "auto": None,
    "nccl": tf.distribute.NcclAllReduce,
    "hierarchical_copy": tf.distribute.HierarchicalCopyAllReduce,
    "reduction_to_one_device": tf.distribute.ReductionToOneDevice,
}


def make_mirrored(
    *, devices: Sequence[str] | None = None, all_reduce: str = "auto"
) -> tf.distribute.MirroredStrategy:
    """Builds a MirroredStrategy: synchronous data parallelism on one machine.

    Args:
      devices: device names, such as `["GPU:0", "GPU:1"]`; all accelerators by default, or
        all logical CPUs where there is none.
      all_reduce: how gradients are summed over the devices: `nccl` (NVIDIA GPUs),
        `hierarchical_copy` (GPUs without NCCL), `reduction_to_one_device` (anything), or
        `auto`: TensorFlow's choice on GPUs, `reduction_to_one_device` on CPUs.

    Returns:
      A `tf.distribute.MirroredStrategy`.

    Raises:
      TfdistError: a device that is not there, an unknown algorithm, or NCCL without GPUs.

    Source:
      https://www.tensorflow.org/guide/distributed_training#mirroredstrategy
    """
    if all_reduce not in _ALL_REDUCE:
        raise make_unknown_name_error("--all_reduce", all_reduce, _ALL_REDUCE)
    names = resolve_devices(devices, purpose="MirroredStrategy")
    not_gpus = [name for name in names if not name.startswith("GPU:")]
    if all_reduce == "nccl" and not_gpus:
        raise TfdistError(
            f"Cannot build MirroredStrategy: --all_reduce=nccl needs GPUs, but the devices are "
            f"{', '.join(names)}. Take auto, hierarchical_copy or reduction_to_one_device."
        )
    if all_reduce == "auto" and not_gpus:
        # TensorFlow's own choice on CPUs numbers its collectives from one in every strategy:
        # a second strategy of another size in the same process aborts both.
        all_reduce = "reduction_to_one_device"
    make_cross_device_ops = _ALL_REDUCE[all_reduce]
    return tf.distribute.MirroredStrategy(
        devices=list(names),
        cross_device_ops=make_cross_device_ops() if make_cross_device_ops else None,
    )
