"""The callbacks of one call of `fit`, `evaluate` or `predict`."""

from typing import Any

import keras


class CallbackList(keras.callbacks.CallbackList):
    """Keras's list, which prepares the logs of a batch only if a callback uses them.

    Keras's own does so for every batch, which takes a tenth of a small step.
    """

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self._overrides("on_train_batch_begin", "on_batch_begin"):
            super().on_train_batch_begin(batch, logs)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._overrides("on_train_batch_end", "on_batch_end"):
            super().on_train_batch_end(batch, logs)

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self._overrides("on_test_batch_begin"):
            super().on_test_batch_begin(batch, logs)

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._overrides("on_test_batch_end"):
            super().on_test_batch_end(batch, logs)

    def on_predict_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self._overrides("on_predict_batch_begin"):
            super().on_predict_batch_begin(batch, logs)

    def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._overrides("on_predict_batch_end"):
            super().on_predict_batch_end(batch, logs)

    def _overrides(self, *names: str) -> bool:
        """Returns whether a callback has a method of its own in place of one of Keras's."""
        return any(
            not getattr(getattr(callback, name), "_is_default", False)
            for callback in self.callbacks
            for name in names
        )
