"""What workers must have in common before they train: numbers of the call, and of the model."""

import contextlib
import inspect
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

# Data are compared by their contents, and what only shows progress may differ.
_NOT_COMPARED = ("x", "y", "sample_weight", "callbacks", "verbose")
_OWN = ("name", "seed", "learning_rate")  # numbered, drawn, and compared after each step


def describe_call(
    method: Callable[..., Any], args: Sequence[object], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the arguments of a call by their names: numbers and texts, or whether one is given.

    Args:
      args: positional arguments, with the trainer.
    """
    try:
        bound = inspect.signature(method).bind(*args, **kwargs)
    except TypeError:
        return {}  # the call itself says what is wrong
    bound.apply_defaults()
    _, *given = bound.arguments.items()
    return {f"`{name}`": _read_value(v) for name, v in given if name not in _NOT_COMPARED}


def describe_program(model: keras.Model) -> dict[str, Any]:
    """Returns the numbers in the configurations of a model's layers, losses and optimizer.

    Names are left out, because they depend on what a worker has built before.
    """
    found = {"`steps_per_execution`": model.steps_per_execution}
    layers = [(f"layer {i} ({type(e).__name__})", e) for i, e in enumerate(model._flatten_layers())]
    others = [*keras.tree.flatten(getattr(model, "loss", None)), model.optimizer]
    for place, part in [*layers, *((type(part).__name__, part) for part in others)]:
        config = {"trainable": part.trainable} if isinstance(part, keras.Model) else {}
        if not isinstance(part, keras.Model) and hasattr(part, "get_config"):
            with contextlib.suppress(Exception):  # the user's own, which may not be written
                config = part.get_config()
        for name, number in _find_numbers(config).items():
            found[f"`{name}` of {place}"] = number
    return found


def _find_numbers(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the numbers of a configuration, and of those of initializers and the like in it."""
    found = {}
    for name, value in config.items():
        inner = value.get("config") if isinstance(value, dict) else None
        for key, number in inner.items() if isinstance(inner, dict) else [("", value)]:
            read = None if name in _OWN or key in _OWN else _read_number(number)
            if read is not None:
                found[f"{name}.{key}" if key else name] = read
    return found


def _read_value(value: Any) -> Any:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        value = [item for pair in value.items() for item in pair]
    number = _read_number(sorted(value) if isinstance(value, set) else value)
    return "given" if number is None else number


def _read_number(value: Any) -> Any:
    """Returns a number or a list of them, rounded, because processors round differently."""
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(f"{float(value):.6g}")
    if isinstance(value, (list, tuple)) and value:
        read = [_read_number(item) for item in value]
        return None if None in read else read
    return None
