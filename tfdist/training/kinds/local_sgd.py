"""Local SGD: workers train independently, and average their weights from time to time."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.aliases import BatchIterator
from tfdist.strategies.local_sgd_strategy import LocalSgdStrategy
from tfdist.training.kinds.base import StepLogs
from tfdist.training.kinds.synchronous import SynchronousSteps, to_numbers
from tfdist.training.replicas.random_layers import list_seed_generators
from tfdist.training.step_options import StepOptions
from tfdist.training.workers.communication import Workers

BYTES_PER_PACK = 4 << 20  # that are averaged at a time


class LocalSteps(SynchronousSteps):
    """The steps of a trainer under a `LocalSgdStrategy` with several workers.

    Each worker makes its own steps. After every `sync_every` steps, and at the end of an epoch,
    the workers' weights are replaced by their mean.
    """

    needs_even_epochs = True

    def __init__(
        self,
        model: keras.Model,
        strategy: LocalSgdStrategy,
        workers: Workers,
        options: StepOptions,
        **hooks: Any,
    ):
        super().__init__(model, strategy, workers, options, is_apart=True, **hooks)
        self._sync_every = strategy.options.sync_every
        self._averager = WeightAverager(model, strategy, workers)
        self._is_synced = True

    @property
    def state(self) -> list[keras.Variable]:
        return [*super().state, *self._averager.state]

    @property
    def shared(self) -> list[keras.Variable]:
        return self._averager.averaged

    def begin(self, *, restored: bool) -> None:
        self._averager.begin(restored=restored)

    def start(self, iterator: BatchIterator, num_steps: int = 1) -> Callable[[], list[StepLogs]]:
        found = super().start(iterator)()
        self._averager.count(found[0].rows)
        self._is_synced = False
        return lambda: found

    def sync(self, step: int, *, is_last: bool) -> bool:
        if is_last or step % self._sync_every == 0:
            self._averager.average()
            self._is_synced = True
        return self._is_synced

    def read_logs(self, logs: dict[str, Any]) -> dict[str, Any]:
        vector = self._workers.sum(self.steps.read())
        return logs | to_numbers(self.steps.logs_of["test"](vector))

    def read_training_logs(self, trained: StepLogs) -> dict[str, Any]:
        """Returns the logs of all workers right after a sync, else those of this worker alone."""
        if not self._is_synced:
            return trained.logs
        return to_numbers(self.steps.logs_of["train"](self._workers.sum(trained.vector)))

    def read_states(self) -> list[np.ndarray]:
        own = super().read_states()
        count = self._workers.count
        parts = [np.zeros([count, *value.shape]) for value in own]
        for part, value in zip(parts, own, strict=True):
            part[self._workers.index] = value
        whole = self._workers.sum(np.concatenate([part.ravel() for part in [*parts, np.zeros(0)]]))
        ends = np.cumsum([part.size for part in parts])
        return [
            rows.reshape(-1, *value.shape[1:]).astype(value.dtype)
            for rows, value in zip(np.split(whole, ends), own, strict=False)
        ]

    def write_states(self, states: Sequence[Any]) -> None:
        count, index = self._workers.count, self._workers.index
        mine = []
        for parts in map(np.asarray, states):
            if len(parts) % count == 0:  # of this number of workers, or as good as any division
                mine.append(np.split(parts, count)[index])
            else:
                mine.append(parts if index == 0 else np.zeros_like(parts))
        super().write_states(mine)

    def prepare_checkpoint(self) -> None:
        self._averager.collect()


class WeightAverager:
    """Replaces the workers' weights by their mean, weighted by the examples that each has seen.

    Every method but `count` communicates: all workers must call it at the same step.

    Args:
      model: the worker's model, whose variables and optimizer variables all exist.

    Source: Stich 2019, arXiv:1805.09767; the outer step is that of Wang et al. 2020,
      arXiv:1910.00643, algorithm 1, without its division by the learning rate.
    """

    def __init__(self, model: keras.Model, strategy: LocalSgdStrategy, workers: Workers):
        self._strategy = strategy
        self._workers = workers
        trainable = model.trainable_variables
        others = [v for v in model.variables if not any(v is other for other in trainable)]
        slots = [v for v in model.optimizer.variables if v is not model.optimizer._learning_rate]
        weights = [*trainable, *_select_floats(others)]
        slots = _select_floats(slots)
        own_slots = [] if strategy.options.average_optimizer else slots
        self._averaged = _Vector(weights + (slots if strategy.options.average_optimizer else []))
        self._own = _Vector(own_slots)
        self._seeds = [generator.state for generator in list_seed_generators(model)]
        self._num_trainable = sum(_count(v) for v in trainable)
        self._average = tf.function(self._average_in_graph, autograph=False)
        self._examples = 0.0
        self._has_outer_step = (
            strategy.options.outer_momentum > 0 or strategy.options.outer_learning_rate != 1
        )
        sizes = (self._averaged.size, self._num_trainable) if self._has_outer_step else (0, 0)
        self._anchor, self._momentum = (_make_state([n], self._averaged.dtype) for n in sizes)
        self._slots_of_workers = _make_state([workers.count, self._own.size], self._own.dtype)

    @property
    def state(self) -> list[keras.Variable]:
        """The variables that only checkpoints of local SGD hold, updated by `collect`."""
        momentum = [self._momentum] if self._has_outer_step else []
        return momentum + ([self._slots_of_workers] if self._own.size else [])

    @property
    def averaged(self) -> list[keras.Variable]:
        """The variables that `average` makes equal on all workers."""
        return list(self._averaged.variables)

    def count(self, num_examples: float) -> None:
        """Adds to the examples that this worker has seen since the last average."""
        self._examples += num_examples

    def begin(self, *, restored: bool) -> None:
        """Gives all workers the chief's weights, and each its own state from a checkpoint."""
        tf.function(self._copy_from_chief, autograph=False)()
        for state in self._seeds:
            # Exact: Keras's own seeds are below 2**31.
            state.assign(self._workers.sum(state.numpy() * float(self._workers.is_chief)))
        if restored and self._own.size:
            self._own.write(self._slots_of_workers.numpy()[self._workers.index])
        self._examples = 0.0

    def average(self) -> None:
        """Replaces every worker's weights by their mean, after the outer step if there is one."""
        self._average(tf.constant(self._examples, self._averaged.dtype))
        self._examples = 0.0

    def _copy_from_chief(self) -> None:
        anchors: list[tf.Tensor] = []
        for pack in self._averaged.packs:
            with tf.control_dependencies(anchors[-2:-1]):  # as in `_average_in_graph`
                mine = pack.pack()
            if not self._workers.is_chief:
                mine = tf.zeros_like(mine)
            anchors.append(self._workers.sum_in_graph(mine))
            pack.unpack(anchors[-1])
        if self._has_outer_step:
            self._anchor.assign(tf.concat(anchors, 0))

    def _average_in_graph(self, examples: tf.Tensor) -> None:
        total = self._workers.sum_in_graph(examples[None])[0]
        means: list[tf.Tensor] = []
        anchors: list[tf.Tensor] = []
        momenta: list[tf.Tensor] = []
        begin = 0
        for pack in self._averaged.packs:
            # A pack is copied while the one before it is summed, and not all of them at the start.
            with tf.control_dependencies(means[-2:-1]):
                mine = pack.pack() * examples
            mean = self._workers.sum_in_graph(mine) / total
            means.append(mean)
            if self._has_outer_step:
                end = begin + pack.size
                mean, momentum = self._step(mean, begin, end)
                anchors.append(mean)
                momenta.append(momentum)
                begin = end
            pack.unpack(mean)
        if self._has_outer_step:
            self._anchor.assign(tf.concat(anchors, 0))
            self._momentum.assign(tf.concat(momenta, 0))

    def _step(self, mean: tf.Tensor, begin: int, end: int) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the outer step of a part of the weights, and its momentum, if it is trained."""
        options, trained = self._strategy.options, max(begin, min(end, self._num_trainable))
        anchor, momentum = self._anchor.value[begin:trained], self._momentum.value[begin:trained]
        momentum = options.outer_momentum * momentum + (anchor - mean[: trained - begin])
        moved = anchor - options.outer_learning_rate * momentum
        return tf.concat([moved, mean[trained - begin :]], 0), momentum

    def collect(self) -> None:
        """Gathers the state that each worker keeps for itself on all workers, for a checkpoint."""
        if self._own.size:
            self._slots_of_workers.assign(self._workers.gather(self._own.read()[None]))


class _Vector:
    """Variables, read and written as one vector."""

    def __init__(self, variables: Sequence[keras.Variable], dtype: str | None = None):
        wide = any(variable.dtype == "float64" for variable in variables)
        self.dtype = dtype or ("float64" if wide else "float32")
        self.size = sum(_count(variable) for variable in variables)
        self.variables = variables
        self._read = tf.function(self.pack)
        self._write = tf.function(self.unpack)

    @property
    def packs(self) -> list["_Vector"]:
        """Vectors of a few megabytes, or of one variable, whose sums take little memory."""
        packs: list[list[keras.Variable]] = []
        left = 0
        for variable in self.variables:
            num_bytes = _count(variable) * tf.as_dtype(self.dtype).size
            if not packs or num_bytes > left:
                packs.append([])
                left = BYTES_PER_PACK
            packs[-1].append(variable)
            left -= num_bytes
        return [_Vector(pack, self.dtype) for pack in packs]

    def read(self) -> np.ndarray:
        return self._read().numpy() if self.variables else np.zeros(0, self.dtype)

    def write(self, vector: np.ndarray) -> None:
        self._write(tf.constant(vector, self.dtype))

    def pack(self) -> tf.Tensor:
        flat = [tf.reshape(tf.convert_to_tensor(v.value), [-1]) for v in self.variables]
        return tf.concat([tf.cast(part, self.dtype) for part in flat], 0)

    def unpack(self, vector: tf.Tensor) -> None:
        parts = tf.split(vector, [_count(variable) for variable in self.variables])
        for variable, part in zip(self.variables, parts, strict=True):
            variable.value.assign(tf.cast(tf.reshape(part, variable.shape), variable.dtype))


def _select_floats(variables: Sequence[keras.Variable]) -> list[keras.Variable]:
    return [variable for variable in variables if tf.as_dtype(variable.dtype).is_floating]


def _count(variable: keras.Variable) -> int:
    return int(np.prod(variable.shape))


def _make_state(shape: Sequence[int], dtype: str) -> keras.Variable:
    return keras.Variable("zeros", shape=shape, dtype=dtype, trainable=False)
