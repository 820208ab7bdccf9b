"""The base class of strategies: their options, their traits, and how they are built."""

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from tfdist.cluster import ClusterConfig, check_cluster, make_evaluator_error
from tfdist.errors import TfdistError
from tfdist.options import OptionGroup, option

if TYPE_CHECKING:
    import tensorflow as tf


@dataclass(frozen=True, kw_only=True)
class Traits:
    """The properties of a strategy on which the rest of tfdist depends.

    Attributes:
      has_workers: several processes run the same program, each with its own replicas.
      has_servers: a chief hands out steps to workers, and servers hold the variables, so that
        training is asynchronous.
      local_updates: each worker trains by itself between two averagings of the weights.
      copies_variables: each replica has a copy of the variables.
      shares_variables: the replicas of a process share one copy of the variables.
      fixes_shapes: XLA compiles its steps and must know every shape.
      is_single: it has one replica.
      is_remote: its devices belong to another machine and are known only after connecting.
    """

    has_workers: bool = False
    has_servers: bool = False
    local_updates: bool = False
    copies_variables: bool = False
    shares_variables: bool = False
    fixes_shapes: bool = False
    is_single: bool = False
    is_remote: bool = False

    @property
    def is_local(self) -> bool:
        """Whether it runs in one process on this machine's devices."""
        return not (self.has_workers or self.has_servers or self.is_remote)

    @property
    def has_processes(self) -> bool:
        """Whether it runs in several processes."""
        return self.has_workers or self.has_servers


@dataclass(frozen=True, kw_only=True)
class Strategy(OptionGroup):
    """Base class of strategies: the options of a strategy, and how it is built from them.

    A strategy is a subclass in a file of its own, whose fields are its flags: a file of
    `tfdist.strategies.builtin`, or one named by `--strategy=package.module:Class`.

    Attributes:
      name: the value of `--strategy`.
      summary: what it is for, in a few words.
      builds: the class in `tf.distribute` that TensorFlow has for it.
      traits: the properties on which the rest of tfdist depends.
      exact, exact_steps: values of its own options, and of `StepOptions`, with which its result
        equals that of one device if other values change the result.
    """

    name: ClassVar[str]
    summary: ClassVar[str] = ""
    builds: ClassVar[str] = ""
    traits: ClassVar[Traits] = Traits()
    exact: ClassVar[Mapping[str, Any]] = {}
    exact_steps: ClassVar[Mapping[str, Any]] = {}

    @classmethod
    def find_type(cls) -> type:
        """Returns the class of the object that `build` returns, for finding its traits."""
        import tensorflow as tf

        return operator.attrgetter(cls.builds)(tf.distribute) if cls.builds else type(None)

    def resolve(self) -> "Strategy":
        """Returns the options of the strategy that these options stand for."""
        return self

    def build(self, *, must_match: Mapping[str, str] | None = None) -> "tf.distribute.Strategy":
        """Builds the strategy.

        Args:
          must_match: name -> value on which all workers must agree.

        Raises:
          TfdistError: the options name something that is not available.
          TrainingError: another task did not start in time.
        """
        raise NotImplementedError

    @classmethod
    def check_cluster(cls, config: ClusterConfig | None) -> None:
        """Checks that a cluster is valid, and has the roles for this strategy."""
        if cls.traits.has_servers:
            check_servers(config, strategy=cls.name)
            return
        if config is None:
            return
        check_task(config)
        if cls.traits.is_local and config.num_tasks > 1:
            raise TfdistError(
                f"`strategy={cls.name}` runs in one process, but {config.source} describes "
                f"{config.num_tasks} tasks. Use `strategy=multi_worker_mirrored`, or start one "
                "process without a cluster."
            )
        if cls.traits.has_workers and config.num_ps:
            raise TfdistError(
                f"`strategy={cls.name}` has no parameter servers, but {config.source} describes "
                f"{config.num_ps}. Leave them out, or use `strategy=parameter_server`."
            )


@dataclass(frozen=True, kw_only=True)
class ReplicaStrategy(Strategy):
    """Base class of strategies whose replicas may be independent of the devices.

    With logical replicas, each global batch is divided into as many shares, and everything that is
    summed over them is summed in one order. So training ends with the same bits on any number of
    devices and processes that have the same kind of device.
    """

    logical_replicas: int = option(
        0,
        "divide each batch into this many shares, on any number of devices, with the same bits; "
        "0: one share for each device",
        result=False,
        must_match=True,
        minimum=0,
    )
    threads_per_replica: int = option(
        1,
        "logical replicas: threads that compute an operation; other numbers give other bits",
        result=False,
        must_match=True,
        minimum=1,
    )


def check_task(config: ClusterConfig) -> None:
    """Checks that a cluster is valid, and that this process is not an evaluator.

    Raises:
      TfdistError: a role is unknown, an address is malformed or repeated, this process's task is
        not in the cluster, or this process is an evaluator.
    """
    check_cluster(config)
    if config.role == "evaluator":
        raise make_evaluator_error(config.source)


def check_servers(
    config: ClusterConfig | None, *, strategy: str = "parameter_server"
) -> ClusterConfig:
    """Returns a cluster after checking that it has a chief, workers and parameter servers.

    Args:
      strategy: the name of the strategy, for errors.

    Raises:
      TfdistError: see `check_task`; or there is no cluster, or it lacks a role.
    """
    if config is None:
        raise TfdistError(
            f"`strategy={strategy}` needs a cluster, but this is a single process. Start one with "
            "python -m tfdist.launch --workers=2 --ps=1 -- followed by these flags."
        )
    check_task(config)
    for role, needed in (("chief", "exactly"), ("worker", "at least"), ("ps", "at least")):
        if not config.tasks.get(role):
            raise TfdistError(
                f"`strategy={strategy}` needs {needed} one {role}, but {config.source} describes "
                "none. Add one (python -m tfdist.launch --workers=2 --ps=1 starts all three roles)."
            )
    return config


def devices_option() -> Any:
    """Returns the field `devices` for a strategy of one process."""
    return option(
        (),
        "devices to compute on; all accelerators by default",
        metavar="GPU:0,GPU:1",
        result=False,
    )


def worker_timeout_option() -> Any:
    """Returns the field `worker_timeout_s` for a strategy of several processes."""
    return option(
        600.0,
        "several processes: seconds to wait for all of them to start",
        result=False,
        minimum=0,
    )


def replicas_option() -> Any:
    """Returns the field `replicas_per_worker` for a strategy of several workers."""
    return option(
        0,
        "several workers: replicas of each worker; 0: one for each GPU that it sees, or its CPU",
        result=False,
        must_match=True,
        minimum=0,
    )


def collective_option() -> Any:
    """Returns the field `collective` for a strategy of several workers."""
    return option(
        "auto",
        "several workers: how they sum their gradients or weights",
        choices=("auto", "ring", "nccl"),
        result=False,
        must_match=True,
    )
