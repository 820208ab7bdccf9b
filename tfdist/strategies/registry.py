"""The table of strategies, what `auto` chooses, and the options and traits of strategy objects.

To add a strategy, write a file with a subclass of `Strategy` in `tfdist.strategies.builtin`. A
strategy in another package is named `package.module:Class`, or is an entry point of the group
`tfdist.strategies`.
"""

import dataclasses
import importlib.metadata
import pkgutil
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from tfdist import cluster
from tfdist.cluster import ClusterConfig
from tfdist.errors import TfdistError, make_unknown_name_error
from tfdist.imports import find_subclasses, import_named
from tfdist.strategies import builtin
from tfdist.strategies.base import ReplicaStrategy, Strategy, Traits, check_task
from tfdist.strategies.builtin.mirrored import Mirrored
from tfdist.strategies.builtin.multi_worker_mirrored import MultiWorkerMirrored
from tfdist.strategies.builtin.one_device import OneDevice
from tfdist.strategies.builtin.parameter_server import ParameterServer

if TYPE_CHECKING:
    import tensorflow as tf

AUTO = "auto"
_ENTRY_POINTS = "tfdist.strategies"


_FILES = pkgutil.iter_modules(builtin.__path__, prefix=f"{builtin.__name__}.")
STRATEGIES: dict[str, type[Strategy]] = {
    found.name: found for found in find_subclasses((file.name for file in _FILES), Strategy)
}
"""Value of `--strategy` -> class."""

# The options that a strategy object was built from.
_built: "weakref.WeakKeyDictionary[Any, Strategy]" = weakref.WeakKeyDictionary()


def list_names() -> tuple[str, ...]:
    """Returns the names of all strategies, with those of other packages last."""
    others = importlib.metadata.entry_points(group=_ENTRY_POINTS).names
    return (*STRATEGIES, *sorted(others - STRATEGIES.keys()))


def find_strategy(name: str) -> type[Strategy]:
    """Returns the class of a strategy.

    Args:
      name: a key of `STRATEGIES`, an entry point's name, or `package.module:NAME`, a subclass of
        `Strategy` or a function that returns a `tf.distribute.Strategy` of one process.
    """
    if name in STRATEGIES:
        return STRATEGIES[name]
    if ":" not in name:
        found = importlib.metadata.entry_points(group=_ENTRY_POINTS, name=name)
        if not found:
            raise make_unknown_name_error("`strategy`", name, [AUTO, *list_names()])
        return _adopt(name, next(iter(found)).load())
    return _adopt(name, import_named("strategy", name))


def make_strategy(name: str, **options: Any) -> "tf.distribute.Strategy":
    """Builds a strategy by name.

    Args:
      name: see `find_strategy`; or `auto`: in a cluster, the strategy that its roles are for;
        otherwise mirrored if there are two or more accelerators, or else one device.
      **options: the strategy's options; for several workers also `must_match`, name -> value on
        which all of them must agree.

    Raises:
      TfdistError: the name is unknown, or the strategy does not take an option.
    """
    must_match = options.pop("must_match", None)
    chosen = find_strategy(choose_strategy() if name == AUTO else name)
    taken = {item.name for item in dataclasses.fields(chosen)}
    for option in options.keys() - taken:
        raise make_not_taken_error(chosen.name, option, options[option])
    return build(chosen(**options), must_match=must_match)


def build(strategy: Strategy, *, must_match: Mapping[str, str] | None = None) -> Any:
    """Builds a strategy from its options, which `find_options` can then return."""
    strategy = strategy.resolve()
    built = strategy.build(must_match=must_match)
    _built[built] = strategy
    return built


def find_options(strategy: "tf.distribute.Strategy") -> Strategy | None:
    """Returns the options from which `build` built a strategy; None if the user built it."""
    return _built.get(strategy)


def find_traits(strategy: "tf.distribute.Strategy") -> Traits:
    """Returns the traits of a strategy, whoever built it."""
    options = find_options(strategy)
    if options is not None:
        return options.traits
    by_type = {entry.find_type(): entry.traits for entry in STRATEGIES.values()}
    return next((by_type[kind] for kind in type(strategy).__mro__ if kind in by_type), Traits())


def make_not_taken_error(name: str, option: str, value: object) -> TfdistError:
    """Returns the error for an option that a strategy does not take."""
    takers = [
        other.name
        for other in STRATEGIES.values()
        if option in {item.name for item in dataclasses.fields(other)}
    ]
    advice = f", or use `strategy={' or '.join(takers)}`" if takers else ""
    return TfdistError(
        f"`strategy={name}` does not take `{option}` (given: {value}). Leave it out{advice}."
    )


def choose_strategy() -> str:
    """Returns the name that `auto` stands for: in TF_CONFIG's cluster, or on this machine."""
    return choose_cluster_strategy(cluster.find_tf_config()) or choose_local_strategy()


def choose_cluster_strategy(config: ClusterConfig | None) -> str | None:
    """Returns the strategy that `auto` stands for in a cluster, the same in each of its tasks.

    Returns:
      The strategy's name; None for a process that trains by itself, where the devices decide.

    >>> choose_cluster_strategy(cluster.parse_hosts("a:1,b:1", "worker:0"))
    'multi_worker_mirrored'
    """
    if config is None:
        return None
    if config.num_ps:
        return ParameterServer.name
    return MultiWorkerMirrored.name if config.num_workers > 1 else None


def to_strategy(
    given: Any, *, of_model: Any = None, logical_replicas: int = 0
) -> "tf.distribute.Strategy":
    """Returns the strategy that a name, options or a strategy object stands for.

    Args:
      given: one of these; None for the strategy of the model or, without a model, of the current
        scope, which is one device outside of all scopes.
      of_model: a model; anything else is ignored.
      logical_replicas: the number of replicas, if it is not that of the devices.

    Raises:
      TfdistError: `given` is something else, or has no logical replicas.
    """
    import keras
    import tensorflow as tf

    from tfdist.strategies.collectives import separate_collectives

    if logical_replicas:
        given = _add_logical_replicas(given or OneDevice(), logical_replicas)
    if isinstance(given, str):
        return make_strategy(given)
    if isinstance(given, Strategy):
        return build(given)
    if given is not None and not isinstance(given, tf.distribute.Strategy):
        raise TfdistError(
            f'`strategy` is a {type(given).__name__}. Give a name such as "mirrored", a '
            "tf.distribute.Strategy, or options of tfdist.strategies."
        )
    if given is None and isinstance(of_model, keras.Model):
        given = of_model.distribute_strategy
    strategy = given or tf.distribute.get_strategy()
    separate_collectives(strategy)
    return strategy


def _add_logical_replicas(given: Any, count: int) -> Strategy:
    """Returns the options of a strategy with logical replicas."""
    if isinstance(given, str):
        if given == AUTO:
            in_cluster = choose_cluster_strategy(cluster.find_tf_config())
            given = in_cluster or choose_local_strategy(has_logical_replicas=True)
        given = find_strategy(given)()
    if not isinstance(given, Strategy):
        raise TfdistError(
            f"`logical_replicas={count}` needs the name or the options of a strategy, and not a "
            f"{type(given).__name__}, whose devices are chosen."
        )
    if not isinstance(given, ReplicaStrategy):
        raise make_not_taken_error(given.name, "logical_replicas", count)
    return dataclasses.replace(given, logical_replicas=count)


def choose_local_strategy(*, has_logical_replicas: bool = False) -> str:
    """Returns what `auto` means on one machine; logical replicas leave its devices unlisted."""
    if has_logical_replicas:
        return Mirrored.name
    from tfdist.devices import ACCELERATORS, list_devices

    accelerators = [name for name in list_devices() if name.partition(":")[0] in ACCELERATORS]
    return Mirrored.name if len(accelerators) > 1 else OneDevice.name


def validate_cluster(config: ClusterConfig | None, strategy: str) -> None:
    """Checks that a cluster is valid and suits a strategy.

    Args:
      strategy: the strategy's name, or `auto`; an empty name checks only the cluster.

    Raises:
      TfdistError: the cluster is invalid, the strategy requires or forbids a role, or this process
        is an evaluator, which only an empty name allows.
    """
    if strategy not in ("", AUTO):
        find_strategy(strategy).check_cluster(config)
    elif config is not None:
        (check_task if strategy else cluster.check_cluster)(config)


def _adopt(name: str, found: Any) -> type[Strategy]:
    """Returns the strategy class for an object of another package, under the given name."""
    if isinstance(found, type) and issubclass(found, Strategy):
        return found
    if not callable(found):
        raise TfdistError(
            f"`strategy={name}` is a {type(found).__name__}, neither a tfdist.strategies.Strategy "
            "nor a function that returns a tf.distribute.Strategy."
        )
    return _wrap(name, found)


def _wrap(given_name: str, factory: Callable[[], Any]) -> type[Strategy]:
    @dataclass(frozen=True, kw_only=True)
    class Given(Strategy):
        name: ClassVar[str] = given_name
        summary: ClassVar[str] = "of another package"

        def build(self, *, must_match: Mapping[str, str] | None = None) -> Any:
            return factory()

    return Given
