"""Divides an optimizer's state over the replicas: each updates some of the weights for all.

Every replica keeps a copy of the weights, but the state of the optimizer, such as Adam's moments,
exists only on the replica that updates a weight, or a piece of it. The updated pieces are then
copied to the other replicas.

Source: Rajbhandari et al. 2020 (arXiv:1910.02054), stage 1 of ZeRO.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfdist.errors import TfdistError
from tfdist.internals import PerReplica, TFOptimizer, UpdateContext
from tfdist.placement.optimizer.cutting import Piece, Weight, cut_weights
from tfdist.placement.shards.elementwise import updates_elements
from tfdist.placement.stand_in import StandIn
from tfdist.placement.variables import call_outside_scopes, group_slots
from tfdist.replacing import find_function, replaced

Gather = Callable[[np.ndarray], np.ndarray]
"""Returns the elements of all workers, one worker after another; all of them must call it."""


class CutVariable(StandIn):
    """A variable of an optimizer whose pieces are on the replicas that use them.

    With several workers, all of them must read and assign it together.

    Args:
      parts: replica -> the variable of its piece, for the replicas of this process.
    """

    def __init__(
        self,
        shape: Sequence[int],
        pieces: Sequence[Piece],
        parts: Mapping[int, tf.Variable],
        *,
        dtype: tf.DType,
        name: str,
        gather: Gather | None,
    ):
        self.shape, self.dtype, self.name = tf.TensorShape(shape), dtype, name
        self.parts = dict(parts)
        self._pieces, self._gather = list(pieces), gather

    def numpy(self) -> np.ndarray:
        own = [np.zeros([0], self.dtype.as_numpy_dtype)]
        own += [part.numpy().reshape(-1) for part in self.parts.values()]
        elements = np.concatenate(own)
        return (self._gather(elements) if self._gather else elements).reshape(self.shape)

    def read_value(self) -> tf.Tensor:
        if tf.executing_eagerly():
            return tf.constant(self.numpy())
        if self._gather:
            raise TfdistError(
                f"Cannot read {self.name} within a step, because `shard_optimizer` divides it over "
                "the workers. Leave out `shard_optimizer`."
            )
        flat = [tf.reshape(part, [-1]) for part in self.parts.values()]
        return tf.reshape(tf.concat(flat, 0), self.shape)

    def _update(
        self, method: str, value: tf.Tensor | tf.IndexedSlices, options: Mapping[str, Any]
    ) -> None:
        value = tf.convert_to_tensor(value, self.dtype)
        for piece in self._pieces:
            part = self.parts.get(piece.replica)
            if part is not None:
                own = tf.reshape(piece.take(value), part.shape)
                getattr(part, method)(own, **options)


class WeightPiece(StandIn):
    """A piece of a weight, which an optimizer updates in place of the weight's variable."""

    def __init__(self, value: tf.Tensor, weight: tf.Variable):
        self._value = value
        self.dtype, self.shape, self.name = value.dtype, value.shape, weight.name
        self._unique_id = weight._unique_id  # optimizers find the state of a weight by this

    def read_value(self) -> tf.Tensor:
        return self._value

    def scatter_add(self, slices: tf.IndexedSlices, **_: Any) -> None:
        """Adds to some rows."""
        self._scatter(tf.tensor_scatter_nd_add, slices)

    def scatter_sub(self, slices: tf.IndexedSlices, **_: Any) -> None:
        """Subtracts from some rows."""
        self._scatter(tf.tensor_scatter_nd_sub, slices)

    def scatter_update(self, slices: tf.IndexedSlices, **_: Any) -> None:
        """Sets some rows."""
        self._scatter(tf.tensor_scatter_nd_update, slices)

    def _update(
        self, method: str, value: tf.Tensor | tf.IndexedSlices, options: Mapping[str, Any]
    ) -> None:
        value = tf.convert_to_tensor(value, self.dtype)
        if method != "assign":
            value = self._value + value if method == "assign_add" else self._value - value
        self._value = tf.ensure_shape(value, self.shape)

    def _scatter(self, function: Callable[..., tf.Tensor], slices: tf.IndexedSlices) -> None:
        self.assign(function(self._value, slices.indices[:, None], slices.values))


class _Share(NamedTuple):
    """The pieces of a weight, and the optimizers' variables that belong to it."""

    pieces: list[Piece]
    slots: list[keras.Variable]

    @property
    def is_whole(self) -> bool:
        return len(self.pieces) == 1


class OptimizerShards:
    """The replicas that update a model's weights. All workers must create it.

    Raises:
      TfdistError: an optimizer has a state that belongs to no weight, or that all replicas update.
    """

    def __init__(
        self,
        variables: Sequence[keras.Variable],
        optimizers: Sequence[Any],
        strategy: tf.distribute.Strategy,
        *,
        worker: int = 0,
        gather: Gather | None = None,
    ):
        self._strategy, self._gather = strategy, gather
        self._first = worker * len(strategy.extended.worker_devices)
        self._shares: dict[str, _Share] = {}
        self._updated: dict[str, tuple[Any, dict[int, tf.Tensor]]] = {}
        slots = group_slots(variables, optimizers)
        _check(optimizers, [slot for found in slots.values() for slot in found])
        whole = [o for o in optimizers if not updates_elements(o)]
        kept = {id(slot) for optimizer in whole for slot in optimizer.variables}
        weights = [
            Weight(
                tuple(variable.shape),
                tf.as_dtype(variable.dtype).size,
                all(s.shape == variable.shape and id(s) not in kept for s in slots[id(variable)]),
            )
            for variable in variables
        ]
        cut = cut_weights(weights, strategy.num_replicas_in_sync)
        for variable, pieces in zip(variables, cut, strict=True):
            share = _Share(pieces, slots[id(variable)])
            self._shares[variable.value._unique_id] = share
            for slot in share.slots:
                self._cut(slot, pieces, self._list_copies(variable.value))

    def building(self) -> contextlib.AbstractContextManager[None]:
        """Changes nothing: the state is divided once the optimizer has it; see `UnitShards`."""
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def intercept(self) -> Iterator[None]:
        """Makes one replica update each piece of a weight, while a step is traced."""
        kind = type(self._strategy.extended)
        original = find_function(kind, "update")
        step = find_function(TFOptimizer, "_distributed_tf_update_step")
        is_optimizing = False  # otherwise, it assigns a value, such as that of a constraint

        def update(
            extended: tf.distribute.StrategyExtended,
            var: tf.Variable,
            fn: Callable[..., Any],
            args: Sequence[object] = (),
            kwargs: dict[str, Any] | None = None,
            group: bool = True,
        ) -> Any:
            share = self._shares.get(getattr(var, "_unique_id", ""))
            if share is None or not is_optimizing:
                return original(extended, var, fn, args, kwargs, group)
            values = self._updated.setdefault(var._unique_id, (var, {}))[1]
            here = self._list_copies(var)
            for piece in share.pieces:
                if piece.replica in here:
                    given = (args, kwargs or {})
                    values[piece.replica] = self._update(share, piece, var, fn, given)
            return None

        def update_step(optimizer: keras.optimizers.Optimizer, *args: Any, **kwargs: Any) -> None:
            nonlocal is_optimizing
            _check_parts(optimizer)
            is_optimizing = True
            step(optimizer, *args, **kwargs)
            is_optimizing = False
            self._copy_pieces()

        with (
            replaced(kind, "update", update),
            replaced(TFOptimizer, "_distributed_tf_update_step", update_step),
        ):
            yield

    def summarize(self) -> dict[str, Any]:
        """Returns the entry of a run's summary: the bytes of the optimizer's state by replica."""
        num_bytes = [0] * self._strategy.num_replicas_in_sync
        for share in self._shares.values():
            for slot in share.slots:
                sizes = {piece.replica: math.prod(piece.shape) for piece in share.pieces}
                if share.is_whole:
                    sizes = dict.fromkeys(sizes, math.prod(slot.shape))
                for replica, size in sizes.items():
                    num_bytes[replica] += size * tf.as_dtype(slot.dtype).size
        return {"optimizer_bytes": num_bytes}

    def _list_copies(self, variable: tf.Variable) -> dict[int, Any]:
        """Returns replica -> its copy of a variable, for the replicas of this process."""
        return dict(enumerate(self._strategy.experimental_local_results(variable), self._first))

    def _cut(self, slot: keras.Variable, pieces: list[Piece], copies: Mapping[int, Any]) -> None:
        """Replaces a variable with a copy on each replica by its pieces."""
        whole = tf.constant(slot.numpy())

        def create() -> dict[int, tf.Variable]:
            parts = {}
            for piece in pieces:
                if piece.replica in copies:
                    value = whole if len(pieces) == 1 else piece.take(whole)
                    with tf.device(copies[piece.replica].device):
                        parts[piece.replica] = tf.Variable(value, trainable=False, name=slot.name)
            return parts

        slot._value = CutVariable(
            slot.shape,
            pieces,
            call_outside_scopes(create),
            dtype=whole.dtype,
            name=slot.path,
            gather=self._gather,
        )

    def _update(
        self,
        share: _Share,
        piece: Piece,
        variable: tf.Variable,
        function: Callable[..., Any],
        arguments: Any,
    ) -> tf.Tensor:
        """Updates a piece on its replica, and returns its new elements."""
        replica = piece.replica
        copy = self._list_copies(variable)[replica]
        with contextlib.ExitStack() as stack:
            stack.enter_context(tf.device(copy.device))
            stack.enter_context(UpdateContext(replica - self._first))
            for slot in share.slots:
                stack.enter_context(replaced(slot, "_value", slot._value.parts[replica]))
            target = copy if share.is_whole else WeightPiece(piece.take(copy), variable)
            select = functools.partial(self._select, share, piece, copy.shape)
            given, named = tf.nest.map_structure(select, arguments)
            function(target, *given, **named)
            return target.read_value()

    def _select(
        self,
        share: _Share,
        piece: Piece,
        shape: tf.TensorShape,
        value: tf.Tensor | tf.IndexedSlices,
    ) -> Any:
        """Returns what an update of a piece needs of an argument: its part of a gradient."""
        found = self._list_copies(value)
        own = found[piece.replica] if len(found) > 1 else next(iter(found.values()))
        known = getattr(own, "shape", None)  # reductions may have lost some sizes
        is_like_weight = known is not None and known.rank != 0 and shape.is_compatible_with(known)
        return piece.take(own) if is_like_weight and not share.is_whole else own

    def _copy_pieces(self) -> None:
        """Copies the pieces that were updated to all replicas."""
        updated, self._updated = self._updated, {}
        if self._gather:
            self._exchange(updated)
        for unique_id, (variable, values) in updated.items():
            share = self._shares[unique_id]
            for replica, copy in self._list_copies(variable).items():
                if share.is_whole and replica == share.pieces[0].replica:
                    continue
                with tf.device(copy.device):
                    flat = [tf.reshape(values[piece.replica], [-1]) for piece in share.pieces]
                    copy.assign(tf.reshape(tf.concat(flat, 0), copy.shape))

    def _exchange(self, updated: Mapping[str, tuple[Any, dict[int, tf.Tensor]]]) -> None:
        """Adds the values of other workers' pieces, which are gathered as one vector."""
        dtypes = dict.fromkeys(variable.dtype for variable, _ in updated.values())
        for dtype in dtypes:
            found = [(key, v) for key, (var, v) in updated.items() if var.dtype == dtype]
            pieces = [(p, values) for key, values in found for p in self._shares[key].pieces]
            pieces.sort(key=lambda pair: pair[0].replica)
            packs = []
            for replica, device in enumerate(self._strategy.extended.worker_devices, self._first):
                with tf.device(device):
                    own = [tf.reshape(v[replica], [-1]) for p, v in pieces if p.replica == replica]
                    packs.append(tf.concat([tf.zeros([0], dtype), *own], 0))
            value = packs[0] if len(packs) == 1 else PerReplica(packs)
            gathered = tf.split(
                self._strategy.gather(value, 0), [p.stop - p.start for p, _ in pieces]
            )
            for (piece, values), elements in zip(pieces, gathered, strict=True):
                values.setdefault(piece.replica, elements)


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
        if getattr(optimizer, "gradient_accumulation_steps", None):
            raise TfdistError(
                f"`shard_optimizer` does not support {name} with gradient_accumulation_steps: its "
                "state is updated under a condition. Leave one of them out."
            )
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            raise TfdistError(
                "`shard_optimizer` does not support a loss scale. Leave it out, or use "
                "`precision=mixed_bfloat16`."
            )


def _check_parts(optimizer: keras.optimizers.Optimizer) -> None:
    """Checks that an optimizer's state is divided: it is not if the first step creates it."""
    if any(v.shape.rank and not isinstance(v._value, CutVariable) for v in optimizer.variables):
        raise TfdistError(
            "`shard_optimizer` divides states before the first step, but "
            f"{type(optimizer).__name__} had none then. Call its `build` with the variables that "
            "it updates, or leave `shard_optimizer` out."
        )
