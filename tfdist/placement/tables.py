"""Divides the tables of `Embedding` layers by rows over parameter servers.

A worker looks up the rows of its batch, each on the server that has it, and differentiates by
these rows: the gradient of a table has one slice for each row that was looked up, as that of a
whole table has. The optimizer updates each part on its server.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.aliases import Nested
from tfdist.errors import TfdistError
from tfdist.placement.costs import count_bytes
from tfdist.placement.shards.divided import (
    DividedVariable,
    find_divided,
    join,
    split,
    updating_parts,
)
from tfdist.placement.shards.elementwise import updates_elements
from tfdist.placement.shards.rules import find_rule, look_up

_CHIEF = "/job:chief/replica:0/task:0/device:CPU:0"


@dataclass(frozen=True)
class Lookup:
    """Rows [..., units] that a step looked up."""

    variable: keras.Variable
    ids: tf.Tensor
    rows: tf.Tensor


def divide_tables(
    create: Callable[..., Any], *, min_bytes: int, num_servers: int
) -> Callable[..., Any]:
    """Returns a variable creator that divides tables, and what optimizers keep for them.

    No server ever has a whole table. The chief has it while it is created.

    Args:
      min_bytes: the size of the smallest table that is divided.
    """

    def create_table(next_creator: Callable[..., Any], **arguments: Any) -> Any:
        given = arguments.get("colocate_with")
        beside = given if isinstance(given, DividedVariable) else None
        if beside is None and arguments.get("name") != "embeddings":
            return create(next_creator, **arguments)
        value = arguments["initial_value"]
        with tf.device(_CHIEF):
            value = tf.convert_to_tensor(value() if callable(value) else value)
        if beside is not None and value.shape != beside.shape:
            return create(next_creator, **arguments | {"colocate_with": beside.parts[0]})
        if beside is None and not is_large(value):
            return create(next_creator, **arguments | {"initial_value": value})
        parts: list[Any] = []
        sizes = beside.sizes if beside else cut(value)
        for place, last in enumerate(itertools.accumulate(sizes)):
            with tf.device(_CHIEF):
                rows = value[last - sizes[place] : last]
            own = {"initial_value": rows, "name": f"{arguments['name']}_{place}"}
            own |= {"colocate_with": beside.parts[place]} if beside else {}
            parts.append(create(next_creator, **arguments | own))
            parts[-1]._unique_id = parts[0]._unique_id  # by which optimizers find a variable
        return DividedVariable(parts, axis=0)

    def is_large(value: tf.Tensor) -> bool:
        return value.shape.rank == 2 and count_bytes(value.shape, value.dtype.name) >= min_bytes

    def cut(value: tf.Tensor) -> list[int]:
        count = min(num_servers, value.shape[0])
        return [len(rows) for rows in np.array_split(range(value.shape[0]), count)]

    return create_table


class Tables:
    """The divided tables of a model.

    Args:
      min_bytes: as in `divide_tables`; 0 if no table is to be divided.

    Raises:
      TfdistError: there is no such table, or an optimizer cannot update it by parts.
    """

    def __init__(self, model: keras.Model, optimizers: Sequence[Any], *, min_bytes: int):
        self._model, self._optimizers = model, optimizers
        self.variables = [v for v in model.variables if find_divided(v)]
        if min_bytes and not self.variables:
            raise TfdistError(
                f"`shard_tables_bytes={min_bytes}` has nothing to divide: no Embedding that "
                f"{model.name!r} creates in the trainer's scope has a table of this size. Leave it "
                "out, or give the trainer a function that builds the model."
            )
        self._layers = {
            layer: layer.embeddings
            for layer in model._flatten_layers()
            if find_rule(layer, rows=True) and find_divided(layer.embeddings)
        }
        for optimizer in optimizers if self.variables else ():
            if getattr(optimizer, "use_ema", False):
                raise TfdistError(
                    "`shard_tables_bytes` cannot be combined with an optimizer with `use_ema`, "
                    "which reads whole tables. Leave one of them out."
                )
            if not updates_elements(optimizer):
                raise TfdistError(
                    f"`shard_tables_bytes` does not support {type(optimizer).__name__}: it does "
                    "not update each element of a weight from this element alone, so a part of a "
                    "table is not enough. Use Adam, SGD or the like, or leave it out."
                )

    @contextlib.contextmanager
    def looking_up(
        self, *, tape: tf.GradientTape | None = None, after: Sequence[tf.Tensor] = ()
    ) -> Iterator[list[Lookup]]:
        """Makes layers look up only the rows that they need, while a worker's step is traced.

        Args:
          tape: watches the rows.
          after: what is computed before a row is read.
        """
        found: list[Lookup] = []
        graph = tf.compat.v1.get_default_graph()

        def call(layer: keras.layers.Embedding, inputs: Nested[tf.Tensor]) -> Any:
            is_inside = tf.compat.v1.get_default_graph() is not graph  # such as in a loop
            if is_inside or not isinstance(inputs, tf.Tensor):
                return type(layer).call(layer, inputs)
            variable = self._layers[layer]
            divided = find_divided(variable)
            assert divided is not None
            ids = inputs if inputs.dtype in (tf.int32, tf.int64) else tf.cast(inputs, tf.int32)
            ids = tf.where(ids < 0, ids + variable.shape[0], ids)
            with tf.control_dependencies([*after, _check_ids(ids, variable.shape[0])]):
                unique, places = tf.unique(tf.reshape(ids, [-1]))
            rows = look_up(unique, divided.sizes, functools.partial(_read_rows, divided))
            rows = tf.gather(rows, tf.reshape(places, tf.shape(ids)))
            rows.set_shape([*ids.shape, variable.shape[1]])
            if tape is not None:
                tape.watch(rows)
            found.append(Lookup(variable, ids, rows))
            return keras.ops.cast(rows, layer.compute_dtype)

        with contextlib.ExitStack() as stack:
            for layer in self._layers:
                vars(layer)["call"] = functools.partial(call, layer)
                stack.callback(vars(layer).pop, "call")
            yield found

    @contextlib.contextmanager
    def updating(self, strategy: tf.distribute.Strategy) -> Iterator[None]:
        """Makes optimizers update each part of a table on its server, while a step is traced."""
        with updating_parts(strategy, self._model.trainable_variables, self._optimizers):
            yield

    def make_stand_ins(self) -> list[tuple[keras.Variable, tf.Tensor]]:
        """Returns the tables with values that nothing may use; TensorFlow never computes them."""
        return [(v, tf.zeros(v.shape, v.value.dtype)) for v in self.variables]


def check_unused(stand_ins: Sequence[tuple[keras.Variable, tf.Tensor]]) -> None:
    """Checks that a traced training step has read no whole table."""
    for variable, value in stand_ins:
        if value.consumers():
            raise TfdistError(
                f"`shard_tables_bytes` cannot divide {variable.path}: a training step reads all of "
                "its rows, as a tied embedding, a regularizer or a layer with its own call does. "
                "Leave it out, or give a number above the bytes of this table."
            )


def add_lookups(
    variable: keras.Variable, lookups: Sequence[Lookup], gradients: Sequence[Any]
) -> tf.IndexedSlices | None:
    """Returns the gradient of a table, from those of all lookups; None if it has none."""
    found = [
        (lookup.ids, gradient)
        for lookup, gradient in zip(lookups, gradients, strict=True)
        if lookup.variable is variable and gradient is not None
    ]
    if not found:
        return None
    count, units = variable.shape
    ids = tf.concat([tf.reshape(tf.cast(own, tf.int64), [-1]) for own, _ in found], 0)
    values = tf.concat([tf.reshape(gradient, [-1, units]) for _, gradient in found], 0)
    return tf.IndexedSlices(values, ids, tf.constant([count, units], tf.int64))


def clip_rows(
    optimizer: keras.Optimizer, gradients: Sequence[Any], variables: Sequence[keras.Variable]
) -> list[Any]:
    """Returns gradients that an optimizer has clipped, with only the rows of tables.

    Keras 3.15 makes the gradient of a table whole when it clips by the norm over all gradients,
    which adds the slices of each row. Here they are added alone; nothing computes the whole.
    """
    values = [g.values if find_divided(v) else g for g, v in zip(gradients, variables, strict=True)]
    clipped = optimizer._clip_gradients(gradients)
    of_rows = optimizer._clip_gradients(values)
    return [
        whole
        if isinstance(whole, tf.IndexedSlices) or not find_divided(variable)
        else _add_slices(own, gradient)
        for whole, own, gradient, variable in zip(
            clipped, of_rows, gradients, variables, strict=True
        )
    ]


def send_parts(gradient: tf.IndexedSlices, variable: keras.Variable) -> tf.IndexedSlices:
    """Returns a gradient that the chief has cut, so that each server gets only its own rows."""
    divided = find_divided(variable)
    if divided is None:
        return gradient
    with tf.device(_CHIEF):
        return join(split(gradient, divided), divided)


def _add_slices(values: tf.Tensor, like: tf.IndexedSlices) -> tf.IndexedSlices:
    """Returns slices in which each row occurs once."""
    rows, places = tf.unique(like.indices)
    total = tf.math.unsorted_segment_sum(values, places, tf.size(rows))
    return tf.IndexedSlices(total, rows, like.dense_shape)


def _check_ids(ids: tf.Tensor, count: int) -> tf.Operation:
    """Fails as TensorFlow does where a table is whole. A part would name its own rows."""
    outside = tf.boolean_mask(ids, (ids < 0) | (ids >= count))
    found = tf.strings.reduce_join(tf.strings.as_string(outside[:1]))
    text = tf.strings.join(["indices[] = ", found, f" is not in [0, {count})"])
    return tf.debugging.Assert(tf.equal(tf.size(outside), 0), [text])


def _read_rows(divided: DividedVariable, place: int, ids: tf.Tensor) -> tf.Tensor:
    part = divided.parts[place]
    with tf.device(part.device):
        return part.sparse_read(ids)
