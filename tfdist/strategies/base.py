"""What a strategy is: its options, what the rest of tfdist asks of it, and how it is built."""

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
    """What the rest of tfdist asks of a strategy.

    Attributes:
      has_workers: several processes run the same program, each with replicas of its own.
      has_servers: a chief hands out steps to workers, and servers hold the variables, so that
        training is asynchronous.
      trains_apart: each worker makes steps of its own between two averagings.
      copies_variables: each replica has a copy of the variables.
      shares_variables: the replicas of a process share one copy of the variables.
      fixes_shapes: XLA compiles its steps, which must know every shape.
      is_single: it has one replica.
      is_remote: its devices are those of another machine, which only connecting finds.
    """

    has_workers: bool = False
    has_servers: bool = False
    trains_apart: bool = False
    copies_variables: bool = False
    shares_variables: bool = False
    fixes_shapes: bool = False
    is_single: bool = False
    is_remote: bool = False

    @property
    def is_local(self) -> bool:
        """Whether it is one process with this machine's devices."""
        return not (self.has_workers or self.has_servers or self.is_remote)

    @property
    def has_processes(self) -> bool:
        """Whether it is for several processes."""
        return self.has_workers or self.has_servers


@dataclass(frozen=True, kw_only=True)
class Strategy(OptionGroup):
    """The options of a strategy, and how it is built from them; a base class.

    A strategy is one subclass in a file of its own, whose fields are its flags. It is listed in
    `tfdist.strategies.registry`, or named by `--strategy=package.module:Class`.

    Attributes:
      name: as `--strategy` takes it.
      summary: what it is for, in a few words.
      traits: what the rest of tfdist asks of it.
      exact, exact_steps: options, its own and of `StepOptions`, with which it gives the result of
        one device where others do not.
    """

    name: ClassVar[str]
    summary: ClassVar[str] = ""
    traits: ClassVar[Traits] = Traits()
    exact: ClassVar[Mapping[str, Any]] = {}
    exact_steps: ClassVar[Mapping[str, Any]] = {}

    @classmethod
    def find_type(cls) -> type:
        """Returns the class of what `build` returns, by which its traits are found."""
        return type(None)

    def build(self, *, alike: Mapping[str, str] | None = None) -> "tf.distribute.Strategy":
        """Builds the strategy.

        Args:
          alike: what all workers must have alike, name -> value.

        Raises:
          TfdistError: what the options ask for is not there.
          TrainingError: another task did not start in time.
        """
        raise NotImplementedError

    @classmethod
    def check_cluster(cls, config: ClusterConfig | None) -> None:
        """Checks that a cluster is sound, and one for this strategy.

        Raises:
          TfdistError: as of `check_task`; or it has a role too many, or lacks one.
        """
        if config is None:
            if cls.traits.has_servers:
                raise TfdistError(
                    f"`strategy={cls.name}` needs a cluster, but this is a single process. Start "
                    "one with python -m tfdist.launch --workers=2 --ps=1 -- followed by these "
                    "flags."
                )
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
        if cls.traits.has_servers:
            cls._check_servers(config)

    @classmethod
    def _check_servers(cls, config: ClusterConfig) -> None:
        for role, needed in (("chief", "exactly one"), ("worker", "at least one"), ("ps", "")):
            if not config.tasks.get(role):
                raise TfdistError(
                    f"`strategy={cls.name}` needs {needed or 'at least one'} {role}, but "
                    f"{config.source} describes none. Add one (python -m tfdist.launch "
                    "--workers=2 --ps=1 starts all three roles)."
                )


def check_task(config: ClusterConfig) -> None:
    """Checks that a cluster is sound, and that this process is to train in it.

    Raises:
      TfdistError: an unknown role, a malformed or repeated address, a task that is not in the
        cluster, or an evaluator's process.
    """
    check_cluster(config)
    if config.role == "evaluator":
        raise make_evaluator_error(config.source)


def devices_option() -> Any:
    """Returns the field `devices` of a strategy of one process."""
    return option(
        (),
        "devices to compute on; all accelerators by default",
        metavar="GPU:0,GPU:1",
        result=False,
    )


def worker_timeout_option() -> Any:
    """Returns the field `worker_timeout_s` of a strategy of several processes."""
    return option(
        600.0,
        "several processes: seconds to wait for all of them to start",
        result=False,
        minimum=0,
    )


def collective_option() -> Any:
    """Returns the field `collective` of a strategy of several workers."""
    return option(
        "auto",
        "several workers: how they sum their gradients or weights",
        choices=("auto", "ring", "nccl"),
        result=False,
        alike=True,
    )
