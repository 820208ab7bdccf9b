"""CentralStorageStrategy: one copy of the variables, computation on every device."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from tfdist.options import option
from tfdist.strategies.base import ReplicaStrategy, Traits, devices_option

if TYPE_CHECKING:
    import tensorflow as tf


@dataclass(frozen=True, kw_only=True)
class CentralStorage(ReplicaStrategy):
    """The options of a CentralStorageStrategy, for variables that do not fit on every device.

    Source:
      https://www.tensorflow.org/guide/distributed_training#centralstoragestrategy
    """

    name: ClassVar[str] = "central_storage"
    summary: ClassVar[str] = "variables on the CPU, computation on the accelerators"
    builds: ClassVar[str] = "experimental.CentralStorageStrategy"
    traits: ClassVar[Traits] = Traits(shares_variables=True)

    devices: tuple[str, ...] = devices_option()
    parameter_device: str = option(
        "CPU:0", "where the variables live", metavar="CPU:0", result=False
    )

    def build(
        self, *, must_match: Mapping[str, str] | None = None
    ) -> "tf.distribute.experimental.CentralStorageStrategy":
        import tensorflow as tf

        from tfdist.devices import resolve_devices

        purpose = "CentralStorageStrategy"
        if self.logical_replicas:
            from tfdist.strategies.logical_replicas import make_central_replicas

            return make_central_replicas(
                self.logical_replicas, self.threads_per_replica, self.devices, self.parameter_device
            )
        (parameter_device,) = resolve_devices(
            [self.parameter_device], purpose=purpose, name="parameter_device"
        )
        return tf.distribute.experimental.CentralStorageStrategy(
            compute_devices=list(resolve_devices(self.devices, purpose=purpose)),
            parameter_device=parameter_device,
        )


def make_central_storage(**options: Any) -> "tf.distribute.experimental.CentralStorageStrategy":
    """Builds a CentralStorageStrategy from the options of `CentralStorage`.

    Raises:
      TfdistError: a device does not exist.
    """
    return CentralStorage(**options).build()
