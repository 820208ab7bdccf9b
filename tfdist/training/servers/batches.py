"""The batches of workers with parameter servers: read by a worker itself, or sent by the chief."""

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.aliases import Batch, Nested
from tfdist.graphs import list_operations
from tfdist.training.inputs.data_adapter import DataAdapter
from tfdist.training.replicas.random_layers import count_draws, list_seed_generators

# The tensors that a function captures are sent to a worker with each call.
_MAX_CAPTURED_BYTES = 1 << 20
_PYTHON_OPERATIONS = {"PyFunc", "PyFuncStateless", "EagerPyFunc"}


def make_reader(
    adapter: DataAdapter, read: Callable[[tf.Tensor], Any] | None
) -> Callable[[tf.Tensor, Any], Any]:
    """Returns (step, the chief's batch or None) -> the step's batch, read here if `read` can."""

    def hide(leaf: tf.Tensor, spec: tf.TypeSpec) -> Any:
        # Keras weights an output's loss by its examples only if their number is static.
        is_more_known = isinstance(spec, tf.TensorSpec) and leaf.shape != spec.shape
        return (
            tf.raw_ops.PlaceholderWithDefault(input=leaf, shape=spec.shape)
            if is_more_known
            else leaf
        )

    def read_step(step: tf.Tensor, batch: Batch) -> Any:
        batch = batch if read is None else read(step)
        return tf.nest.map_structure(hide, batch, adapter.batch_spec)

    return read_step


def find_reader(
    adapter: DataAdapter, read: Callable[[tf.Tensor], Any] | None
) -> Callable[[tf.Tensor], Any] | None:
    """Returns the function with which workers read their batches; None if the chief sends them."""
    return read if read and not adapter.is_single and _can_travel(read) else None


def _can_travel(read: Callable[[tf.Tensor], Any]) -> bool:
    """Returns whether workers can run a reader: it needs no Python, and captures little data."""
    function = tf.function(read).get_concrete_function(tf.TensorSpec([], tf.int64))
    if any(node.op in _PYTHON_OPERATIONS for node in list_operations(function.graph)):
        return False
    captured = function.captured_inputs
    if any(tensor.dtype in (tf.resource, tf.variant) for tensor in captured):
        return False
    return sum(_count_bytes(tensor) for tensor in captured) <= _MAX_CAPTURED_BYTES


def _count_bytes(tensor: tf.Tensor) -> int:
    if tensor.dtype == tf.string:
        return int(tf.reduce_sum(tf.strings.length(tensor)))
    return int(tf.size(tensor)) * tensor.dtype.size


def iterate_eval(adapter: DataAdapter) -> Iterator[Any]:
    """Yields the global batches of an evaluation, in this process."""
    single = adapter.read_single(of_training=False)
    if single is not None:
        return iter([single])
    adapter.count_evaluated()
    return _iterate(adapter.make_eval(tf.distribute.InputContext()))


def iterate_train(adapter: DataAdapter, start_step: int, total_steps: int) -> Iterator[Any]:
    """Yields the global batches from `start_step` on, in this process."""
    single = adapter.read_single(of_training=True)
    if single is not None:
        return iter([single])
    if adapter.begins_anew and adapter.num_steps is None:
        return _Passes(adapter, start_step)
    return _read_passes(adapter, start_step, total_steps)


class _Passes:
    """Iterates over passes of unknown length: raises StopIteration after each, then continues."""

    def __init__(self, adapter: DataAdapter, start_step: int):
        self._adapter = adapter
        self._step = start_step
        self._batches: Iterator[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._batches is None:
            step = self._adapter.open_train(self._step)
            self._batches = _iterate(self._adapter.make_train(tf.distribute.InputContext(), step))
        try:
            batch = next(self._batches)
        except StopIteration:
            self._batches = None
            raise
        self._step += 1
        return batch


def _read_passes(adapter: DataAdapter, start_step: int, total_steps: int) -> Iterator[Any]:
    """Yields the batches of all passes, and starts each pass when Keras would start it."""
    batches = _iterate(
        adapter.make_train(tf.distribute.InputContext(), adapter.open_train(start_step))
    )
    begins = False
    for step in range(start_step, total_steps):
        if begins:
            batches = _iterate(
                adapter.make_train(tf.distribute.InputContext(), adapter.open_train(step))
            )
        batch = next(batches, None)
        if batch is None:
            return
        begins = adapter.is_read(step + 1) and step + 1 < total_steps
        if begins and adapter.drops_between:
            adapter.drop_pass()
        elif begins and not adapter.is_python:
            batches, begins = (
                _iterate(
                    adapter.make_train(tf.distribute.InputContext(), adapter.open_train(step + 1))
                ),
                False,
            )
        yield batch


def _iterate(dataset: tf.data.Dataset) -> Iterator[Any]:
    """Yields the batches of a data adapter's dataset, without their positions."""
    return (batch for batch, _ in dataset)


class PsDraws:
    """The states with which the generators of a model begin each step.

    The servers hold the states after the last step that was taken, while several steps in flight
    have been given their own.
    """

    def __init__(self, model: keras.Model):
        self._model = model
        self.generators = list_seed_generators(model)
        self._states: list[np.ndarray] = []
        self._known: dict[tuple[str, str], list[int]] = {}
        self._counts: dict[str, list[int]] = {}
        self._next: dict[str, int] = {}

    def begin(self, kind: str, batch_spec: Nested[tf.TypeSpec], step: int) -> None:
        """Begins steps of a kind, `train`, `test` or `predict`, of which `step` is taken first."""
        self._states = [generator.state.numpy() for generator in self.generators]
        key = kind, repr(batch_spec)
        if key not in self._known:
            self._known[key] = count_draws(self._model, self.generators, batch_spec, kind=kind)
        self._counts[kind] = self._known[key]
        self._next[kind] = step

    def read(self, kind: str, step: int) -> list[tf.Tensor]:
        """Returns the state of each generator before a step that has not been taken."""
        ahead = step - self._next[kind]
        return [
            tf.constant(state + _make_advance(count * ahead, state))
            for state, count in zip(self._states, self._counts[kind], strict=True)
        ]

    def take(self, kind: str) -> None:
        """Counts the next step; only a training step has counted its draws on the servers."""
        self._next[kind] += 1
        self.count(kind, on_servers=kind != "train")

    def count(self, kind: str, *, on_servers: bool = True) -> None:
        """Counts the draws of a step, also on the servers if they do not know of it."""
        for place, count in enumerate(self._counts[kind]):
            if count:
                advance = _make_advance(count, self._states[place])
                self._states[place] = self._states[place] + advance
                if on_servers:
                    self.generators[place].state.assign_add(advance)


def _make_advance(count: int, state: np.ndarray) -> np.ndarray:
    return np.array([0, count]).astype(state.dtype)
