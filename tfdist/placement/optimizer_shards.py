"""Divides an optimizer's state over the replicas: each updates some of the weights for all.

Every replica keeps a copy of the weights, but the state of the optimizer, such as Adam's moments,
exists only on the replica that updates a weight. The updated weight is then copied to the others.

Source: Rajbhandari et al. 2020 (arXiv:1910.02054), stage 1 of ZeRO.
"""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.errors import TfdistError
from tfdist.internals import UpdateContext
from tfdist.placement.costs import count_bytes
from tfdist.placement.variables import call_outside_scopes, group_slots
from tfdist.replacing import replaced


class OptimizerShards:
    """The replicas that update a model's weights.

    Args:
      variables: the trainable variables.
      optimizers: the optimizers, which are built.
      strategy: a `MirroredStrategy`.

    Raises:
      TfdistError: an optimizer has a state that belongs to no weight, or that all replicas update.
    """

    def __init__(
        self,
        variables: Sequence[keras.Variable],
        optimizers: Sequence[Any],
        strategy: tf.distribute.Strategy,
    ):
        self._strategy = strategy
        self._owners: dict[str, int] = {}
        slots = group_slots(variables, optimizers)
        _check(optimizers, [slot for found in slots.values() for slot in found])
        loads = [0] * strategy.num_replicas_in_sync
        sizes = {id(v): count_bytes(v.shape, v.dtype) for v in variables}
        for variable in sorted(variables, key=lambda v: sizes[id(v)], reverse=True):
            owner = loads.index(min(loads))
            loads[owner] += sizes[id(variable)]
            self._owners[variable.value._unique_id] = owner
            device = strategy.experimental_local_results(variable.value)[owner].device
            for slot in slots[variable.path]:
                _keep_on(device, slot, strategy)

    @contextlib.contextmanager
    def intercept(self) -> Iterator[None]:
        """Makes one replica update each weight, while a step is traced."""
        kind = type(self._strategy.extended)
        original = kind.update

        def update(
            extended: Any, var: Any, fn: Any, args: Any = (), kwargs: Any = None, group: bool = True
        ) -> Any:
            owner = self._owners.get(getattr(var, "_unique_id", ""))
            if owner is None:
                return original(extended, var, fn, args, kwargs, group)
            copies = self._strategy.experimental_local_results(var)
            given, named = tf.nest.map_structure(
                functools.partial(self._select, owner), (tuple(args), kwargs or {})
            )
            own = copies[owner]
            with tf.device(own.device), UpdateContext(owner):
                fn(own, *given, **named)
                value = own.read_value()
            for copy in copies:
                if copy is not own:
                    with tf.device(copy.device):
                        copy.assign(value)
            return None

        with replaced(kind, "update", update):
            yield

    def _select(self, replica: int, value: Any) -> Any:
        """Returns a replica's part of a value; the value itself if all share it."""
        parts = self._strategy.experimental_local_results(value)
        return parts[replica] if len(parts) > 1 else parts[0]


def _check(optimizers: Sequence[Any], slots: Sequence[keras.Variable]) -> None:
    known = {id(slot) for slot in slots}
    for optimizer in optimizers:
        name = type(optimizer).__name__
        others = [v for v in optimizer.variables if id(v) not in known and v.shape.rank]
        if others:
            raise TfdistError(
                f"`shard_optimizer` does not support {name}: its state {others[0].path} belongs to "
                "no weight. Leave it out, or use another optimizer."
            )
        if getattr(optimizer, "use_ema", False):
            raise TfdistError(
                f"`shard_optimizer` does not support {name} with use_ema: every replica updates "
                "the averages. Leave one of them out."
            )
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            raise TfdistError(
                "`shard_optimizer` does not support a loss scale. Leave it out, or use "
                "`precision=mixed_bfloat16`."
            )


def _keep_on(device: str, slot: keras.Variable, strategy: tf.distribute.Strategy) -> None:
    """Replaces a variable with a copy on each replica by one on a device."""
    old = strategy.experimental_local_results(slot.value)[0]

    def create() -> tf.Variable:
        with tf.device(device):
            return tf.Variable(tf.convert_to_tensor(old), trainable=False, name=slot.name)

    slot._value = call_outside_scopes(create)
