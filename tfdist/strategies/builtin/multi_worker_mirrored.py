"""MultiWorkerMirroredStrategy: one copy of the model per device, on several machines."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from tfdist.cluster import ClusterConfig, find_tf_config
from tfdist.errors import TfdistError
from tfdist.options import option
from tfdist.strategies.base import (
    ReplicaStrategy,
    Traits,
    collective_option,
    replicas_option,
    worker_timeout_option,
)

if TYPE_CHECKING:
    import tensorflow as tf


@dataclass(frozen=True, kw_only=True)
class MultiWorkerMirrored(ReplicaStrategy):
    """The options of a MultiWorkerMirroredStrategy: synchronous data parallelism over machines.

    TF_CONFIG describes the cluster; without it, this process is the only worker. Each GPU that a
    worker sees is a replica, or its CPU if it sees none; a placement uses those that
    `replicas_per_worker` leaves. TensorFlow allows one such strategy per process, created before
    the devices are used: in a cluster, `build` returns it again for the same options. Workers may
    have different numbers of the `logical_replicas`.

    Source:
      https://www.tensorflow.org/guide/distributed_training#multiworkermirroredstrategy
    """

    name: ClassVar[str] = "multi_worker_mirrored"
    summary: ClassVar[str] = "the devices of several workers"
    builds: ClassVar[str] = "MultiWorkerMirroredStrategy"
    traits: ClassVar[Traits] = Traits(has_workers=True, copies_variables=True)

    collective: str = collective_option()
    bytes_per_pack: int = option(
        4 * 2**20,
        "bytes of gradients that are summed at a time, during the backward pass; 0: all at once, "
        "after it",
        result=False,
        must_match=True,
        minimum=0,
    )
    worker_timeout_s: float = worker_timeout_option()
    replicas_per_worker: int = replicas_option()

    def build(
        self, *, must_match: Mapping[str, str] | None = None
    ) -> "tf.distribute.MultiWorkerMirroredStrategy":
        import tensorflow as tf

        from tfdist.strategies.rendezvous import connect_once, wait_for_peers

        if self.collective == "nccl" and not tf.config.list_physical_devices("GPU"):
            raise TfdistError(
                "Cannot build MultiWorkerMirroredStrategy: `collective=nccl` needs GPUs, but this "
                "worker sees none. Use auto or ring, or check CUDA_VISIBLE_DEVICES and the driver."
            )
        cpu = tf.config.list_physical_devices("CPU")[0]
        is_split = len(tf.config.get_logical_device_configuration(cpu) or ()) > 1
        if self.logical_replicas:
            is_split = False
        if is_split and not tf.config.list_physical_devices("GPU") and not self.replicas_per_worker:
            raise TfdistError(
                "Cannot build MultiWorkerMirroredStrategy: a worker without GPUs is one replica, "
                "but `virtual_devices` splits its CPU. Leave it out, or start more workers."
            )
        config = find_tf_config()
        self.check_cluster(config)
        if config is None:
            return self._make(config)

        def connect() -> Any:
            wait_for_peers(config, timeout_s=self.worker_timeout_s, alike=must_match)
            return self._make(config)

        return connect_once(self, connect)

    def _make(self, config: ClusterConfig | None) -> "tf.distribute.MultiWorkerMirroredStrategy":
        import tensorflow as tf

        from tfdist.strategies.process_sums import speed_up_sums

        kinds = tf.distribute.experimental.CommunicationImplementation
        options = tf.distribute.experimental.CommunicationOptions(
            bytes_per_pack=self.bytes_per_pack, implementation=kinds[self.collective.upper()]
        )
        if self.logical_replicas:
            from tfdist.strategies.logical_replicas import make_worker_replicas

            return make_worker_replicas(
                self.logical_replicas, self.threads_per_replica, config, options
            )
        try:
            strategy = tf.distribute.MultiWorkerMirroredStrategy(
                cluster_resolver=self._make_resolver(), communication_options=options
            )
        except RuntimeError as error:
            if "program startup" not in str(error):
                raise
            raise TfdistError(
                "Cannot build MultiWorkerMirroredStrategy: TensorFlow's devices are already in "
                "use. Create the strategy first, and only one per process."
            ) from error
        speed_up_sums(strategy)
        return strategy

    def _make_resolver(self) -> Any:
        """Returns what tells TensorFlow the cluster, and how many GPUs of this worker to use."""
        import tensorflow as tf

        count = self.replicas_per_worker
        gpus = len(tf.config.list_physical_devices("GPU"))
        if gpus and count > gpus:
            raise TfdistError(
                f"Cannot build MultiWorkerMirroredStrategy: `replicas_per_worker={count}`, but "
                f"this worker sees {gpus} GPUs. Give at most {gpus}."
            )

        class Resolver(tf.distribute.cluster_resolver.TFConfigClusterResolver):
            def num_accelerators(self, *args: Any, **kwargs: Any) -> dict[str, int]:
                found = super().num_accelerators(*args, **kwargs)
                return {kind: min(number, count or number) for kind, number in found.items()}

        return Resolver()


def make_multi_worker_mirrored(
    *, must_match: Mapping[str, str] | None = None, **options: Any
) -> "tf.distribute.MultiWorkerMirroredStrategy":
    """Builds a MultiWorkerMirroredStrategy from the options of `MultiWorkerMirrored`.

    Args:
      must_match: name -> value on which all workers must agree, such as flags and versions.
      **options: the fields of `MultiWorkerMirrored`.

    Raises:
      TfdistError: an algorithm is unknown, NCCL has no GPUs, the CPU is split into virtual devices,
        TF_CONFIG describes no suitable cluster, the workers do not agree on `must_match` (the
        difference is named), or TensorFlow's devices are already in use.
      TrainingError: a worker did not start in time; it is named.
    """
    return MultiWorkerMirrored(**options).build(must_match=must_match)
