"""OneDeviceStrategy: everything on one device; the reference for every other strategy."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from tfdist.errors import TfdistError
from tfdist.strategies.base import ReplicaStrategy, Strategy, Traits, devices_option

if TYPE_CHECKING:
    import tensorflow as tf


@dataclass(frozen=True, kw_only=True)
class OneDevice(ReplicaStrategy):
    """The options of a OneDeviceStrategy.

    It takes at most one device, the first accelerator by default, or the CPU. With
    `logical_replicas`, a MirroredStrategy over parts of the device is built.

    Source:
      https://www.tensorflow.org/api_docs/python/tf/distribute/OneDeviceStrategy
    """

    name: ClassVar[str] = "one_device"
    summary: ClassVar[str] = "one device"
    builds: ClassVar[str] = "OneDeviceStrategy"
    traits: ClassVar[Traits] = Traits(is_single=True)

    devices: tuple[str, ...] = devices_option()

    def resolve(self) -> Strategy:
        if not self.logical_replicas:
            return self
        import tensorflow as tf

        from tfdist.strategies.builtin.mirrored import Mirrored

        gpus = tf.config.list_physical_devices("GPU")
        return Mirrored(
            devices=self.devices or (("GPU:0",) if gpus else ()),
            logical_replicas=self.logical_replicas,
            threads_per_replica=self.threads_per_replica,
        )

    def build(
        self, *, must_match: Mapping[str, str] | None = None
    ) -> "tf.distribute.OneDeviceStrategy":
        import tensorflow as tf

        from tfdist.devices import resolve_devices

        names = resolve_devices(self.devices, purpose="OneDeviceStrategy")
        if self.devices and len(names) > 1:
            raise TfdistError(
                f"Cannot build OneDeviceStrategy: `devices` names {len(names)} devices "
                f"({', '.join(names)}). Name one, or use `strategy=mirrored`."
            )
        return tf.distribute.OneDeviceStrategy(names[0])


def make_one_device(**options: Any) -> "tf.distribute.OneDeviceStrategy":
    """Builds a OneDeviceStrategy from the options of `OneDevice`.

    Raises:
      TfdistError: the device does not exist, or there is more than one.
    """
    return OneDevice(**options).build()
