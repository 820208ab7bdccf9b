"""MirroredStrategy: one copy of the model per device, gradients all-reduced every step."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from tfdist.errors import TfdistError
from tfdist.options import option
from tfdist.strategies.base import ReplicaStrategy, Traits, devices_option

if TYPE_CHECKING:
    import tensorflow as tf

# Name -> class in `tf.distribute`; "" leaves the choice to TensorFlow.
_ALL_REDUCE = {
    "auto": "",
    "nccl": "NcclAllReduce",
    "hierarchical_copy": "HierarchicalCopyAllReduce",
    "reduction_to_one_device": "ReductionToOneDevice",
}


@dataclass(frozen=True, kw_only=True)
class Mirrored(ReplicaStrategy):
    """The options of a MirroredStrategy: synchronous data parallelism on one machine.

    `all_reduce` is `nccl` for NVIDIA GPUs, `hierarchical_copy` for GPUs without NCCL, or
    `reduction_to_one_device` for anything; `auto` is TensorFlow's choice on GPUs, and the last one
    on CPUs. For `logical_replicas`, see [the same bits](same_bits.md).

    Source:
      https://www.tensorflow.org/guide/distributed_training#mirroredstrategy
    """

    name: ClassVar[str] = "mirrored"
    summary: ClassVar[str] = "several devices of one machine"
    builds: ClassVar[str] = "MirroredStrategy"
    traits: ClassVar[Traits] = Traits(copies_variables=True)

    devices: tuple[str, ...] = devices_option()
    all_reduce: str = option(
        "auto", "how gradients are summed", choices=tuple(_ALL_REDUCE), result=False
    )

    def build(
        self, *, must_match: Mapping[str, str] | None = None
    ) -> "tf.distribute.MirroredStrategy":
        import tensorflow as tf

        from tfdist.devices import resolve_devices
        from tfdist.strategies.collectives import separate_collectives

        if self.logical_replicas:
            from tfdist.strategies.logical_replicas import make_mirrored_replicas

            return make_mirrored_replicas(
                self.logical_replicas, self.threads_per_replica, self.devices
            )
        names = resolve_devices(self.devices, purpose="MirroredStrategy")
        not_gpus = [name for name in names if not name.startswith("GPU:")]
        all_reduce = self.all_reduce
        if all_reduce == "nccl" and not_gpus:
            raise TfdistError(
                f"Cannot build MirroredStrategy: `all_reduce=nccl` needs GPUs, but the devices are "
                f"{', '.join(names)}. Use auto, hierarchical_copy or reduction_to_one_device."
            )
        if all_reduce == "auto" and not_gpus:
            # TensorFlow's own choice on CPUs are collectives, which a strategy that was built
            # elsewhere in the same process can abort; see `separate_collectives`.
            all_reduce = "reduction_to_one_device"
        kind = _ALL_REDUCE[all_reduce]
        strategy = tf.distribute.MirroredStrategy(
            devices=list(names), cross_device_ops=getattr(tf.distribute, kind)() if kind else None
        )
        separate_collectives(strategy)
        return strategy


def make_mirrored(**options: Any) -> "tf.distribute.MirroredStrategy":
    """Builds a MirroredStrategy from the options of `Mirrored`.

    Raises:
      TfdistError: a device does not exist, an algorithm is unknown, or NCCL has no GPUs.
    """
    return Mirrored(**options).build()
