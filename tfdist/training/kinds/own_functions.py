"""The steps of a model that overrides `make_train_function` or a similar method, on one device."""

import dataclasses
from collections.abc import Callable
from typing import Any

from tfdist.aliases import BatchIterator
from tfdist.training.inputs.data_adapter import DataAdapter
from tfdist.training.kinds.base import StepLogs
from tfdist.training.kinds.synchronous import SynchronousSteps, to_numbers
from tfdist.training.replicas.metrics import flatten_logs


class OwnFunctionSteps(SynchronousSteps):
    """Calls the functions that these methods make as Keras does: with an iterator over batches.

    They are made once per call of `fit`, `evaluate` or `predict`, as in Keras: a method that keeps
    no function would have every step traced.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.input_s = None

    def prepare(self, adapter: DataAdapter) -> None:
        """Does nothing: only the functions know what they create."""

    def begin(self, *, restored: bool) -> None:
        self._model.make_train_function()

    def iterate_train(self, adapter: DataAdapter, **options: Any) -> Any:
        if self._model.train_function is None:  # outside of `fit`
            self._model.make_train_function()
        return super().iterate_train(_drop_places(adapter), **options)

    def iterate_eval(self, adapter: DataAdapter, *, steps: int | None = None) -> Any:
        self._model.make_test_function()
        return super().iterate_eval(_drop_places(adapter), steps=steps)

    def iterate_predict(self, adapter: DataAdapter, *, steps: int | None = None) -> Any:
        self._model.make_predict_function()
        return super().iterate_eval(_drop_places(adapter), steps=steps)

    @property
    def runs_ahead(self) -> bool:
        return False  # the function may itself wait for its results, or return what it changes

    def start(self, iterator: BatchIterator, num_steps: int = 1) -> Callable[[], list[StepLogs]]:
        found = [StepLogs(self._read("train", self._model.train_function(iterator)))]
        return lambda: found

    def start_evaluation(self, iterator: BatchIterator) -> Callable[[], dict[str, Any]]:
        logs = self._read("test", self._model.test_function(iterator))
        return lambda: logs

    def start_prediction(self, iterator: BatchIterator) -> Callable[[], list[tuple[Any, bool]]]:
        outputs = self._model.predict_function([next(iterator)])  # a list of batches
        return lambda: [(outputs, False)]

    def count_traces(self) -> dict[str, int]:
        return {}

    def _read(self, kind: str, logs: dict[str, Any]) -> dict[str, Any]:
        self.steps.log_names[kind] = set(logs)
        return to_numbers(flatten_logs(logs))


def _drop_places(adapter: DataAdapter) -> DataAdapter:
    return dataclasses.replace(adapter, with_places=False)
