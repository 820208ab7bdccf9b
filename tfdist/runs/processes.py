"""What every command does before it trains: joins the cluster, builds strategy and model."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

import keras
import tensorflow as tf

import tfdist
from tfdist import cluster, devices
from tfdist.errors import TfdistError
from tfdist.placement.groups import find_groups
from tfdist.placement.options import NONE, Placement, PlacementOptions
from tfdist.runs.options import TrainOptions
from tfdist.strategies.base import Strategy
from tfdist.strategies.options import StrategyOptions
from tfdist.strategies.registry import (
    AUTO,
    build,
    choose_cluster_strategy,
    choose_local_strategy,
    find_strategy,
    validate_cluster,
)
from tfdist.tasks.base import Task
from tfdist.training.checkpoint.initial_weights import InitialWeights
from tfdist.training.fit.averaging import average_statistics
from tfdist.training.optimizers import make_optimizer
from tfdist.training.options import TrainingOptions
from tfdist.training.workers.communication import Workers


def start_process(options: TrainOptions) -> tuple[TrainOptions, cluster.ClusterConfig | None]:
    """Joins the cluster, configures this process and resolves what the options leave open.

    Every process that trains with the options of `tfdist.train` begins with it.

    Raises:
      TfdistError: the options do not suit one another, the machine or the cluster.
    """
    options = resolve_options(options)
    config = join_cluster(options)
    configure_process(options)
    return resolve_strategy(options, config), config


class HasStrategy(Protocol):
    """The options of a command that has a group for the strategy."""

    @property
    def strategy(self) -> StrategyOptions:
        """The strategy's options."""

    @property
    def placement(self) -> PlacementOptions:
        """How the model of a replica is divided."""

    def select_alike(self) -> dict[str, Any]:
        """See `CommandOptions`."""


Options = TypeVar("Options", bound=HasStrategy)


def join_cluster(options: HasStrategy) -> cluster.ClusterConfig | None:
    """Finds the cluster that this process belongs to and sets TF_CONFIG for TensorFlow.

    Raises:
      TfdistError: the cluster is invalid, or does not suit the strategy.
    """
    name = options.strategy.strategy
    has_peers = name != AUTO and find_strategy(name).traits.has_workers
    config = cluster.resolve_cluster(has_servers=not has_peers)
    if name == AUTO:
        name = choose_cluster_strategy(config) or name
    validate_cluster(config, name)
    if config is not None:
        cluster.set_tf_config(config)
    return config


def resolve_strategy(options: Options, config: cluster.ClusterConfig | None) -> Options:
    """Returns the options with the strategy's name in place of `auto`, as the cluster says."""
    if options.strategy.strategy != AUTO:
        return options
    is_logical = bool(getattr(options.strategy, "logical_replicas", 0))
    name = choose_cluster_strategy(config) or choose_local_strategy(has_logical_replicas=is_logical)
    chosen = dataclasses.replace(options.strategy, strategy=name)
    return dataclasses.replace(options, strategy=chosen)  # type: ignore[type-var]


def build_strategy(options: HasStrategy) -> tf.distribute.Strategy:
    """Returns the strategy that the options name, over the devices that a placement leaves it."""
    must_match = list_must_match(options) if cluster.has_peers() else None
    strategy = build(_spread(options.strategy.select(), options.placement), must_match=must_match)
    placement = options.placement.select()
    if placement is not None:
        find_groups(strategy, placement.devices)
    return strategy


def describe_strategy(
    strategy: tf.distribute.Strategy, workers: Workers, placement: Placement | None
) -> str:
    """Returns the name of a strategy, and its workers, replicas and kinds of devices, as text."""
    # The class has another name than TensorFlow's documentation uses.
    name = type(strategy).__name__.replace("CollectiveAllReduce", "MultiWorkerMirrored")
    kinds = sorted({device.split(":")[0] for device in list_worker_devices(strategy)})
    among = f"{workers.count} workers, " if workers.count > 1 else ""
    placed = ""
    if placement is not None:
        count = len(next(iter(find_groups(strategy, placement.devices).values())))
        placed = f" with {count} devices each ({placement.name})"
    return f"{name} over {among}{workers.num_replicas} x {'/'.join(kinds)}{placed}"


def list_worker_devices(strategy: tf.distribute.Strategy) -> list[str]:
    """Returns the devices of a strategy's replicas in this process, such as `CPU:0`."""
    return [name.rpartition("device:")[2] for name in strategy.extended.worker_devices]


def _spread(chosen: Strategy, placement: PlacementOptions) -> Strategy:
    """Returns a strategy's options with as many replicas as the mesh has groups of devices."""
    if placement.placement == NONE:
        return chosen
    replicas = max(1, placement.parse_mesh()["data"])
    fields = {item.name for item in dataclasses.fields(chosen)}
    if "replicas_per_worker" in fields:
        return dataclasses.replace(chosen, replicas_per_worker=replicas)  # type: ignore[call-arg]
    if chosen.traits.is_single and replicas > 1:
        raise TfdistError(
            f"`mesh=data:{replicas}` needs a strategy with several replicas, and "
            f"`strategy={chosen.name}` has one. Use `strategy=mirrored`, or leave out data."
        )
    if chosen.traits.is_single or getattr(chosen, "devices", True):
        return chosen
    everything = devices.list_devices()
    if len(everything) % replicas:
        raise TfdistError(
            f"`mesh=data:{replicas}` does not divide {len(everything)} devices "
            f"({', '.join(everything)}). Name the replicas' first devices in `devices`."
        )
    step = len(everything) // replicas
    return dataclasses.replace(chosen, devices=everything[::step])  # type: ignore[call-arg]


def list_must_match(options: HasStrategy) -> dict[str, str]:
    """Returns name -> value on which all workers of a run must agree."""
    flags = {f"--{name}": str(value) for name, value in options.select_alike().items()}
    versions = {"tfdist": tfdist.__version__, "TensorFlow": tf.__version__}
    return {**flags, **versions, "Keras": keras.__version__}


def resolve_options(options: TrainOptions) -> TrainOptions:
    """Returns the options with everything resolved that depends on the machine."""
    precision = devices.choose_precision(options.training.precision)
    return dataclasses.replace(
        options, training=dataclasses.replace(options.training, precision=precision)
    )


def configure_process(options: TrainOptions) -> None:
    """Sets up devices, memory, precision and seeds; must run before anything else is made."""
    devices.configure_devices(options.strategy.virtual_devices)
    devices.configure_precision(options.training.precision)
    devices.configure_determinism(
        options.training.seed, deterministic=options.training.deterministic
    )


def make_build_model(
    task: Task,
    training: TrainingOptions,
    info: Mapping[str, Any],
    *,
    total_steps: int,
    initial: InitialWeights | None = None,
) -> Callable[[], keras.Model]:
    """Returns a function that builds and compiles a run's model, with initial weights if given."""

    def build_model() -> keras.Model:
        model = task.build_model(info, seed=training.seed)
        if initial is not None:
            initial.give_to(model)
        average_statistics(model, training)
        task.compile_model(model, make_optimizer(training, total_steps=total_steps), info)
        return model

    return build_model
