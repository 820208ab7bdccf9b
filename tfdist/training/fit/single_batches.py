"""Keras's methods for single batches, under any strategy."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
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
from tfdist.training.step.outputs import join_batches, join_workers
from tfdist.training.workers.agreement import compare_batches
from tfdist.training.workers.communication import explain_lost_worker


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
    _signatures: frozenset[Any] = frozenset()

    @property
    def is_chief(self) -> bool:
        """Whether this process writes files, which a single process always does."""
        return self.engine.workers.is_chief

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
        adapter = self._make_batch_adapter(x, y, sample_weight, class_weight)
        logs = _format(self._train_single(adapter, resets=True))
        return logs if return_dict else self.model._flatten_metrics_in_order(logs)

    @on_all_workers
    def run_step(self, batch: Batch) -> dict[str, Any]:
        """Runs the model's own `train_step` on a global batch, and returns its logs.

        The metrics go on: only the user's own loop resets them. A batch like one before it needs no
        data adapter, which would take longer than a small step.

        Args:
          batch: tensors by name.
        """
        key, number = _sign(batch), self._num_single + 1
        is_due = self.engine.workers.count > 1 and _is_power_of_two(number)
        if key in self._signatures and self.engine.is_checked("train") and not is_due:
            self._num_single = number
            self.progress.steps_before += 1
            return self.engine.steps.train_alike(batch, key)
        logs = self._train_single(self._make_batch_adapter(batch), resets=False)
        if key is not None and type(self.engine.steps) is SynchronousSteps:
            self._signatures = self._signatures | {key}
        return logs

    def prepare_step(self, batch: Batch) -> None:
        """Creates all variables that `run_step` uses, without a step."""
        adapter = self._make_batch_adapter(batch)
        with self.engine.drawing_alike():
            self.engine.build(adapter).prepare(adapter)

    def _train_single(self, adapter: DataAdapter, *, resets: bool) -> dict[str, Any]:
        steps = self.engine.build(adapter)
        if self._is_due(adapter):
            self.engine.compare_weights()
        if resets and RESETS_ON_BATCH:
            self.engine.reset_metrics()
        iterator = steps.iterate_train(adapter, start_step=0, steps_per_epoch=1, total_steps=1)
        iterator = self.engine.check_division("train", iterator, adapter)
        trained = steps.train(iterator)[0]
        steps.sync(1, is_last=True)
        logs = steps.read_training_logs(trained)
        self.progress.steps_before += 1  # A callback may call this while `fit` counts its steps.
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
        logs = _format(self._evaluate(self._make_batch_adapter(x, y, sample_weight), steps=1))
        return logs if return_dict else self.model._flatten_metrics_in_order(logs)

    @run_own_first
    @on_all_workers
    def predict_on_batch(self, x: KerasData) -> Any:
        """Returns the model's outputs for one global batch."""
        return self._predict(self._make_batch_adapter(x), steps=1)

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
        return 1 if verbose == "auto" else int(verbose)

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
        return join_batches([join_workers(batch, self.engine.workers) for batch in batches])


def _format(logs: dict[str, Any]) -> dict[str, Any]:
    """Returns logs in the types that Keras's methods for single batches return."""
    if RETURNS_NUMBERS:
        return logs
    kind = keras.config.floatx()
    return keras.tree.map_structure(
        lambda log: np.array(log, kind if isinstance(log, float) else None), logs
    )


def _is_power_of_two(number: int) -> bool:
    return not number & (number - 1)


def _sign(batch: dict[str, Any]) -> Any:
    """Returns what two batches have in common if a data adapter leaves them as they are.

    None for what it converts.
    """
    leaves = list(batch.values())
    if not all(isinstance(leaf, tf.Tensor) for leaf in leaves):
        return None
    floatx = keras.config.floatx()
    if any(leaf.dtype.is_floating and leaf.dtype.name != floatx for leaf in leaves):
        return None
    return tuple((name, t.dtype, tuple(t.shape)) for name, t in sorted(batch.items()))
