"""The strategy object of local SGD."""

import tensorflow as tf

from tfdist.devices import list_devices
from tfdist.strategies.averaging import Averaging


class LocalSgdStrategy(tf.distribute.MirroredStrategy):
    """A MirroredStrategy over this worker's own devices, with a channel to the other workers.

    By itself, it trains each worker separately. `tfdist.Trainer` gives each worker its part of the
    global batches and averages the workers' weights.

    Args:
      channel: a MultiWorkerMirroredStrategy over all workers, for communication only.
      replicas_per_worker: how many of the worker's GPUs to use; 0: all.
    """

    def __init__(
        self,
        channel: tf.distribute.MultiWorkerMirroredStrategy,
        options: Averaging | None = None,
        *,
        replicas_per_worker: int = 0,
    ):
        self.options = options or Averaging()
        own = list_devices() if tf.config.list_physical_devices("GPU") else ("CPU:0",)
        # TensorFlow's own choice would number its collectives as the channel does.
        super().__init__(
            devices=list(own[: replicas_per_worker or None]),
            cross_device_ops=tf.distribute.ReductionToOneDevice(),
        )
        self.channel = channel
