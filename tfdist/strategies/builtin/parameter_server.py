"""ParameterServerStrategy: parameters on some tasks, asynchronous computation on others."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from tfdist.cluster import ClusterConfig
from tfdist.strategies.base import Strategy, Traits, worker_timeout_option

if TYPE_CHECKING:
    import tensorflow as tf


@dataclass(frozen=True, kw_only=True)
class ParameterServer(Strategy):
    """The options of a ParameterServerStrategy, for the chief, which coordinates the other tasks.

    Building it blocks until the workers and parameter servers answer; each of them runs
    `run_server`. The environment describes the cluster.

    TensorFlow places variables round-robin on the parameter servers, regardless of their size,
    unless they are created under `tf.variable_creator_scope(make_placement(strategy))`, as in
    `tfdist.Trainer`. Only the trainer can divide a table of an `Embedding`
    (`StepOptions.shard_tables_bytes`): Keras neither trains nor saves TensorFlow's split variables.

    Source:
      https://www.tensorflow.org/tutorials/distribute/parameter_server_training
    """

    name: ClassVar[str] = "parameter_server"
    summary: ClassVar[str] = "parameters on some tasks, asynchronous workers on others"
    builds: ClassVar[str] = "ParameterServerStrategy"
    traits: ClassVar[Traits] = Traits(has_servers=True)
    exact_steps: ClassVar[Mapping[str, Any]] = {"max_in_flight": 1}

    worker_timeout_s: float = worker_timeout_option()

    def build(
        self, *, must_match: Mapping[str, str] | None = None
    ) -> "tf.distribute.ParameterServerStrategy":
        from tfdist.strategies.rendezvous import connect_once
        from tfdist.strategies.servers import connect

        return connect_once(self, lambda: connect(timeout_s=self.worker_timeout_s))


def make_parameter_server(
    *, cluster: ClusterConfig | None = None, **options: Any
) -> "tf.distribute.ParameterServerStrategy":
    """Builds a ParameterServerStrategy from the options of `ParameterServer`.

    Args:
      cluster: the cluster; by default, the one that the environment describes.
      **options: the fields of `ParameterServer`.

    Raises:
      TfdistError: there is no cluster, it lacks a chief, a worker or a parameter server, or this
        task's port is in use.
      TrainingError: a task did not start in time; it is named.
    """
    from tfdist.strategies.servers import connect

    return connect(cluster, timeout_s=ParameterServer(**options).worker_timeout_s)
