"""The step of a prediction: each replica computes the outputs for its examples."""

import contextlib
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdist.training.inputs.data_adapter import take_next
from tfdist.training.replicas.batch_share import make_part
from tfdist.training.replicas.compilation import compile_with_xla
from tfdist.training.replicas.random_layers import RowDraws, Rows, hide_rows

Pack = Callable[[Any], list[tuple[Any, bool]]]


def make_predict_step(
    model: keras.Model,
    strategy: tf.distribute.Strategy,
    *,
    compile_step: Callable[[Any], Any],
    placing: Callable[[], contextlib.AbstractContextManager[None]],
    draws: RowDraws | None,
    is_apart: bool,
    is_chief: bool,
    is_jitted: bool,
) -> Callable[[Any], tuple[Any, Pack]]:
    """Returns a function: iterator -> tensors, and a function of them, wherever they are by then.

    The latter returns each replica's outputs, in the model's structure, and whether they are a
    copy.

    Args:
      placing: opens the context in which the model is computed.
      draws: decides what the model draws; None to draw as Keras does.
      is_apart, is_chief: see `Steps`.
      is_jitted: whether XLA compiles what a replica computes, as in Keras.
    """
    structure: Any = None
    is_divided = strategy.num_replicas_in_sync > 1 or is_apart
    draws = draws if is_divided else None

    def replica_step(data: Any, place: Any) -> list[tf.Tensor]:
        nonlocal structure
        is_copy = tf.constant(False)
        drawing: Any = contextlib.nullcontext()
        if is_divided:
            known = None if isinstance(place, tuple) else place
            part = make_part(data, known, is_apart=is_apart)
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            is_copy = tf.logical_and(part.is_copy, tf.logical_or(replica > 0, not is_chief))
            if draws:
                drawing, data = draws.of(Rows(part.first, part.rows)), hide_rows(data)
        with drawing:
            structure = outputs = model.predict_step(data)
        # To count draws, replicas take turns: `structure` may be another one's by now.
        return [is_copy, *keras.tree.flatten(outputs)]

    if is_jitted:
        replica_step = compile_with_xla(replica_step)

    def run(iterator: Any) -> list[tuple[Any, ...]]:
        with placing(), draws.intercept() if draws else contextlib.nullcontext():
            values = strategy.run(replica_step, args=take_next(strategy, iterator))
        return [strategy.experimental_local_results(value) for value in values]

    compiled = compile_step(run)

    def pack(found: Any) -> list[tuple[Any, bool]]:
        copies, *leaves = found
        leaves = [leaf * (len(copies) // len(leaf)) for leaf in leaves]  # a None is not per replica
        return [
            (keras.tree.pack_sequence_as(structure, outputs), bool(is_copy))
            for is_copy, *outputs in zip(copies, *leaves, strict=True)
        ]

    return lambda iterator: (compiled(iterator), pack)
