"""The history of a call of `fit`, among the user's callbacks and in checkpoints."""

from collections.abc import Mapping
from typing import Any

import keras


def list_callbacks(callbacks: Any) -> list[keras.callbacks.Callback]:
    """Returns the callbacks that a user passed as None, one, several, or a Keras `CallbackList`."""
    if isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks = callbacks.callbacks
    return list(keras.tree.flatten(callbacks)) if callbacks else []


def find_history(callbacks: Any) -> keras.callbacks.History:
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
