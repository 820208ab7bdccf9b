"""Local SGD: workers that train by themselves and average their weights every few steps."""

from collections.abc import Mapping

import tensorflow as tf

from tfdist.devices import list_devices
from tfdist.errors import TfdistError
from tfdist.strategies.multi_worker_mirrored import make_multi_worker_mirrored


class LocalSgdStrategy(tf.distribute.MirroredStrategy):
    """A MirroredStrategy over this worker's own devices, with a channel to the other workers.

    By itself it trains each worker alone. `tfdist.Trainer` deals the workers their parts of the
    global batches and averages what they learn.

    Attributes:
      channel: a MultiWorkerMirroredStrategy over all workers, for communication only.
      sync_every: steps between two averagings.
      average_optimizer: whether the optimiser's state is averaged with the weights.
      outer_learning_rate, outer_momentum: of the step from the last average to the next.
    """

    def __init__(
        self,
        channel: tf.distribute.MultiWorkerMirroredStrategy,
        *,
        sync_every: int = 8,
        average_optimizer: bool = True,
        outer_learning_rate: float = 1.0,
        outer_momentum: float = 0.0,
    ):
        # Not TensorFlow's choice, which numbers its collectives as the channel does.
        super().__init__(
            devices=list(list_devices()) if tf.config.list_physical_devices("GPU") else ["CPU:0"],
            cross_device_ops=tf.distribute.ReductionToOneDevice(),
        )
        self.channel = channel
        self.sync_every = sync_every
        self.average_optimizer = average_optimizer
        self.outer_learning_rate = outer_learning_rate
        self.outer_momentum = outer_momentum


def make_local_sgd(
    *,
    collective: str = "auto",
    worker_timeout_s: float = 600.0,
    alike: Mapping[str, str] | None = None,
    sync_every: int = 8,
    average_optimizer: bool = True,
    outer_learning_rate: float = 1.0,
    outer_momentum: float = 0.0,
) -> LocalSgdStrategy:
    """Builds a LocalSgdStrategy: data parallelism that communicates every few steps only.

    Every `sync_every` steps, and at the end of every epoch, the weights become the mean of the
    workers', weighted by the examples each has seen. With an outer momentum the difference to
    the last mean is taken for a gradient, and the weights take a momentum step along it.

    Args:
      collective, worker_timeout_s, alike: as of `make_multi_worker_mirrored`.
      sync_every: steps between two averagings, 1 or more.
      average_optimizer: whether momentum and the like are averaged as well, or stay each
        worker's own.
      outer_learning_rate: of the outer step; 1 without an outer momentum is plain averaging.
      outer_momentum: of the outer step, in [0, 1).

    Returns:
      A `LocalSgdStrategy`, which is a `tf.distribute.MirroredStrategy`.

    Raises:
      TfdistError: a number out of range, or as of `make_multi_worker_mirrored`.
      TrainingError: a worker did not come in time; it is named.

    Source: Stich 2019, arXiv:1805.09767 (local SGD); Wang et al. 2020, arXiv:1910.00643
      (SlowMo, algorithm 1) and Douillard et al. 2023, arXiv:2311.08105 (DiLoCo), for the
      outer step.
    """
    if sync_every < 1:
        raise TfdistError(f"--sync_every={sync_every} is not a number of steps. Give 1 or more.")
    if not 0 <= outer_momentum < 1:
        raise TfdistError(f"--outer_momentum={outer_momentum} is not in [0, 1). Try 0.5 or 0.")
    if outer_learning_rate <= 0:
        raise TfdistError(f"--outer_learning_rate={outer_learning_rate} is not positive. Try 1.")
    return LocalSgdStrategy(
        make_multi_worker_mirrored(
            collective=collective, worker_timeout_s=worker_timeout_s, alike=alike
        ),
        sync_every=sync_every,
        average_optimizer=average_optimizer,
        outer_learning_rate=outer_learning_rate,
        outer_momentum=outer_momentum,
    )
