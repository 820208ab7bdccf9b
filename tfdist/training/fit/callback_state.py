"""The state of callbacks between epochs, so that a continued run makes the same decisions.

Keras's callbacks reset this state in `on_train_begin`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np

# The attributes that hold the state of Keras's callbacks, from the source code of Keras 3.15.
_ATTRIBUTES: dict[type, tuple[str, ...]] = {
    keras.callbacks.EarlyStopping: ("best", "best_epoch", "stopped_epoch", "wait"),
    keras.callbacks.ReduceLROnPlateau: ("best", "cooldown_counter", "wait"),
    keras.callbacks.ModelCheckpoint: (
        "best",
        "_batches_seen_since_last_saving",
        "_last_batch_seen",
    ),
    keras.callbacks.SwapEMAWeights: ("_ema_weights_in_model",),
}


def read_callbacks(
    callbacks: Iterable[keras.callbacks.Callback],
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Returns the state of callbacks: a JSON-serializable part, and arrays.

    Covers EarlyStopping, ReduceLROnPlateau, ModelCheckpoint and SwapEMAWeights, and any callback
    of the user's with `get_state()`, which returns JSON-serializable state, and `set_state(state)`.
    """
    state: dict[str, Any] = {}
    arrays: dict[str, np.ndarray] = {}
    for name, callback, attributes in _list_stateful(callbacks):
        if hasattr(callback, "get_state"):
            state[name] = callback.get_state()
            continue
        state[name] = {key: to_json(getattr(callback, key)) for key in attributes}
        for index, weight in enumerate(getattr(callback, "best_weights", None) or ()):
            arrays[f"{name}/best_weights/{index:04d}"] = np.asarray(weight)
    return state, arrays


def write_callbacks(
    callbacks: Iterable[keras.callbacks.Callback],
    state: Mapping[str, Any],
    arrays: Mapping[str, np.ndarray],
) -> None:
    """Restores what `read_callbacks` returned for callbacks of the same classes in this order."""
    for name, callback, attributes in _list_stateful(callbacks):
        if name not in state:
            continue
        if hasattr(callback, "set_state"):
            callback.set_state(state[name])
            continue
        for key in attributes:
            setattr(callback, key, state[name][key])
        weights = [arrays[key] for key in sorted(arrays) if key.startswith(f"{name}/")]
        if weights:
            callback.best_weights = weights


def _list_stateful(
    callbacks: Iterable[keras.callbacks.Callback],
) -> Iterator[tuple[str, Any, Sequence[str]]]:
    """Yields each callback that has state: its name, itself, and the names of its attributes."""
    seen: dict[str, int] = {}
    for callback in callbacks:
        attributes = next((a for kind, a in _ATTRIBUTES.items() if isinstance(callback, kind)), ())
        if attributes or hasattr(callback, "get_state"):
            kind = type(callback).__name__
            seen[kind] = seen.get(kind, 0) + 1
            yield f"{kind}/{seen[kind]}", callback, attributes


def to_json(value: object) -> Any:
    """Returns a structure with its NumPy and TensorFlow values converted to plain Python ones."""
    if isinstance(value, dict):
        return {key: to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    if hasattr(value, "numpy"):
        value = value.numpy()
    return value.tolist() if isinstance(value, (np.generic, np.ndarray)) else value
