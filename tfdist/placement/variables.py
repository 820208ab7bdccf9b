"""Puts a model's variables on the devices of its stages."""

import collections
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from typing import Any, TypeVar

import keras
import tensorflow as tf

from tfdist.devices import shorten
from tfdist.placement.stages.cutting import Stage
from tfdist.replacing import find_function, replaced

Result = TypeVar("Result")


def place_variables(
    stages: Sequence[Stage],
    strategy: tf.distribute.Strategy,
    groups: Mapping[str, Sequence[str]],
    *,
    optimizers: Sequence[Any],
) -> None:
    """Moves the variables of each stage to its device.

    Optimizers create their variables where those of the model are; only those of an optimizer that
    is built already are moved, too. A variable of two stages stays with the first. All workers must
    call this.
    """

    devices: dict[int, list[str]] = {}
    variables: dict[int, keras.Variable] = {}
    for stage in stages:
        for variable in stage.variables:
            variables.setdefault(id(variable), variable)
            devices.setdefault(id(variable), [group[stage.device] for group in groups.values()])
    slots = group_slots(list(variables.values()), optimizers)

    def place() -> None:
        for key, variable in variables.items():
            for moved in (variable, *slots[key]):
                _move(moved, strategy, devices[key])

    call_outside_scopes(place)


def group_slots(
    variables: Sequence[keras.Variable], optimizers: Sequence[Any]
) -> dict[int, list[keras.Variable]]:
    """Returns identity of a weight -> the optimizers' variables that belong to it.

    Keras says in their names which weight that is, and creates them in the order of the weights.

    Args:
      variables: the weights, some of whose paths may be the same or begin alike.
    """
    found: dict[int, list[keras.Variable]] = {id(variable): [] for variable in variables}
    for optimizer in optimizers:
        updated = [v for v in getattr(optimizer, "_trainable_variables", ()) if id(v) in found]
        namesakes: dict[str, list[keras.Variable]] = collections.defaultdict(list)
        for variable in updated or variables:
            namesakes[f"{variable.path.replace('/', '_')}_"].append(variable)
        counts: collections.Counter[str] = collections.Counter()
        for slot in optimizer.variables:
            fitting = [prefix for prefix in namesakes if slot.name.startswith(prefix)]
            if fitting:
                owners = namesakes[max(fitting, key=len)]
                found[id(owners[counts[slot.name] % len(owners)])].append(slot)
                counts[slot.name] += 1
    return found


def call_outside_scopes(function: Callable[[], Result]) -> Result:
    """Calls a function in a thread of its own, in which no scope of a strategy is open."""
    with futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(function).result()


def _move(
    variable: keras.Variable, strategy: tf.distribute.Strategy, devices: Sequence[str]
) -> None:
    """Moves a variable to other devices, one for each of the strategy's local replicas."""
    old = variable.value
    copies = strategy.experimental_local_results(old)
    if [shorten(copy.device) for copy in copies] == list(devices):
        return
    variable._value = create_copies(tf.convert_to_tensor(copies[0]), old, strategy, devices)


def create_copies(
    value: tf.Tensor, old: tf.Variable, strategy: tf.distribute.Strategy, devices: Sequence[str]
) -> Any:
    """Returns a variable of a strategy that takes the place of another one, on other devices."""
    left: Iterator[str] = iter(devices)

    def create(next_creator: Callable[..., tf.Variable], **arguments: Any) -> Any:
        with tf.device(f"/device:{next(left)}"):
            return next_creator(**arguments)

    # The strategy calls the creators of outer scopes once for each of its replicas.
    with tf.variable_creator_scope(create), strategy.scope():
        new = tf.Variable(
            value,
            trainable=old.trainable,
            name=old.name.partition(":")[0],
            dtype=old.dtype,
            aggregation=old.aggregation,
        )
    # Optimizers find a variable by this.
    locals_of = strategy.experimental_local_results
    for copy, former in zip(locals_of(new), locals_of(old), strict=True):
        copy._unique_id = former._unique_id
    return new


@contextlib.contextmanager
def updating_in_place(strategy: tf.distribute.Strategy) -> Iterator[None]:
    """Makes optimizers update each variable on the variable's device, while a step is traced.

    OneDeviceStrategy would fetch all of them to its own device, and send them back.
    """
    kind = type(strategy.extended)
    original = find_function(kind, "update")

    def update(
        extended: tf.distribute.StrategyExtended,
        var: tf.Variable,
        fn: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        def run(variable: tf.Variable, *given: Any, **named: Any) -> Any:
            with tf.device(variable.device):
                return fn(variable, *given, **named)

        return original(extended, var, run, *args, **kwargs)

    with replaced(kind, "update", update):
        yield
