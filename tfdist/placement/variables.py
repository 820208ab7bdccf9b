"""Puts a model's variables on the devices of its stages."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent import futures
from typing import Any

import keras
import tensorflow as tf

from tfdist.devices import shorten
from tfdist.placement.stages import Stage
from tfdist.replacing import replaced


def place_variables(
    stages: Sequence[Stage],
    strategy: tf.distribute.Strategy,
    groups: Mapping[str, Sequence[str]],
    *,
    slots: Sequence[keras.Variable],
) -> None:
    """Moves the variables of each stage to its device.

    Optimizers create their variables where those of the model are; only those of an optimizer that
    is built already are moved, too. A variable of two stages stays with the first. All workers must
    call this.

    Args:
      stages: the stages.
      strategy: the strategy in whose scope the variables were created.
      groups: the first device of each replica -> all devices of the replica.
      slots: the variables of the optimizers that are built.
    """

    def place() -> None:
        placed: set[int] = set()
        for stage in stages:
            devices = [group[stage.device] for group in groups.values()]
            for variable in stage.variables:
                if id(variable) not in placed:
                    placed.add(id(variable))
                    prefix = f"{variable.path.replace('/', '_')}_"  # as Keras names them
                    for moved in (variable, *(s for s in slots if s.name.startswith(prefix))):
                        _move(moved, strategy, devices)

    # In a thread of its own, no scope of the strategy is open.
    with futures.ThreadPoolExecutor(1) as thread:
        thread.submit(place).result()


def _move(
    variable: keras.Variable, strategy: tf.distribute.Strategy, devices: Sequence[str]
) -> None:
    """Moves a variable to other devices, one for each of the strategy's local replicas."""
    old = variable.value
    copies = strategy.experimental_local_results(old)
    if [shorten(copy.device) for copy in copies] == list(devices):
        return
    left: Iterator[str] = iter(devices)

    def create(next_creator: Any, **arguments: Any) -> Any:
        with tf.device(f"/device:{next(left)}"):
            return next_creator(**arguments)

    # The strategy calls the creators of outer scopes once for each of its replicas.
    with tf.variable_creator_scope(create), strategy.scope():
        new = tf.Variable(
            tf.convert_to_tensor(copies[0]),
            trainable=old.trainable,
            name=old.name.partition(":")[0],
            dtype=old.dtype,
            aggregation=old.aggregation,
        )
    # Optimizers find a variable by this.
    for copy, former in zip(strategy.experimental_local_results(new), copies, strict=True):
        copy._unique_id = former._unique_id
    variable._value = new


@contextlib.contextmanager
def updating_in_place(strategy: tf.distribute.Strategy) -> Iterator[None]:
    """Makes optimizers update each variable on the variable's device, while a step is traced.

    OneDeviceStrategy would fetch all of them to its own device, and send them back.
    """
    kind = type(strategy.extended)
    original = kind.update

    def update(extended: Any, var: Any, fn: Any, *args: Any, **kwargs: Any) -> Any:
        def run(variable: Any, *given: Any, **named: Any) -> Any:
            with tf.device(variable.device):
                return fn(variable, *given, **named)

        return original(extended, var, run, *args, **kwargs)

    with replaced(kind, "update", update):
        yield
