"""Keras's methods for single batches, under any strategy."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.aliases import Batch, Callbacks, KerasData
from tfdist.data.digests import digest_batch
from tfdist.data.graph_errors import show_user_errors
from tfdist.internals import RESETS_ON_BATCH, RETURNS_NUMBERS
from tfdist.training.fit import evaluation
from tfdist.training.fit.engine import Engine
from tfdist.training.fit.own_methods import run_own_first
from tfdist.training.fit.schedule import Progress
from tfdist.training.inputs.data_adapter import DataAdapter
from tfdist.training.inputs.make_adapter import check_order, count_rows, make_data_adapter
from tfdist.training.kinds.synchronous import SynchronousSteps
from tfdist.training.step.outputs import join_batches, join_replicas, join_workers
from tfdist.training.workers.agreement import compare_batches
from tfdist.training.workers.taking_part import explain_lost_worker

_GivenBatch = tuple[KerasData, KerasData, KerasData]  # x, y, sample_weight


def on_all_workers(method: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a trainer's method draw from one global generator, and name what ends it in one line.

    Errors in the user's data, and other workers that do not take part, are named.
    """

    @functools.wraps(method)
    def draw_alike(trainer: "SingleBatches", *args: Any, **kwargs: Any) -> Any:
        with trainer.engine.drawing_alike():
            return method(trainer, *args, **kwargs)

    return explain_lost_worker(show_user_errors()(draw_alike))


class SingleBatches:
    """Trains, evaluates and predicts one global batch at a time; a base of `Trainer`."""

    model: keras.Model
    engine: Engine
    progress: Progress
    _num_single: int = 0
    _known: Mapping[Any, "_Known"] = MappingProxyType({})

    @property
    def is_chief(self) -> bool:
        """Whether this process writes files, which a single process always does."""
        return self.engine.workers.is_chief

    @property
    def compares_next(self) -> bool:
        """Whether workers compare the next single batch, and their programs: 1, 2, 4, 8, ..."""
        return _is_power_of_two(self._num_single + 1)

    @run_own_first
    @on_all_workers
    def train_on_batch(
        self,
        x: KerasData,
        y: KerasData = None,
        sample_weight: KerasData = None,
        class_weight: dict[int, float] | None = None,
        return_dict: bool = False,
    ) -> Any:
        """Trains on one global batch; arguments and result as in Keras."""
        logs = _format(self._train_single((x, y, sample_weight), class_weight, resets=True))
        return logs if return_dict else self.model._flatten_metrics_in_order(logs)

    @on_all_workers
    def run_step(self, batch: Batch) -> dict[str, Any]:
        """Runs the model's own `train_step` on a global batch, and returns its logs.

        The metrics go on: only the user's own loop resets them.

        Args:
          batch: tensors by name.
        """
        return self._train_single((batch, None, None), resets=False)

    def prepare_step(self, batch: Batch) -> None:
        """Creates all variables that `run_step` uses, without a step."""
        adapter = self._make_batch_adapter(batch)
        with self.engine.drawing_alike():
            self.engine.build(adapter).prepare(adapter)

    def _train_single(
        self,
        batch: _GivenBatch,
        class_weight: dict[int, float] | None = None,
        *,
        resets: bool,
    ) -> dict[str, Any]:
        engine, known = self.engine, None
        if class_weight is None and (known := self._find_known("train", batch)):
            steps, iterator = known
            if resets and RESETS_ON_BATCH:
                engine.reset_metrics()
        else:
            adapter = self._make_batch_adapter(*batch, class_weight)
            steps = engine.build(adapter)
            if self._is_due(adapter):
                engine.compare_weights()
            if resets and RESETS_ON_BATCH:
                engine.reset_metrics()
            iterator = steps.iterate_train(adapter, start_step=0, steps_per_epoch=1, total_steps=1)
            iterator = engine.check_division("train", iterator, adapter)
        trained = steps.train(iterator)[0]
        steps.sync(1, is_last=True)
        logs = steps.read_training_logs(trained)
        self.progress.steps_before += 1  # A callback may call this while `fit` counts its steps.
        if class_weight is None and known is None:
            self._learn("train", batch, adapter)
        return logs

    @run_own_first
    @on_all_workers
    def test_on_batch(
        self,
        x: KerasData,
        y: KerasData = None,
        sample_weight: KerasData = None,
        return_dict: bool = False,
    ) -> Any:
        """Evaluates one global batch; arguments and result as in Keras."""
        batch = x, y, sample_weight
        if known := self._find_known("test", batch):
            steps, iterator = known
            if RESETS_ON_BATCH:
                self.engine.reset_metrics()
            logs = steps.conclude("test", steps.start_evaluation(iterator)())
        else:
            adapter = self._make_batch_adapter(*batch)
            logs = self._evaluate(adapter, steps=1)
            self._learn("test", batch, adapter)
        logs = _format(logs)
        return logs if return_dict else self.model._flatten_metrics_in_order(logs)

    @run_own_first
    @on_all_workers
    def predict_on_batch(self, x: KerasData) -> Any:
        """Returns the model's outputs for one global batch."""
        batch = x, None, None
        if known := self._find_known("predict", batch):
            steps, iterator = known
            return self._join([join_replicas(steps.start_prediction(iterator)())])
        adapter = self._make_batch_adapter(x)
        outputs = self._predict(adapter, steps=1)
        self._learn("predict", batch, adapter)
        return outputs

    def _find_known(self, kind: str, batch: _GivenBatch) -> tuple[Any, Any] | None:
        """Returns the steps of a kind, and an iterator over a batch that is like one before it.

        It needs no data adapter, which would take longer than a small step. Returns None for
        other batches, and if the model has changed.
        """
        known = self._known.get((kind, _sign(batch)))
        is_due = self.engine.workers.count > 1 and self.compares_next
        if known is None or is_due or not self.engine.is_checked(kind):
            return None
        steps = self.engine.find_steps(kind)
        if steps is not known.steps:
            return None
        self._num_single += 1
        return steps, steps.give(known.convert(batch), known)

    def _learn(self, kind: str, batch: _GivenBatch, adapter: DataAdapter) -> None:
        """Keeps what a data adapter does to a batch, if it changes nothing but types."""
        signature, steps = _sign(batch), self.engine.find_steps(kind)
        if signature is None or type(steps) is not SynchronousSteps:
            return
        made = steps.read_given(adapter, of_training=kind == "train")
        if made is None:
            return
        known = _Known(steps, tf.nest.map_structure(lambda t: None if t is None else t.dtype, made))
        if known.is_right(batch, made):
            current = {key: other for key, other in self._known.items() if other.steps is steps}
            self._known = current | {(kind, signature): known}

    def _make_adapter(
        self, x: KerasData, y: KerasData = None, sample_weight: KerasData = None, **options: Any
    ) -> DataAdapter:
        if self.engine.workers.count > 1:
            check_order(x)
        adapter = make_data_adapter(
            x, y, sample_weight, num_replicas=self.engine.workers.num_replicas, **options
        )
        if adapter.digests is not None and self.engine.options.random_augmentation:
            adapter.digests.expect_augmentation()
        return adapter

    def _make_batch_adapter(
        self,
        x: KerasData,
        y: KerasData = None,
        sample_weight: KerasData = None,
        class_weight: Mapping[int, float] | None = None,
    ) -> DataAdapter:
        adapter = self._make_adapter(
            x,
            y,
            sample_weight,
            global_batch_size=count_rows(x),
            shuffle=False,
            class_weight=class_weight,
        )
        adapter = replace(adapter, is_single=True)
        self._num_single += 1
        if self.engine.workers.count > 1 and not self.engine.options.random_augmentation:
            is_due = self._is_due(adapter)
            batch = adapter.read_single(of_training=False) if is_due else None
            if batch is not None:
                compare_batches(self.engine.workers, {str(self._num_single): digest_batch(batch)})
        return adapter

    def _is_due(self, adapter: DataAdapter) -> bool:
        """Returns whether workers are compared: of single batches, at 1, 2, 4, 8 and so on."""
        return not adapter.is_single or _is_power_of_two(self._num_single)

    def _find_verbosity(self, verbose: int | str) -> int:
        if not self.is_chief:
            return 0
        return 1 if verbose == "auto" else int(verbose or 0)

    def _evaluate(
        self,
        adapter: DataAdapter,
        *,
        steps: int | None,
        callbacks: Callbacks = None,
        verbose: int | str = 0,
    ) -> dict[str, Any]:
        def make_callbacks(steps: int | None) -> keras.callbacks.CallbackList:
            verbosity = self._find_verbosity(verbose)
            return evaluation.make_callbacks(callbacks, self.model, verbose=verbosity, steps=steps)

        logs = evaluation.evaluate(
            self.engine,
            adapter,
            steps=steps,
            make_callbacks=make_callbacks,
            compares_weights=self._is_due(adapter),
        )
        assert logs is not None
        return logs

    def _predict(
        self,
        adapter: DataAdapter,
        *,
        steps: int | None,
        callbacks: Callbacks = None,
        verbose: int | str = 0,
    ) -> Any:
        callback_list = evaluation.make_callbacks(
            callbacks,
            self.model,
            verbose=self._find_verbosity(verbose),
            steps=steps or adapter.num_steps,
        )
        batches = evaluation.predict(
            self.engine,
            adapter,
            steps=steps,
            callbacks=callback_list,
            compares_weights=self._is_due(adapter),
        )
        return self._join(batches)

    def _join(self, batches: list[Any]) -> Any:
        return join_batches([join_workers(batch, self.engine.workers) for batch in batches])


def _format(logs: dict[str, Any]) -> dict[str, Any]:
    """Returns logs in the order and types of Keras's methods for single batches."""
    logs = dict(sorted(logs.items()))
    if RETURNS_NUMBERS:
        return logs
    kind = keras.config.floatx()
    return keras.tree.map_structure(
        lambda log: np.array(log, kind if isinstance(log, float) else None), logs
    )


def _is_power_of_two(number: int) -> bool:
    return not number & (number - 1)


class _Known:
    """What is known of batches that differ in their values only.

    Args:
      steps: those that have computed one.
      types: the structure of the batch that a data adapter makes of them, with its types.
    """

    def __init__(self, steps: SynchronousSteps, types: Any):
        self.steps, self._types = steps, types

    def convert(self, batch: _GivenBatch) -> Batch:
        """Returns a batch as the data adapter would."""
        leaves = iter(_list_present(batch))
        return tf.nest.map_structure(
            lambda dtype: None if dtype is None else _convert(next(leaves), dtype), self._types
        )

    def is_right(self, batch: _GivenBatch, made: Batch) -> bool:
        """Returns whether `convert` makes of a batch what the data adapter has made."""
        types = _list_present(self._types)
        if len(_list_present(batch)) != len(types) or tf.string in types:
            return False
        pairs = zip(tf.nest.flatten(self.convert(batch)), tf.nest.flatten(made), strict=True)
        return all(
            a is b is None or (a.shape == b.shape and a.numpy().tobytes() == b.numpy().tobytes())
            for a, b in pairs
        )


def _list_present(structure: Any) -> list[Any]:
    return [leaf for leaf in tf.nest.flatten(structure) if leaf is not None]


def _convert(leaf: np.ndarray | tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    tensor = tf.convert_to_tensor(leaf)
    return tensor if tensor.dtype == dtype else tf.cast(tensor, dtype)


def _sign(value: Any) -> Any:
    """Returns what batches have in common that differ in their values only; None if unknown."""
    try:
        return keras.config.floatx(), _sign_part(value)
    except TypeError:
        return None


def _sign_part(value: Any) -> Any:
    kind = type(value)
    if kind in (tuple, list, dict):
        parts = sorted(value.items()) if kind is dict else enumerate(value)
        return kind, *((name, _sign_part(part)) for name, part in parts)
    if kind is np.ndarray or isinstance(value, tf.Tensor):
        return kind, value.dtype, tuple(value.shape)
    if value is not None:
        raise TypeError
    return None
