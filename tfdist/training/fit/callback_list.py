"""The callbacks of one call of `fit`, `evaluate` or `predict`."""

from collections.abc import Mapping, Sequence
from typing import Any

import keras

from tfdist.aliases import Callbacks
from tfdist.errors import TfdistError


class CallbackList(keras.callbacks.CallbackList):
    """Keras's list, which prepares the logs of a batch only if a callback uses them.

    Keras's own does so for every batch, which takes a tenth of a small step. And it calls callbacks
    that are all `async_safe` in threads of its own, in any order.
    """

    def __init__(self, callbacks: Sequence[keras.callbacks.Callback], **options: Any):
        super().__init__(callbacks, **options)
        self._async_train = self._async_test = self._async_predict = False

    def may_be_late(self, kind: str) -> bool:
        """Returns whether callbacks may see the end of a step while the next one runs.

        As in Keras, they allow it by `async_safe`, and Keras's progress bar does.
        """
        names = [f"on_{kind}_batch_end", *["on_batch_end"] * (kind == "train")]
        return all(
            getattr(callback, "async_safe", type(callback) is keras.callbacks.ProgbarLogger)
            for callback in self.callbacks
            if _overrides(callback, *names)
        )

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if self._overrides("on_train_batch_begin", "on_batch_begin"):
            super().on_train_batch_begin(batch, logs)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if self._overrides("on_train_batch_end", "on_batch_end"):
            super().on_train_batch_end(batch, logs)

    def on_test_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if self._overrides("on_test_batch_begin"):
            super().on_test_batch_begin(batch, logs)

    def on_test_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if self._overrides("on_test_batch_end"):
            super().on_test_batch_end(batch, logs)

    def on_predict_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if self._overrides("on_predict_batch_begin"):
            super().on_predict_batch_begin(batch, logs)

    def on_predict_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if self._overrides("on_predict_batch_end"):
            super().on_predict_batch_end(batch, logs)

    def _overrides(self, *names: str) -> bool:
        """Returns whether a callback has a method of its own in place of one of Keras's."""
        return any(_overrides(callback, *names) for callback in self.callbacks)


def _overrides(callback: keras.callbacks.Callback, *names: str) -> bool:
    return any(not getattr(getattr(callback, name), "_is_default", False) for name in names)


def list_callbacks(callbacks: Callbacks) -> list[keras.callbacks.Callback]:
    """Returns the callbacks that a user passed as None, one, several, or a Keras `CallbackList`.

    Raises:
      TfdistError: one of them is no callback.
    """
    if isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks = callbacks.callbacks
    chosen = list(keras.tree.flatten(callbacks)) if callbacks else []
    for each in chosen:
        if isinstance(each, type) or not hasattr(each, "set_model"):
            kind = f"the class {each.__name__}" if isinstance(each, type) else repr(each)
            raise TfdistError(
                f"`callbacks` contains {kind}, which is not a callback. Give objects of "
                "keras.callbacks.Callback or its subclasses."
            )
    return chosen


def find_history(callbacks: Callbacks) -> keras.callbacks.History:
    """Returns the `History` among the user's callbacks, as Keras does, or else a new one."""
    found = [c for c in list_callbacks(callbacks) if isinstance(c, keras.callbacks.History)]
    return found[-1] if found else keras.callbacks.History()


def read_history(history: keras.callbacks.History) -> dict[str, Any]:
    """Returns the epochs of a history, and their logs."""
    return {"epoch": history.epoch, "logs": history.history}


def write_history(history: keras.callbacks.History, state: Mapping[str, Any]) -> None:
    """Restores what `read_history` returned."""
    history.epoch = list(state["epoch"])
    history.history = {name: list(values) for name, values in state["logs"].items()}


def keep_epochs(history: keras.callbacks.History, num_epochs: int) -> None:
    """Drops all but the first epochs of a run from a history."""
    kept = [place for place, epoch in enumerate(history.epoch) if epoch < num_epochs]
    if len(kept) == len(history.epoch):
        return
    history.epoch = [history.epoch[place] for place in kept]
    history.history = {k: [v[place] for place in kept] for k, v in history.history.items()}
