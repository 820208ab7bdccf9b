"""The steps of a model that overrides `make_train_function` or a similar method, on one device."""

import dataclasses
from typing import Any

from tfdist.training.data_adapter import DataAdapter
from tfdist.training.replica_metrics import flatten_logs
from tfdist.training.synchronous import SynchronousSteps, to_numbers
from tfdist.training.training_steps import Trained


class OwnFunctionSteps(SynchronousSteps):
    """Calls the functions that these methods make as Keras does: with an iterator over batches.

    Args:
      *args, **kwargs: see `SynchronousSteps`.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.input_s = None

    def prepare(self, adapter: DataAdapter) -> None:
        """Does nothing: only the functions know what they create."""

    def iterate_train(self, adapter: DataAdapter, **options: Any) -> Any:
        return super().iterate_train(dataclasses.replace(adapter, with_places=False), **options)

    def iterate_eval(self, adapter: DataAdapter, *, steps: int | None = None) -> Any:
        return super().iterate_eval(dataclasses.replace(adapter, with_places=False), steps=steps)

    def train(self, iterator: Any, num_steps: int = 1) -> list[Trained]:
        logs = self._make("train")(iterator)
        return [Trained(to_numbers(flatten_logs(logs)))]

    def evaluate(self, iterator: Any) -> dict[str, Any]:
        return to_numbers(flatten_logs(self._make("test")(iterator)))

    def predict(self, iterator: Any) -> list[tuple[Any, bool]]:
        return [(self._make("predict")([next(iterator)]), False)]  # a list of batches

    def count_traces(self) -> dict[str, int]:
        return {}

    def _make(self, kind: str) -> Any:
        getattr(self._model, f"make_{kind}_function")()
        return getattr(self._model, f"{kind}_function")
