"""Local SGD: workers that train by themselves and average their weights every few steps."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from tfdist.strategies.averaging import Averaging
from tfdist.strategies.base import (
    Strategy,
    Traits,
    collective_option,
    replicas_option,
    worker_timeout_option,
)
from tfdist.strategies.builtin.multi_worker_mirrored import MultiWorkerMirrored

if TYPE_CHECKING:
    from tfdist.strategies.local_sgd_strategy import LocalSgdStrategy


@dataclass(frozen=True, kw_only=True)
class LocalSgd(Strategy, Averaging):
    """The options of a LocalSgdStrategy: data parallelism that communicates only every few steps.

    Every `sync_every` steps, and at the end of every epoch, the weights become the mean of the
    workers' weights, weighted by the number of examples that each has seen. With an outer momentum,
    the weights take a momentum step in which the difference from the last mean is the gradient.

    Source: Stich 2019, arXiv:1805.09767 (local SGD); Wang et al. 2020, arXiv:1910.00643
      (SlowMo, algorithm 1) and Douillard et al. 2023, arXiv:2311.08105 (DiLoCo), for the
      outer step.
    """

    name: ClassVar[str] = "local_sgd"
    summary: ClassVar[str] = (
        "workers that train by themselves and average their weights every few steps"
    )
    traits: ClassVar[Traits] = Traits(has_workers=True, local_updates=True, copies_variables=True)
    exact: ClassVar[Mapping[str, Any]] = {"sync_every": 1}

    collective: str = collective_option()
    worker_timeout_s: float = worker_timeout_option()
    replicas_per_worker: int = replicas_option()

    @classmethod
    def find_type(cls) -> type:
        from tfdist.strategies.local_sgd_strategy import LocalSgdStrategy

        return LocalSgdStrategy

    def build(self, *, must_match: Mapping[str, str] | None = None) -> "LocalSgdStrategy":
        from tfdist.strategies.local_sgd_strategy import LocalSgdStrategy

        channel = MultiWorkerMirrored(
            collective=self.collective,
            worker_timeout_s=self.worker_timeout_s,
            replicas_per_worker=self.replicas_per_worker,
        )
        return LocalSgdStrategy(
            channel.build(must_match=must_match), self, replicas_per_worker=self.replicas_per_worker
        )


def make_local_sgd(
    *, must_match: Mapping[str, str] | None = None, **options: Any
) -> "LocalSgdStrategy":
    """Builds a LocalSgdStrategy, which is a MirroredStrategy, from the options of `LocalSgd`.

    Args:
      must_match: see `make_multi_worker_mirrored`.
      **options: the fields of `LocalSgd`.

    Raises:
      TfdistError: a number is out of range, or see `make_multi_worker_mirrored`.
      TrainingError: a worker did not start in time; it is named.
    """
    return LocalSgd(**options).build(must_match=must_match)
